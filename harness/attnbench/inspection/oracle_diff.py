"""An implementation compared with the oracle, step by step, as far as its steps can be seen from outside.

Each step is given what the oracle computed before it, so that a mistake shows in its own step; the output is the whole
module's. The weights that an implementation uses are its context where the values are unit vectors, since attention is
linear in its values. Shapes as in the contract, with B=1 and S=T.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.checking import oracle
from attnbench.checking.case import bind, build, place, reason_against
from attnbench.checking.diagnosis import recover_weights
from attnbench.checking.inputs import Inputs
from attnbench.contract import Attention, BoundMask, Implementation, loading
from attnbench.inspection.results import Comparison, OracleDiff, Outcome, shape_of
from attnbench.processes.failure import describe
from attnbench.units import plain
from attnbench.workloads.sweep import make
from attnbench.workloads.workload import Workload

PROJECTED = {"query": "BHTK", "key": "BGSK", "value": "BGSV"}


class UnexpectedResultError(Exception):
    """An implementation gave something that cannot be compared."""


def load(spec: str) -> Implementation | str:
    """The implementation that a spec names, or why it cannot be loaded.

    Raises:
        ValueError: the value is none of the forms that can take part.
    """
    try:
        with _output_redirected():
            return loading.implementation(spec)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody's module may raise anything
        return f"it cannot be loaded: {describe(error)[1]}"


def compare(
    implementation: Implementation | str, words: tuple[str, ...], workload: Workload, inputs: Inputs
) -> OracleDiff:
    """Compare the implementation with the oracle on one sentence; a text says why there is no implementation."""
    if isinstance(implementation, str):
        return OracleDiff(words=words, comparisons=(_output(workload, inputs, implementation),))
    if reason := reason_against(implementation, workload):
        unmasked = make(workload.axes() | {"mask": "none"})
        advice = "" if reason_against(implementation, unmasked) else "; try --set mask=none"
        return OracleDiff(words=words, unseen=plain(f"this workload is unsupported: {reason}{advice}"))
    mask, placed = bind(workload), place(inputs, workload)
    try:
        with _output_redirected():
            module = build(workload, implementation, placed, mask).module
    except (Exception, SystemExit) as error:  # noqa: BLE001
        trouble = f"it cannot be built: {describe(error)[1]}"
        return OracleDiff(words=words, comparisons=(_output(workload, inputs, trouble),))
    x = placed.tensors["x"]
    output = _output(workload, inputs, lambda: module(x.clone(), None, mask=mask))
    comparisons: list[Comparison] = []
    unseen = []
    if reason := _reason_against_projections(module):
        unseen.append(f"its projections cannot be seen: {reason}")
    else:
        comparisons += _projections(module, inputs, x, is_right=output.outcome is Outcome.agrees)
    reason = reason_against(implementation, make(workload.axes() | {"scope": "attention"}))
    if reason is None and not hasattr(module, "attend"):
        reason = f"{type(module).__name__} has no attend"
    if reason:
        unseen.append(f"its steps from scores to context cannot be seen: {reason}")
    else:
        comparisons += _weights_and_context(module, workload, inputs, mask)
    return OracleDiff(words=words, comparisons=(*comparisons, output), unseen=plain("; ".join(unseen)))


def _reason_against_projections(module: nn.Module) -> str:
    """Why the module cannot be asked for its query, key and value; or ""."""
    if not isinstance(module, Attention):
        return f"{type(module).__name__} is no attnbench.contract.Attention"
    kind: type[Attention] = type(module)
    if kind.project is Attention.project and kind.forward is not Attention.forward:
        return f"{kind.__name__} has a forward of its own, and no project"
    return ""


def _projections(module: nn.Module, inputs: Inputs, x: Tensor, *, is_right: bool) -> list[Comparison]:
    """Query, key and value; where the output is right, a difference is the module's own way to compute it."""
    project: Callable[..., Any] = module.project  # type: ignore[assignment] # the caller has seen that it is there
    expected = oracle.project(inputs.tensors["x"], inputs.tensors["x"], inputs.weights)
    given: Any = (None, None, None)
    trouble = ""
    try:
        given = _called(lambda: project(x.clone(), x.clone()))
        if not isinstance(given, tuple | list) or len(given) != len(PROJECTED):
            raise UnexpectedResultError("project must give query, key and value")  # noqa: TRY301 - as what it raises
    except (Exception, SystemExit) as error:  # noqa: BLE001
        given, trouble = (None, None, None), _described(error)
    comparisons = []
    parts = dict(zip(PROJECTED, given, strict=True))
    for (name, letters), right in zip(PROJECTED.items(), expected, strict=True):
        comparison = _compared(name, "projection", letters, right, trouble or partial(parts.get, name))
        comparisons.append(replace(comparison, is_private=is_right))
    return comparisons


