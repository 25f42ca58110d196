"""What a cell will cost, told from shorter lengths before it is tried at its own: time of a call, and peak memory.

The staircase: one call each at lengths that grow fourfold, as long as the next step should fit. The last two steps give
the exponent of growth, and with it the forecast. A cell that is wrongly thought to fit costs a little time; one that is
wrongly thought not to is lost: so doubt counts for the cell. Why: docs/adr/0005.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec

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
"""A cell whose score matrix, this many times over, fits into the limit is not asked for its memory: no form of
attention keeps more copies of it."""
SECOND_LOOKS = 3
DOUBTFUL = 4.0
"""A forecast of more than this many times the limit is beyond doubt, once it was made twice."""


class OutOfReachError(Exception):
    """A cell was foreseen not to fit; carries the status and the reason."""

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
class Trial:
    """What one call at one length cost."""

    length: int
    call_s: float
    peak_bytes: float | None


def stairs(workload: Workload, *, compiles: bool = False) -> Iterator[Workload]:
    """The same workload at lengths that grow fourfold, all below its own, the last at least a quarter of it.

    With `compiles`, at few lengths, the last at least a sixteenth of its own.
    """
    length, step = (FIRST_COMPILED_LEN, COMPILED_STEP) if compiles else (FIRST_LEN, STEP)
    while length < workload.seq_len:
        yield at_length(workload, length)
        length *= step


def at_length(workload: Workload, query_len: int) -> Workload:
    """The workload at another query length, its key length in proportion and its mask made to fit."""
    key_len = max(1, round(query_len * workload.kv_len / workload.seq_len))
    mask = str(workload.mask_rule.at_other_length())
    return msgspec.structs.replace(workload, seq_len=query_len, kv_len=key_len, mask=mask)


def foresee(
    workload: Workload, limits: Limits, attempt: Callable[[Workload, bool], Trial | None], *, compiles: bool = False
) -> None:
    """Climb the staircase with `attempt(workload, with_memory)`; return if the cell should fit.

    An attempt that gives None, since the step's length is none of the implementation's, is passed over.

    Raises:
        OutOfReachError: the forecast is above a limit; the message gives it and what it was told from.
    """
    with_memory = SCORE_COPIES * score_matrix_bytes(workload) > limits.memory_bytes
    trials: list[Trial] = []
    for step in stairs(workload, compiles=compiles):
        if trials and _forecast([t.call_s for t in trials], trials, step.seq_len, least=0.0) > limits.call_s:
            break
        trial = attempt(step, with_memory)
        if trial is not None:
            trials.append(trial)
    if not trials:
        return
    call_s = _forecast([trial.call_s for trial in trials], trials, workload.seq_len)
    for look in range(SECOND_LOOKS):  # one slow call must not cost a cell its place
        if limits.call_s < call_s and (look == 0 or call_s <= DOUBTFUL * limits.call_s):
            again = attempt(at_length(workload, trials[-1].length), False)  # noqa: FBT003 - its signature
            last = trials[-1]
            trials[-1] = replace(last, call_s=min(last.call_s, again.call_s if again else math.inf))
            call_s = _forecast([trial.call_s for trial in trials], trials, workload.seq_len)
    if call_s > limits.call_s:
        told = f"it takes {show(trials[-1].call_s, 's')} at seq_len {trials[-1].length}"
        limit = f"over the limit of {show(limits.call_s, 's')}"
        raise OutOfReachError(Status.timeout, f"predicted {show(call_s, 's')} for one call, {limit}; {told}")
    peaks = [trial.peak_bytes for trial in trials if trial.peak_bytes is not None]
    if not peaks:
        return
    peak = _forecast(peaks, trials, workload.seq_len)
    if peak > limits.memory_bytes:
        told = f"it needs {show(peaks[-1], 'bytes')} at seq_len {trials[-1].length}"
        limit = f"over the limit of {show(limits.memory_bytes, 'bytes')}"
        raise OutOfReachError(Status.out_of_memory, f"predicted a peak of {show(peak, 'bytes')}, {limit}; {told}")


def _forecast(costs: list[float], trials: list[Trial], length: int, least: float = 1.0) -> float:
    """The cost at `length`, by the growth between the last two trials, its exponent held between `least` and 2.

    After one trial alone the cost is taken as linear: at the first step it is mostly overhead.
    """
    last = trials[-1].length
    exponent = 1.0
    if len(costs) > 1 and costs[-2] > 0 and costs[-1] > 0:
        exponent = math.log(costs[-1] / costs[-2]) / math.log(last / trials[-2].length)
    return costs[-1] * math.pow(length / last, min(2.0, max(least, exponent)))
