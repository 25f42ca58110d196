"""Predict the time of a call from calls at shorter lengths, and describe failures.

The lengths grow fourfold (sixteenfold for compiled code). There is one call at each length, until the predicted time of
the next call exceeds the limit. The times at the last two lengths give an exponent of growth, and the exponent gives
the predicted time. If a prediction is uncertain, the cell is tried: a cell that wrongly seems to fit costs a little
time, but a cell that wrongly seems not to fit is lost. See docs/adr/0005.
"""

import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from attnbench.case import NoBackwardError, build, draw_normal, place, reason_against
from attnbench.checking.agreement import GRAPH_USED_UP
from attnbench.checking.reference import UncheckableError
from attnbench.contract import Implementation, NotOneGraphError
from attnbench.contract.declared import words
from attnbench.devices import CaptureError, containers
from attnbench.processes.messages import Failed, FailedError
from attnbench.ranks import RankLostError, RankSilentError
from attnbench.storage.records import Status
from attnbench.units import show
from attnbench.workloads.counts import input_numbers
from attnbench.workloads.workload import Workload

DRAWING_BYTES = 3 * 8
"""Bytes needed for each number of the inputs while it is drawn in float64 and cast, with temporary copies."""
FIRST_LEN, STEP = 16, 4  # first length, and factor of growth
FIRST_COMPILED_LEN, COMPILED_STEP = 256, 16
"""First length and factor of growth for compiled implementations. The lengths are few and always the same, so that the
compiler finds their code in its cache."""
MOST_EXPONENT = 2.0  # largest exponent of growth of the time with the length
MOST_RETRIES = 3  # the longest call is repeated up to this often before a prediction above the limit counts
FAR_BELOW = 4.0  # attempts end if quadratic growth predicts a time of at most the limit divided by this factor
LONGEST_MESSAGE = 600  # characters
MEMORY_SIGNS = ("can't allocate memory", "out of memory", "not enough memory")  # parts of a RuntimeError's message
OURS, TORCH = Path(__file__).parents[2], Path(torch.__file__).parent
"""Folders of this package and of torch; frames of a traceback with files below them are not the user's."""


def out_of_reach(status: Status, reason: str) -> FailedError:
    """Create the error of a cell that is predicted to fail, and is therefore not tried."""
    return FailedError(Failed(status=status, message=reason, is_predicted=True))


class LoadError(Exception):
    """An implementation cannot be imported; the message has the whole chain of causes."""


STATUSES: Mapping[type[Exception], Status] = {
    UncheckableError: Status.unsupported,
    NotOneGraphError: Status.unsupported,
    CaptureError: Status.unsupported,
    NoBackwardError: Status.unsupported,
    RankLostError: Status.crashed,
    RankSilentError: Status.timeout,
    LoadError: Status.error,
}
"""Exceptions whose message is shown unchanged, and the status of a cell that raises one."""


def describe(error: BaseException) -> tuple[Status, str]:
    """Return the status of a cell that raised `error`, and a message with the line in the implementation's own file."""
    if isinstance(error, FailedError):
        return error.failed.status, error.failed.message
    for kind, status in STATUSES.items():
        if isinstance(error, kind):
            return status, str(error)
    message = words(error)[:LONGEST_MESSAGE]
    if GRAPH_USED_UP in message:
        message += "; if the module keeps a cache of its own, write adapt(..., has_cache=True)"
    frames = [*traceback.extract_tb(error.__traceback__)]
    frames += traceback.extract_tb(error.__cause__.__traceback__) if error.__cause__ is not None else ()
    message += _places(frames)
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if is_memory or (isinstance(error, RuntimeError) and any(sign in str(error) for sign in MEMORY_SIGNS)):
        return Status.out_of_memory, message
    return Status.unsupported if isinstance(error, NotImplementedError) else Status.error, message


def _places(frames: list[traceback.FrameSummary]) -> str:
    """Name the innermost line in a user's file and, if it called an installed package except torch, the line there.

    Returns "" if no frame is the user's.
    """
    below = ""
    for frame in reversed(frames):  # starts with the innermost frame of the cause, if there is one
        path = Path(frame.filename)
        is_foreign = path.exists() and not {OURS, TORCH} & {*path.parents}
        if is_foreign and TORCH.parent not in path.parents:
            return f" ({path.name}, line {frame.lineno}{below})"
        if is_foreign and not below:
            below = f"; {path.relative_to(TORCH.parent)}, line {frame.lineno}"
    return ""


