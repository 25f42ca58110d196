"""See what really runs in one call of a case: operators by torch.profiler, page faults, and the backend that ran.

Nothing here is timed for a record: a profiled call is slower than a plain one, and only its shares are kept.
"""

import mmap
import resource
import statistics
import time
from collections.abc import Callable
from functools import cache

import msgspec
import torch
from torch._C._autograd import DeviceType

from attnbench.checking.case import Case, build, draw_normal, place
from attnbench.contract import Implementation
from attnbench.devices.recording import MEMORY, Recording
from attnbench.processes.worker import backend
from attnbench.storage.operator_kinds import Span, compiled, fold, observed
from attnbench.storage.records import Operator, Operators
from attnbench.workloads.workload import Workload

SHORT_S = 0.1
"""The page faults of a call shorter than this are read from NUM_CALLS of them."""
NUM_CALLS = 3
NUM_PAGES, NUM_PAIRS = 2**14, 5


def observe(case: Case, requested: str, on_step: Callable[[], None]) -> Operators:
    """What runs in one call of `case`: at most four calls of it, or six short ones; `on_step` is called before each.

    A backward call alone is profiled for its operators, and the forward call before it for its backend.
    """
    with case.grad_mode():
        on_step()
        is_short = case.first_s < SHORT_S
        on_step()
        calls = operators_in(case.recording)
        forward = calls
        if case.workload.direction == "backward":
            on_step()
            forward = operators_in(case.device.record(case.output))
        on_step()
        asked = backend.Answer() if compiled(forward) else backend.ask(case.output, requested)
        on_step()
        is_host = case.device.is_host
        num_faults = 0.0
        if is_host:
            call, num_calls, before = case.call(), NUM_CALLS if is_short else 1, _faults()
            for _ in range(num_calls):
                call()
            num_faults = (_faults() - before) / num_calls
    seen = observed(forward)
    return Operators(
        calls=calls,
        requested=requested,
        predicted=asked.predicted,
        observed=seen,
        reason=asked.reason if requested not in {"", seen} else "",
        num_faults=num_faults,
        fault_s=fault_seconds(torch.get_num_threads()) if is_host else 0.0,
    )


def refusal(workload: Workload, made: Implementation, error: RuntimeError) -> str:
    """In words, that the requested backend cannot run, and why, where `error` says so; empty for any other error."""
    if not made.backend or backend.NO_KERNEL not in str(error):
        return ""
    case = build(workload, made, place(draw_normal(workload, 0), workload))
    with case.grad_mode():
        reason = backend.refusal(case.output, made.backend)
    return f"the {made.backend} backend was asked for and cannot run: {reason or 'PyTorch gives no reason'}"


def operators_in(recording: Recording) -> tuple[Operator, ...]:
    """The operators of a call; where another device has computed them, their own time is that of their kernels."""
    spans: list[Span] = []  # what the host did: operators, and the allocations among them
    for event in recording.events:
        name, start_ns = event.name(), event.start_ns()
        if name == MEMORY:
            if (taken := event.nbytes()) > 0:  # less: it was given back
                spans.append(Span(name, event.start_thread_id(), start_ns, start_ns, taken))
        elif event.device_type() == DeviceType.CPU:
            spans.append(Span(name, event.start_thread_id(), start_ns, event.end_ns()))
    operators = fold(spans)
    if not any(recording.device_s.values()):
        return operators
    on_device = [msgspec.structs.replace(one, self_s=recording.device_s.get(one.name, 0.0)) for one in operators]
    return tuple(sorted(on_device, key=lambda one: -one.self_s))


@cache
def fault_seconds(num_threads: int) -> float:  # noqa: ARG001 - another number is another cost
    """What a minor page fault adds to the time of a call: the median of a few pairs; 0.0 where fresh memory has none.

    An operator writes a large block, fresh and then kept, by all threads that torch has in this process, as in a call:
    what one thread waits for, others do meanwhile, and a fresh page is in the cache when it is written. So large a
    block goes back to the system when it is freed, unless the allocator retains it.
    """
    source = torch.ones(NUM_PAGES * mmap.PAGESIZE // 4)
    kept = torch.empty_like(source)
    costs: list[float] = []
    for _ in range(NUM_PAIRS):
        before, start_s = _faults(), time.perf_counter()
        torch.mul(source, 2)
        fresh_s, num_faults, again_s = time.perf_counter() - start_s, _faults() - before, time.perf_counter()
        torch.mul(source, 2, out=kept)
        again_s = time.perf_counter() - again_s
        costs.append(max(0.0, fresh_s - again_s) / num_faults if num_faults > NUM_PAGES // 2 else 0.0)
    return statistics.median(costs)


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
