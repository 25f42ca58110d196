"""Calls that may fail: to predict the cost of a cell, or to test a prediction; and descriptions of failures.

The staircase: one call each at lengths that grow fourfold, as long as the next step should fit. The last two steps give
the exponent of growth, and from it the predicted time and peak memory of a call. A cell that is wrongly predicted to
fit costs a little time; one that is wrongly predicted not to fit is lost: so uncertain cells are tried. Why:
docs/adr/0005.
"""

import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from attnbench.checking.case import NoBackwardError, build, draw_normal, place, reason_against
from attnbench.checking.reference import UncheckableError
from attnbench.contract import Implementation, NotOneGraphError
from attnbench.contract.declared import words
from attnbench.devices import CaptureError, device
from attnbench.processes.messages import Limits
from attnbench.processes.remote import CandidateError
from attnbench.ranks import RankLostError, RankSilentError
from attnbench.storage.events import SHARE_OF_FREE
from attnbench.storage.records import Status
from attnbench.units import show
from attnbench.workloads.counts import input_numbers, score_matrix_bytes
from attnbench.workloads.workload import Workload

DRAWING_BYTES = 3 * 8
"""Memory for drawing a number of the inputs: it is drawn in float64 and cast, with temporary copies."""
FIRST_LEN, STEP = 16, 4
FIRST_COMPILED_LEN, COMPILED_STEP = 256, 16
"""Staircase of compiled implementations: few lengths, always the same, which the compiler's cache holds."""
SCORE_COPIES = 8
"""Memory of a cell is not measured if this many score matrices fit into the limit: no form of attention keeps more
copies."""
MOST_EXPONENT = 2.0
MOST_RETRIES = 3
FAR_BELOW = 4.0
LONGEST_MESSAGE = 600
FREED_GRAPH = "backward through the graph a second time"
"""Part of torch's message if a call uses a graph that an earlier call has freed."""
MEMORY_SIGNS = ("can't allocate memory", "out of memory", "not enough memory")
OURS, TORCH = Path(__file__).parents[2], Path(torch.__file__).parent
"""Folders whose frames in a traceback are not the user's."""

Cost = tuple[float, float | None]
"""Seconds of one call, and its peak in bytes, or None if memory is not counted."""


class OutOfReachError(Exception):
    """A cell is predicted not to fit; carries the status and the reason."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class LoadError(Exception):
    """An implementation cannot be imported; the message has the whole cause."""

    def __init__(self, spec: str, error: BaseException) -> None:
        causes = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
            causes.append(cause)
        descriptions = [f"{type(each).__name__}: {' '.join(str(each).split())}"[:LONGEST_MESSAGE] for each in causes]
        place = re.search(r" \([^()]+, line \d+\)$", describe(error)[1])
        super().__init__(f"{spec} cannot be loaded: {'; from '.join(descriptions)}{place[0] if place else ''}")


STATUSES: Mapping[type[Exception], Status] = {
    UncheckableError: Status.unsupported,
    NotOneGraphError: Status.unsupported,
    CaptureError: Status.unsupported,
    NoBackwardError: Status.unsupported,
    RankLostError: Status.crashed,
    RankSilentError: Status.timeout,
    LoadError: Status.error,
}
"""Errors with a message for the user, and the status of a cell that raises one."""


def describe(error: BaseException) -> tuple[Status, str]:
    """The status of a cell that raised `error`, and a message that names the line in the implementation's own file."""
    if isinstance(error, OutOfReachError):
        return error.status, str(error)
    if isinstance(error, CandidateError):
        return error.failed.status, error.failed.message
    for kind, status in STATUSES.items():
        if isinstance(error, kind):
            return status, str(error)
    message = words(error)[:LONGEST_MESSAGE]
    if FREED_GRAPH in message:
        message += "; if the module keeps a cache of its own, write adapt(..., has_cache=True)"
    frames = [*traceback.extract_tb(error.__traceback__)]
    frames += traceback.extract_tb(error.__cause__.__traceback__) if error.__cause__ is not None else ()
    message += _places(frames)
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if is_memory or (isinstance(error, RuntimeError) and any(sign in str(error) for sign in MEMORY_SIGNS)):
        return Status.out_of_memory, message
    return Status.unsupported if isinstance(error, NotImplementedError) else Status.error, message


def _places(frames: list[traceback.FrameSummary]) -> str:
    """The last line in the user's file, and the last one below it in a package other than torch."""
    below = ""
    for frame in reversed(frames):  # of the first exception, if the message repeats it
        path = Path(frame.filename)
        is_foreign = path.exists() and not {OURS, TORCH} & {*path.parents}
        if is_foreign and TORCH.parent not in path.parents:
            return f" ({path.name}, line {frame.lineno}{below})"
        if is_foreign and not below:
            below = f"; {path.relative_to(TORCH.parent)}, line {frame.lineno}"
    return ""


def load_error(spec: str, error: Exception) -> Exception:
    """The error of a file that cannot be imported, with its whole cause; refusals by the harness are unchanged."""
    raised_in = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][-1:]
    is_ours = any(OURS in Path(file).parents for file in raised_in)
    return error if is_ours and isinstance(error, ValueError) else LoadError(spec, error)


