"""What one call takes of a device's memory, counted by the profiler on the CPU and by CUDA's allocator.

On the CPU every allocation and release is an event of the profiler; the peak of their running sum includes the scratch
space inside kernels. The resident set of the process would not do: after a first call it grows no more.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnbench.devices import cuda
from attnbench.storage.memory_events import MemoryEvent

MEMORY = "[memory]"


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """One call's memory in bytes, above what was held when it began: inputs and mask do not count."""

    peak_bytes: int  # the most that was held at once
    kept_bytes: int  # held after the call: its result, and what the graph saved for a backward pass
    result_bytes: int  # of `kept_bytes`, the result's own memory
    num_allocations: int
    allocated_bytes: int  # of all allocations together
    reserved_bytes: int | None = None  # the most that CUDA's allocator had taken from the device; None: no such thing


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One call on the CPU as the profiler saw it: operators and memory in one."""

    events: list[Any]  # the profiler's own
    result: dict[int, int]  # the bytes of the result's storages, by where they lay


def footprint(call: Callable[[], object], device: str, given: Iterable[Tensor] = ()) -> Footprint:
    """Call once and count. Memory of the result that it shares with `given`, the inputs, is none of its own."""
    if device == "cpu":
        return counted(record(call), given)
    kept, found = cuda.count(call, device)
    return Footprint(result_bytes=_own_bytes(_storages(kept), given), **found)


def record(call: Callable[[], object]) -> Recording:
    """Call once, on the CPU."""
    kept, events = _profiled(call)
    return Recording(events=events, result=_storages(kept))


def counted(recording: Recording, given: Iterable[Tensor] = ()) -> Footprint:
    """The memory of a call that was recorded; `given` as for `footprint`."""
    changes = [event.nbytes() for event in recording.events if event.name() == MEMORY]
    taken = [change for change in changes if change > 0]
    levels = list(itertools.accumulate(changes))
    return Footprint(
        peak_bytes=max(0, *levels, 0),
        kept_bytes=levels[-1] if levels else 0,
        result_bytes=_own_bytes(recording.result, given),
        num_allocations=len(taken),
        allocated_bytes=sum(taken),
    )


def watched(call: Callable[[], object]) -> tuple[object, list[MemoryEvent]]:
    """The result of one call on the CPU, and its memory events in order."""
    kept, seen = _profiled(call)
    return kept, list(_named(seen))


def _profiled(call: Callable[[], object]) -> tuple[object, list[Any]]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = call()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    return kept, seen.profiler.kineto_results.events()


def _named(events: Iterable[Any]) -> Iterator[MemoryEvent]:
    """The memory events in the order of time, each with the operator of its thread that was running."""
    running: dict[int, list[tuple[int, str]]] = {}  # by thread: end and name of each operator, inner ones last
    for event in sorted(events, key=_order):
        stack = running.setdefault(event.start_thread_id(), [])
        while stack and stack[-1][0] < event.start_ns():
            stack.pop()
        if event.name() == MEMORY:
            yield MemoryEvent(event.nbytes(), _telling([name for _, name in reversed(stack)]))
        else:
            stack.append((event.end_ns(), event.name()))


def _order(event: Any) -> tuple[int, bool, int]:  # noqa: ANN401 - torch's type has no public name
    """By time; what begins at one instant, the outer operator first, and memory events last, in the order they came."""
    is_memory = event.name() == MEMORY
    return event.start_ns(), is_memory, 0 if is_memory else -event.end_ns()


def _telling(names: list[str]) -> str:
    """The innermost operator that says more than that memory was taken."""
    bare = ("aten::empty", "aten::resize", "aten::new_empty")
    return next((name for name in names if not name.startswith(bare)), names[0] if names else "")


def _storages(result: object) -> dict[int, int]:
    """The bytes of all tensors in a result by where they lie, each storage once."""
    tensors = result if isinstance(result, tuple | list) else [result]
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, Tensor)
    }


def _own_bytes(storages: dict[int, int], given: Iterable[Tensor]) -> int:
    known = {tensor.untyped_storage().data_ptr() for tensor in given}
    return sum(size for place, size in storages.items() if place not in known)
