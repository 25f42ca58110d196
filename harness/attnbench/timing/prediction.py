"""Predict what a cell will cost from shorter lengths, before it is tried: the time of a call, and its peak memory.

The staircase: one call each at lengths that grow fourfold, as long as the next step should fit. The last two steps give
the exponent of growth, and with it the prediction. A cell that is wrongly thought to fit costs a little time; one that
is wrongly thought not to is lost: so what is uncertain is tried. Why: docs/adr/0005.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from attnbench.storage.records import Status
from attnbench.units import show
from attnbench.workloads.counts import score_matrix_bytes
from attnbench.workloads.workload import Workload

FIRST_LEN = 16
STEP = 4
FIRST_COMPILED_LEN = 256
COMPILED_STEP = 16
"""What compiles for every length climbs by fewer: always the same ones, which a compiler's own cache knows by then."""
SCORE_COPIES = 8
"""The memory of a cell is not measured where its score matrix, this many times over, fits into the limit: no form of
attention keeps more copies of it."""
MOST_RETRIES = 3
CLEARLY_OVER = 4.0
"""A prediction of more than this many times the limit is not tried again, once it was made twice."""


class OutOfReachError(Exception):
    """A cell is predicted not to fit; carries the status and the reason."""

    def __init__(self, status: Status, reason: str) -> None:
        """Keep both."""
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a single call may cost."""

    call_s: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class CallCost:
    """What one call at one length cost."""

    length: int
    call_s: float
    peak_bytes: float | None


def staircase(workload: Workload, *, compiles: bool = False) -> Iterator[Workload]:
    """The same workload at lengths that grow fourfold, all below its own, the last at least a quarter of it.

    With `compiles`, at few lengths, the last at least a sixteenth of its own.
    """
    length, step = (FIRST_COMPILED_LEN, COMPILED_STEP) if compiles else (FIRST_LEN, STEP)
    while length < workload.seq_len:
        yield workload.at_length(length)
        length *= step


def require_within(
    limits: Limits, workload: Workload, attempt: Callable[[Workload, bool], CallCost | None], *, compiles: bool = False
) -> None:
    """Climb the staircase with `attempt(workload, with_memory)`; return if the cell should fit.

    A step at which `attempt` returns None, since the implementation does not support its length, is passed over.

    Raises:
        OutOfReachError: the prediction is above a limit; the message gives it and what it follows from.
    """
    with_memory = SCORE_COPIES * score_matrix_bytes(workload) > limits.memory_bytes
    costs: list[CallCost] = []
    for step in staircase(workload, compiles=compiles):
        if costs and _at(step.seq_len, costs, [cost.call_s for cost in costs], least=0.0) > limits.call_s:
            break
        cost = attempt(step, with_memory)
        if cost is not None:
            costs.append(cost)
    if not costs:
        return
    call_s = _at(workload.seq_len, costs, [cost.call_s for cost in costs])
    for retry in range(MOST_RETRIES):  # one slow call must not cost a cell its place
        if limits.call_s < call_s and (retry == 0 or call_s <= CLEARLY_OVER * limits.call_s):
            last = costs[-1]
            again = attempt(workload.at_length(last.length), False)  # noqa: FBT003 - its signature
            costs[-1] = replace(last, call_s=min(last.call_s, again.call_s if again else math.inf))
            call_s = _at(workload.seq_len, costs, [cost.call_s for cost in costs])
    if call_s > limits.call_s:
        why = f"over the limit of {show(limits.call_s, 's')}; it takes {show(costs[-1].call_s, 's')}"
        message = f"predicted {show(call_s, 's')} for one call, {why} at seq_len {costs[-1].length}"
        raise OutOfReachError(Status.timeout, message)
    peaks = [cost.peak_bytes for cost in costs if cost.peak_bytes is not None]
    if peaks and (peak := _at(workload.seq_len, costs, peaks)) > limits.memory_bytes:
        why = f"over the limit of {show(limits.memory_bytes, 'bytes')}; it needs {show(peaks[-1], 'bytes')}"
        message = f"predicted a peak of {show(peak, 'bytes')}, {why} at seq_len {costs[-1].length}"
        raise OutOfReachError(Status.out_of_memory, message)


def _at(length: int, costs: list[CallCost], values: list[float], least: float = 1.0) -> float:
    """The value at `length`, by the growth between the last two costs, its exponent held between `least` and 2.

    After one cost alone growth is taken as linear: at the first step it is mostly overhead.
    """
    last = costs[-1].length
    exponent = 1.0
    if len(values) > 1 and values[-2] > 0 and values[-1] > 0:
        exponent = math.log(values[-1] / values[-2]) / math.log(last / costs[-2].length)
    return values[-1] * math.pow(length / last, min(2.0, max(least, exponent)))