def require_within_limits(
    workload: Workload, limits: Limits, candidate: Implementation, on_step: Callable[[], object]
) -> None:
    """Climb the staircase of shorter lengths.

    Raises:
        OutOfReachError: the cell is predicted to take too long, or more memory than there is.
    """
    limit_bytes = limits.memory_bytes or int(SHARE_OF_FREE * device(workload.device).free_bytes())
    tokens = workload.batch_size * workload.seq_len, workload.batch_size * workload.kv_len
    here_bytes, needed = device("cpu").free_bytes(), DRAWING_BYTES * input_numbers(workload, *tokens)
    if needed > here_bytes:
        message = f"its inputs take {show(needed, 'bytes')} as they are drawn, and {show(here_bytes, 'bytes')} are free"
        raise OutOfReachError(Status.out_of_memory, message)
    called: set[Workload] = set()

    def attempt(step: Workload, with_memory: bool) -> Cost | None:  # noqa: FBT001 - its signature
        on_step()
        if reason_against(candidate, step) is not None:
            return None
        is_first = step not in called
        called.add(step)
        try:
            case = build(step, candidate, place(draw_normal(step, 0), step))
            with case.grad_mode():
                call = case.call()
                if is_first:
                    call()
        except Exception:  # noqa: BLE001 - it may support only other lengths
            return None
        clock = case.device.clock
        with case.grad_mode():
            call_s = clock.elapsed(call, 1)
            if is_first and (step.longest == FIRST_LEN or call_s > limits.call_s):
                call_s = min(call_s, clock.elapsed(call, 1))  # the first call may have compiled
            counts = with_memory and case.device.is_host
            peak = float(case.device.record(call).footprint().peak_bytes) if counts else None
        return call_s, peak

    require_within(limits.call_s, limit_bytes, workload, attempt, compiles=candidate.compiles)


def staircase(workload: Workload, *, compiles: bool = False) -> Iterator[Workload]:
    """The workload at lengths that grow fourfold, all below its own, the last at least a quarter of it.

    With `compiles` there are fewer lengths, the last at least a sixteenth of its own.
    """
    length, step = (FIRST_COMPILED_LEN, COMPILED_STEP) if compiles else (FIRST_LEN, STEP)
    while length < workload.longest:
        yield workload.at_length(length)
        length *= step


def require_within(
    limit_s: float,
    limit_bytes: int,
    workload: Workload,
    attempt: Callable[[Workload, bool], Cost | None],
    *,
    compiles: bool = False,
) -> None:
    """Climb the staircase with `attempt(workload, with_memory)`; return if a single call should be within the limits.

    Lengths at which `attempt` returns None are unsupported and skipped. The climb ends once even quadratic growth would
    stay far below the limit and memory does not matter.

    Raises:
        OutOfReachError: the prediction is above a limit; the message gives it and its basis.
    """
    with_memory = SCORE_COPIES * score_matrix_bytes(workload) > limit_bytes
    times_s: dict[int, float] = {}  # by length
    peaks: dict[int, float] = {}
    for step in staircase(workload, compiles=compiles):
        if times_s and _at(step.longest, times_s, least=0.0) > limit_s:
            break
        most_s = _at(workload.longest, times_s, least=MOST_EXPONENT) if times_s else math.inf
        if not with_memory and most_s <= limit_s / FAR_BELOW:
            break
        if (cost := attempt(step, with_memory)) is not None:
            times_s[step.longest] = cost[0]
            peaks |= {} if cost[1] is None else {step.longest: cost[1]}
    if not times_s:
        return
    last, axis = max(times_s), "seq_len" if workload.seq_len == workload.longest else "kv_len"
    for _ in range(MOST_RETRIES):  # one slow call must not exclude a cell
        if _at(workload.longest, times_s) > limit_s:
            again = attempt(workload.at_length(last), False)  # noqa: FBT003 - its signature
            times_s[last] = min(times_s[last], again[0] if again else math.inf)
    call_s, peak = _at(workload.longest, times_s), _at(workload.longest, peaks) if peaks else None
    if call_s > limit_s:
        why = f"over the limit of {show(limit_s, 's')}; it takes {show(times_s[last], 's')} at {axis} {last}"
        message = f"predicted {show(call_s, 's')} for one call, {why}; --call-limit {math.ceil(call_s)} includes it"
        raise OutOfReachError(Status.timeout, message)
    if peak is not None and peak > limit_bytes:
        why = f"over the limit of {show(limit_bytes, 'bytes')}; it needs {show(peaks[last], 'bytes')} at {axis} {last}"
        include = f"--memory-limit {math.ceil(peak / 2**30)} includes it"
        raise OutOfReachError(Status.out_of_memory, f"predicted a peak of {show(peak, 'bytes')}, {why}; {include}")


def _at(length: int, values: Mapping[int, float], least: float = 1.0) -> float:
    """Extrapolate to `length` by the growth between the last two lengths, with an exponent from `least` to 2.

    With a single length growth is assumed to be linear: the first step is mostly overhead.
    """
    *_, (before, earlier), (last, value) = [(0, 0.0), *values.items()]
    exponent = 1.0
    if earlier > 0 and value > 0:
        exponent = math.log(value / earlier) / math.log(last / before)
    return value * math.pow(length / last, min(MOST_EXPONENT, max(least, exponent)))
