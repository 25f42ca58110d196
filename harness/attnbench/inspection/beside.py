"""An implementation beside the oracle, step by step, as far as its steps can be seen from outside.

Each step is given what the oracle made before it, so that a mistake shows in its own step; the output is the whole
module's. The weights that an implementation uses are its context where the values are unit vectors, since attention is
linear in its values. Shapes as in contract.py, with B=1 and S=T.
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
from attnbench.contract import Attention, BoundMask, Implementation, adapt
from attnbench.inspection.found import Beside, Compared, Outcome, shape_of
from attnbench.processes.failure import describe
from attnbench.reports.words import plain
from attnbench.workloads.sweep import make
from attnbench.workloads.workload import Workload

THREE = ("query", "key", "value")


class StrangeError(Exception):
    """An implementation gave something that cannot be compared."""


def load(spec: str) -> Implementation | str:
    """The implementation that a spec names, or why it cannot be had.

    Raises:
        ValueError: the value is none of the forms that can take part.
    """
    try:
        with _kept_apart():
            return adapt.implementation(spec)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody's module may raise anything
        return f"it cannot be loaded: {describe(error)[1]}"


def beside(implementation: Implementation | str, words: tuple[str, ...], workload: Workload, inputs: Inputs) -> Beside:
    """The implementation, or what became of it, beside the oracle on one sentence."""
    if isinstance(implementation, str):
        return Beside(words=words, compared=(_output(workload, inputs, implementation),))
    if reason := reason_against(implementation, workload):
        unmasked = make(workload.axes() | {"mask": "none"})
        advice = "" if reason_against(implementation, unmasked) else "; try --set mask=none"
        return Beside(words=words, unseen=plain(f"this workload is unsupported: {reason}{advice}"))
    mask, placed = bind(workload), place(inputs, workload)
    try:
        with _kept_apart():
            module = build(workload, implementation, placed, mask).module
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return Beside(words=words, compared=(_output(workload, inputs, f"it cannot be built: {describe(error)[1]}"),))
    x = placed.tensors["x"]
    last = _output(workload, inputs, lambda: module(x.clone(), None, mask=mask))
    attention = make(workload.axes() | {"scope": "attention"})
    reason = reason_against(implementation, attention)
    unseen = reason or ("" if hasattr(module, "attend") else f"{type(module).__name__} has no attend")
    parts, told = [], []
    if why := _hides_projections(module):
        told.append(f"its projections cannot be seen: {why}")
    else:
        parts += _projections(module, inputs, placed, is_right=last.outcome is Outcome.agrees)
    if unseen:
        told.append(f"its steps from scores to context cannot be seen: {unseen}")
    else:
        parts += _attended(module, workload, inputs, mask)
    return Beside(words=words, compared=(*parts, last), unseen=plain("; ".join(told)))


def _hides_projections(module: nn.Module) -> str:
    """Why nobody can ask the module for its query, key and value; or ""."""
    if not isinstance(module, Attention):
        return f"{type(module).__name__} is no attnbench.contract.Attention"
    kind: type[Attention] = type(module)
    if kind.project is Attention.project and kind.forward is not Attention.forward:
        return f"{kind.__name__} has a forward of its own, and no project"
    return ""


def _projections(module: nn.Module, inputs: Inputs, placed: Inputs, *, is_right: bool) -> list[Compared]:
    """Query, key and value, where the module says how it makes them; how it does is its own business if `is_right`."""
    project: Callable[..., Any] = module.project  # type: ignore[assignment] # the caller has seen that it is there
    x = placed.tensors["x"]
    oracles = oracle.project(inputs.tensors["x"], inputs.tensors["x"], inputs.weights)
    made: Any = None
    trouble = ""
    try:
        made = _called(lambda: project(x.clone(), x.clone()))
        if not isinstance(made, tuple | list) or len(made) != len(THREE):
            raise StrangeError("project must give query, key and value")  # noqa: TRY301 - told like what it raises
    except (Exception, SystemExit) as error:  # noqa: BLE001
        made, trouble = (None, None, None), _told(error)
    compared = []
    for name, letters, right, given in zip(THREE, ("BHTK", "BGSK", "BGSV"), oracles, made, strict=True):
        here = _compare(name, "projection", letters, right, trouble or partial(_same, given))
        compared.append(replace(here, is_private=is_right))
    return compared


def _same(given: Any) -> Any:  # noqa: ANN401 - whatever was given
    return given


def _attended(module: nn.Module, workload: Workload, inputs: Inputs, mask: BoundMask) -> list[Compared]:
    """The weights that the module uses on the oracle's query and key, then its context."""
    attend: Callable[..., Any] = module.attend  # type: ignore[assignment] # the caller has seen that it is there
    x = inputs.tensors["x"]
    query, key, value = oracle.project(x, x, inputs.weights)
    under = oracle.row_mask(workload, torch.arange(workload.seq_len))
    three = [tensor.float() for tensor in (query, key, value)]
    query, key, value = (tensor.double() for tensor in three)

    def here(query: Tensor, key: Tensor, value: Tensor) -> Any:  # noqa: ANN401 - whatever it gives
        return _called(lambda: attend(query.clone(), key.clone(), value.clone(), mask))

    def right(values: Tensor) -> Tensor:
        return oracle.attend(query, key, values, under)

    def theirs(values: Tensor) -> Any:  # noqa: ANN401
        return here(three[0], three[1], values)

    context = _compare("context", "context", "BHTV", right(value), lambda: here(*three))
    if context.trouble:  # it hides the weights too
        return [context]
    weights = recover_weights(right, value)
    return [_compare("weights", "weights", "BHTS", weights, lambda: recover_weights(theirs, three[2])), context]


def _output(workload: Workload, inputs: Inputs, call: Callable[[], Any] | str) -> Compared:
    """The module's output (B, T, D); or, as a text, why there is none."""
    right = oracle.answer(workload, inputs, torch.arange(workload.seq_len))
    return _compare("output", "output", "BTD", right, call if isinstance(call, str) else lambda: _called(call))


def _compare(name: str, step: str, letters: str, right: Tensor, make_it: Callable[[], Any] | str) -> Compared:
    """What `make_it` gives beside the oracle's; or, as a text, what happened instead."""
    found = Compared(name=name, step=step, letters=letters, oracle=right.numpy(), here=None)
    if isinstance(make_it, str):
        return replace(found, trouble=plain(make_it))
    try:
        given = make_it()
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return replace(found, trouble=plain(_told(error)))
    if not isinstance(given, Tensor) or given.shape != right.shape or not given.is_floating_point():
        wanted = shape_of(letters, tuple(right.shape))
        return replace(found, trouble=f"{_strange(given, letters)}; it should be {wanted}")
    return replace(found, here=given.detach().double().cpu().numpy())


def _strange(given: object, letters: str) -> str:
    """What came instead of a tensor of that shape, in words."""
    if not isinstance(given, Tensor):
        return f"it gave a {type(given).__name__}, no tensor"
    shape = tuple(given.shape)
    told = shape_of(letters, shape) if len(shape) == len(letters) else str(shape)
    kind = "" if given.is_floating_point() else f" of {str(given.dtype).removeprefix('torch.')}"
    return f"its shape is {told}{kind}"


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, StrangeError) else f"it raised {describe(error)[1]}"


def _called(call: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Call somebody's code: no graph is recorded, and what it prints does not mix with what we print."""
    with torch.no_grad(), _kept_apart():
        return call()


@contextlib.contextmanager
def _kept_apart() -> Iterator[None]:
    with contextlib.redirect_stdout(sys.stderr):
        yield