def _weights_and_context(module: nn.Module, workload: Workload, inputs: Inputs, mask: BoundMask) -> list[Comparison]:
    """The weights that the module uses on the oracle's query and key, then its context."""
    attend: Callable[..., Any] = module.attend  # type: ignore[assignment] # the caller has seen that it is there
    x = inputs.tensors["x"]
    query, key, value = (tensor.float() for tensor in oracle.project(x, x, inputs.weights))
    rows = oracle.row_mask(workload, torch.arange(workload.seq_len))

    def right(values: Tensor) -> Tensor:
        return oracle.attend(query.double(), key.double(), values, rows)

    def actual(values: Tensor) -> Any:  # noqa: ANN401 - whatever it gives
        return _called(lambda: attend(query.clone(), key.clone(), values.clone(), mask))

    context = _compared("context", "context", "BHTV", right(value.double()), lambda: actual(value))
    if context.trouble:  # it hides the weights too
        return [context]
    expected = recover_weights(right, value.double())
    return [_compared("weights", "weights", "BHTS", expected, lambda: recover_weights(actual, value)), context]


def _output(workload: Workload, inputs: Inputs, call: Callable[[], Any] | str) -> Comparison:
    """The module's output (B, T, D); or, as a text, why there is none."""
    right = oracle.answer(workload, inputs, torch.arange(workload.seq_len))
    return _compared("output", "output", "BTD", right, call if isinstance(call, str) else lambda: _called(call))


def _compared(name: str, step: str, letters: str, right: Tensor, call: Callable[[], Any] | str) -> Comparison:
    """What `call` returns, compared with the oracle's; or, as a text, what happened instead."""
    comparison = Comparison(name=name, step=step, letters=letters, oracle=right.numpy(), actual=None)
    if isinstance(call, str):
        return replace(comparison, trouble=plain(call))
    try:
        given = call()
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return replace(comparison, trouble=plain(_described(error)))
    if isinstance(given, Tensor) and given.shape == right.shape and given.is_floating_point():
        return replace(comparison, actual=given.detach().double().cpu().numpy())
    if isinstance(given, Tensor):
        shape = tuple(given.shape)
        text = shape_of(letters, shape) if len(shape) == len(letters) else str(shape)
        kind = "" if given.is_floating_point() else f" of {str(given.dtype).removeprefix('torch.')}"
        unexpected = f"its shape is {text}{kind}"
    else:
        unexpected = f"it gave a {type(given).__name__}, no tensor"
    return replace(comparison, trouble=f"{unexpected}; it should be {shape_of(letters, tuple(right.shape))}")


def _described(error: BaseException) -> str:
    return str(error) if isinstance(error, UnexpectedResultError) else f"it raised {describe(error)[1]}"


def _called(call: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Call somebody's code: no graph is recorded, and what it prints does not mix with what we print."""
    with torch.no_grad(), _output_redirected():
        return call()


@contextlib.contextmanager
def _output_redirected() -> Iterator[None]:
    with contextlib.redirect_stdout(sys.stderr):
        yield