def load_error(spec: str, error: Exception) -> Exception:
    """Turn an error of importing `spec` into a LoadError with all causes; return attnbench's own ValueErrors as is."""
    raised_in = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][-1:]
    is_ours = any(OURS in Path(file).parents for file in raised_in)
    if is_ours and isinstance(error, ValueError):
        return error
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    descriptions = [f"{type(each).__name__}: {' '.join(str(each).split())}"[:LONGEST_MESSAGE] for each in causes]
    place = re.search(r" \([^()]+, line \d+\)$", describe(error)[1])
    return LoadError(f"{spec} cannot be loaded: {'; from '.join(descriptions)}{place[0] if place else ''}")


def require_within_limit(
    workload: Workload, limit_s: float, candidate: Implementation, on_step: Callable[[], object]
) -> None:
    """Require that a call, as predicted from calls at shorter lengths, takes at most `limit_s` seconds.

    `on_step` is called before each of the shorter calls.

    Raises:
        FailedError: a call is predicted to take longer, or the inputs need more memory than is free.
    """
    tokens = workload.batch_size * workload.seq_len, workload.batch_size * workload.kv_len
    (here_bytes, _), needed = containers.memory(), DRAWING_BYTES * input_numbers(workload, *tokens)
    if needed > here_bytes:
        message = f"drawing its inputs needs {show(needed, 'bytes')}, and {show(here_bytes, 'bytes')} are free"
        raise out_of_reach(Status.out_of_memory, message)

    def attempt(step: Workload, *, is_first: bool) -> float | None:
        on_step()
        if reason_against(candidate, step) is not None:
            return None
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
            if is_first and (step.longest == FIRST_LEN or call_s > limit_s):
                call_s = min(call_s, clock.elapsed(call, 1))  # the first call may have compiled
        return call_s

    predict_call_time(limit_s, workload, attempt, compiles=candidate.compiles)


def staircase(workload: Workload, *, compiles: bool = False) -> Iterator[Workload]:
    """Yield the workload at shorter lengths, which grow fourfold from 16 and stay below the workload's own length.

    If `compiles` is set, the lengths grow sixteenfold from 256.
    """
    length, step = (FIRST_COMPILED_LEN, COMPILED_STEP) if compiles else (FIRST_LEN, STEP)
    while length < workload.longest:
        yield workload.at_length(length)
        length *= step


def predict_call_time(
    limit_s: float, workload: Workload, attempt: Callable[..., float | None], *, compiles: bool = False
) -> None:
    """Predict the seconds of one call from calls at shorter lengths, and require that they are at most `limit_s`.

    `attempt(workload, is_first=...)` calls a workload once and returns its seconds, or None if that length is
    unsupported; `is_first` marks the first call at a length. Attempts end when even quadratic growth would stay far
    below the limit. If no shorter length is supported, there is no prediction and no error.

    Raises:
        FailedError: the prediction is above the limit; the message gives it and its basis.
    """
    times_s: dict[int, float] = {}  # by length
    for step in staircase(workload, compiles=compiles):
        if times_s and _at(step.longest, times_s, least=0.0) > limit_s:
            break
        if times_s and _at(workload.longest, times_s, least=MOST_EXPONENT) <= limit_s / FAR_BELOW:
            break
        if (call_s := attempt(step, is_first=True)) is not None:
            times_s[step.longest] = call_s
    if not times_s:
        return
    last, axis = max(times_s), "seq_len" if workload.seq_len == workload.longest else "kv_len"
    for _ in range(MOST_RETRIES):  # one slow call must not exclude a cell
        if _at(workload.longest, times_s) > limit_s:
            again_s = attempt(workload.at_length(last), is_first=False)
            times_s[last] = min(times_s[last], again_s or math.inf)
    if (call_s := _at(workload.longest, times_s)) > limit_s:
        why = f"over the limit of {show(limit_s, 's')}; it takes {show(times_s[last], 's')} at {axis} {last}"
        message = f"predicted {show(call_s, 's')} for one call, {why}; --call-limit {math.ceil(call_s)} includes it"
        raise out_of_reach(Status.timeout, message)


def _at(length: int, values: Mapping[int, float], least: float = 1.0) -> float:
    """Extrapolate `values`, which are keyed by length, to another length, as a power of the length.

    The exponent follows from the last two values, and is limited to the range from `least` to MOST_EXPONENT. If there
    is a single value, the exponent is the larger of 1 and `least`, because the first call is mostly overhead.
    """
    *_, (before, earlier), (last, value) = [(0, 0.0), *values.items()]
    exponent = 1.0
    if earlier > 0 and value > 0:
        exponent = math.log(value / earlier) / math.log(last / before)
    return value * math.pow(length / last, min(MOST_EXPONENT, max(least, exponent)))
