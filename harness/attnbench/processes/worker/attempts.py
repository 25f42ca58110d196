"""Calls made to predict a cost, or to test a prediction: short ones before a check, and one under a memory limit."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from attnbench.checking.case import build, draw_normal, place, reason_against
from attnbench.contract import Implementation
from attnbench.devices import device
from attnbench.processes.messages import Attempt, Attempted, Check
from attnbench.storage.memory_events import timeline
from attnbench.storage.records import Status
from attnbench.timing.prediction import FIRST_LEN, CallCost, Limits, OutOfReachError, require_within
from attnbench.units import show
from attnbench.workloads.workload import Workload

SHARE_OF_FREE_MEMORY = 0.75
WARM_LEN = 512
"""The length of the first calls, which fit: libraries make their buffers, and threads start."""
DRAWING = 3
"""Inputs are drawn in float64 and then cast: with temporary copies, so many times their float64 size."""
FLOAT64_BYTES = 8


def attempt(request: Attempt, made: Implementation, on_step: Callable[[], object]) -> Attempted:
    """One call under the request's memory limit, and, if it returns, one more whose memory is counted.

    Raises:
        OutOfReachError: the implementation does not support the workload, or the machine has no room for the inputs and
            the limit together, so that the limit would not be what is tested.
        Exception: whatever the call raises, above all that memory has run out.
    """
    workload, limit_bytes = request.workload, request.limit_bytes
    if (reason := reason_against(made, workload)) is not None:
        raise OutOfReachError(Status.unsupported, reason)
    here = device(workload.device)
    free_bytes = here.free_bytes()
    if (needed := limit_bytes + DRAWING * FLOAT64_BYTES * num_inputs(workload)) > free_bytes:
        message = f"the limit and the inputs need {show(needed, 'bytes')}, and {show(free_bytes, 'bytes')} are free"
        raise OutOfReachError(Status.unsupported, message)

    short = workload.at_length(min(WARM_LEN, workload.seq_len))
    if reason_against(made, short) is None:
        case = build(short, made, place(draw_normal(short, 0), short))
        with case.grad_mode():
            call = case.call()
            call()
            call()
    on_step()

    case = build(workload, made, place(draw_normal(workload, 0), workload))
    with case.grad_mode():
        if workload.batch_size * workload.seq_len * workload.kv_len <= limit_bytes:  # they count as inputs
            _ = (case.mask.visible, case.mask.hidden, case.mask.empty)
        call = case.call()
        on_step()
        with here.capped(limit_bytes) if limit_bytes else nullcontext():
            call_s = here.clock.elapsed(call, 1)
        on_step()
        if request.snapshot:
            here.snapshot(call, Path(request.snapshot))
        recording = here.record(call)
        return Attempted(
            call_s=call_s,
            peak_bytes=recording.footprint().peak_bytes,
            free_bytes=free_bytes,
            timeline=timeline(list(recording.memory_events())) if here.is_host else None,
        )


def require_within_limits(request: Check, made: Implementation, on_step: Callable[[], object]) -> None:
    """Climb the staircase of shorter lengths (timing/prediction.py).

    Raises:
        OutOfReachError: the cell is predicted to take too long, or more memory than there is.
    """
    free_bytes = device(request.workload.device).free_bytes()
    limit_bytes = request.memory_limit_bytes or int(SHARE_OF_FREE_MEMORY * free_bytes)
    limits = Limits(call_s=request.call_limit_s, memory_bytes=limit_bytes)

    def call_cost(step: Workload, with_memory: bool) -> CallCost | None:  # noqa: FBT001 - its signature
        on_step()
        if reason_against(made, step) is not None:
            return None
        try:
            case = build(step, made, place(draw_normal(step, 0), step))
            with case.grad_mode():
                call = case.call()
                call()
        except Exception:  # noqa: BLE001 - it may support only other lengths; at the workload's own it will show
            return None
        clock = case.device.clock
        with case.grad_mode():
            call_s = clock.elapsed(call, 1)
            if step.seq_len == FIRST_LEN or call_s > request.call_limit_s:
                call_s = min(call_s, clock.elapsed(call, 1))  # the first call may have compiled
            counts = with_memory and case.device.is_host
            peak = float(case.device.record(call).footprint().peak_bytes) if counts else None
        return CallCost(length=step.seq_len, call_s=call_s, peak_bytes=peak)

    require_within(limits, request.workload, call_cost, compiles=made.compiles)


def num_inputs(workload: Workload) -> int:
    """Numbers in the inputs of a call, its parameters not counted."""
    if workload.scope == "module":
        lengths = workload.seq_len + (workload.kv_len if workload.kv_len != workload.seq_len else 0)
        return workload.batch_size * lengths * workload.embed_dim
    queries = workload.num_heads * workload.seq_len * workload.head_dim
    keys = workload.num_kv_heads * workload.kv_len * (workload.head_dim + workload.value_dim)
    return workload.batch_size * (queries + keys)
