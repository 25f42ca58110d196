"""An implementation compared with the oracle, step by step, as far as its steps can be seen from outside.

Each step is given what the oracle computed before it, so that a mistake shows in its own step; the output is the whole
module's. The weights that an implementation uses are its context where the values are unit vectors, since attention is
linear in its values. Shapes as in the contract, with B=1 and S=T.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnbench.checking import oracle
from attnbench.checking.case import bind, build, place, reason_against
from attnbench.checking.diagnosis import recover_weights
from attnbench.checking.inputs import Inputs
from attnbench.contract import Attention, BoundMask, Implementation, loading
from attnbench.inspection.results import Comparison, OracleDiff, Outcome, shape_of
from attnbench.processes.worker.attempts import describe
from attnbench.units import plain
from attnbench.workloads.sweep import make
from attnbench.workloads.workload import Workload

PROJECTED = {"query": "BHTK", "key": "BGSK", "value": "BGSV"}


class _Trouble(str):
    """What happened where there is no result, in words."""

    __slots__ = ()


def load(spec: str) -> Implementation | str:
    """The implementation that a spec names, or why it cannot be loaded.

    Raises:
        ValueError: the value is none of the forms that can take part.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
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
        return OracleDiff(words=words, comparisons=(_output(workload, inputs, _Trouble(implementation)),))
    if reason := reason_against(implementation, workload):
        unmasked = make(workload.axes() | {"mask": "none"})
        advice = "" if reason_against(implementation, unmasked) else "; try --set mask=none"
        return OracleDiff(words=words, unseen=plain(f"this workload is unsupported: {reason}{advice}"))
    mask, placed = bind(workload), place(inputs, workload)
    module = _asked(lambda: build(workload, implementation, placed, mask).module, "it cannot be built:")
    if isinstance(module, _Trouble):
        return OracleDiff(words=words, comparisons=(_output(workload, inputs, module),))
    x = placed.tensors["x"]
    output = _output(workload, inputs, _asked(lambda: module(x.clone(), None, mask=mask)))
    comparisons: list[Comparison] = []
    unseen = []
    kind = type(module)
    if not isinstance(module, Attention):
        unseen.append(f"its projections cannot be seen: {kind.__name__} is no attnbench.contract.Attention")
    elif kind.project is Attention.project and kind.forward is not Attention.forward:
        unseen.append(f"its projections cannot be seen: {kind.__name__} has a forward of its own, and no project")
    else:  # where the output is right, a difference is the module's own way to compute it
        comparisons += _projections(module, inputs, x, is_right=output.outcome is Outcome.agrees)
    reason = reason_against(implementation, make(workload.axes() | {"scope": "attention"}))
    if reason is None and not hasattr(module, "attend"):
        reason = f"{kind.__name__} has no attend"
    if reason:
        unseen.append(f"its steps from scores to context cannot be seen: {reason}")
    else:
        comparisons += _weights_and_context(module, workload, inputs, mask)
    return OracleDiff(words=words, comparisons=(*comparisons, output), unseen=plain("; ".join(unseen)))


def _projections(module: Attention, inputs: Inputs, x: Tensor, *, is_right: bool) -> list[Comparison]:
    """Query, key and value."""
    given = _asked(lambda: module.project(x.clone(), x.clone()))
    if isinstance(given, _Trouble):
        parts: Any = [given] * len(PROJECTED)
    elif isinstance(given, tuple | list) and len(given) == len(PROJECTED):
        parts = given
    else:
        parts = [_Trouble("project must give query, key and value")] * len(PROJECTED)
    right = oracle.project(inputs.tensors["x"], inputs.tensors["x"], inputs.weights)
    return [
        _compared(name, "projection", letters, *each, is_private=is_right)
        for (name, letters), each in zip(PROJECTED.items(), zip(right, parts, strict=True), strict=True)
    ]


def _weights_and_context(module: Any, workload: Workload, inputs: Inputs, mask: BoundMask) -> list[Comparison]:  # noqa: ANN401
    """The weights that the module uses on the oracle's query and key, then its context."""
    x = inputs.tensors["x"]
    query, key, value = (tensor.float() for tensor in oracle.project(x, x, inputs.weights))
    rows = oracle.row_mask(workload, torch.arange(workload.seq_len))

    def right(values: Tensor) -> Tensor:
        return oracle.attend(query.double(), key.double(), values, rows)

    def actual(values: Tensor) -> Any:  # noqa: ANN401 - whatever it gives
        return module.attend(query.clone(), key.clone(), values.clone(), mask)

    context = _compared("context", "context", "BHTV", right(value.double()), _asked(lambda: actual(value)))
    if context.trouble:  # it hides the weights too
        return [context]
    expected, weights = recover_weights(right, value.double()), _asked(lambda: recover_weights(actual, value))
    return [_compared("weights", "weights", "BHTS", expected, weights), context]


def _output(workload: Workload, inputs: Inputs, given: object) -> Comparison:
    """The module's output (B, T, D)."""
    return _compared("output", "output", "BTD", oracle.answer(workload, inputs, torch.arange(workload.seq_len)), given)


def _compared(  # noqa: PLR0913
    name: str, step: str, letters: str, right: Tensor, given: object, *, is_private: bool = False
) -> Comparison:
    """What somebody's code gave, compared with the oracle's."""
    actual, trouble = None, ""
    if isinstance(given, _Trouble):
        trouble = plain(given)
    elif isinstance(given, Tensor) and given.shape == right.shape and given.is_floating_point():
        actual = given.detach().double().cpu().numpy()
    elif isinstance(given, Tensor):
        shape = tuple(given.shape)
        text = shape_of(letters, shape) if len(shape) == len(letters) else str(shape)
        dtype = "" if given.is_floating_point() else f" of {str(given.dtype).removeprefix('torch.')}"
        trouble = f"its shape is {text}{dtype}; it should be {shape_of(letters, tuple(right.shape))}"
    else:
        trouble = f"it gave a {type(given).__name__}, no tensor; it should be {shape_of(letters, tuple(right.shape))}"
    return Comparison(
        name,
        step=step,
        letters=letters,
        oracle=right.numpy(),
        actual=actual,
        trouble=trouble,
        is_private=is_private,
    )


def _asked(call: Callable[[], Any], what: str = "it raised") -> Any:  # noqa: ANN401 - whatever somebody's code gives
    """What `call` gives, or what it raises, in words. No graph is recorded, and what is printed goes to stderr."""
    try:
        with torch.no_grad(), contextlib.redirect_stdout(sys.stderr):
            return call()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody's module may raise anything
        return _Trouble(f"{what} {describe(error)[1]}")
