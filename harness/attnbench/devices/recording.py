"""One call under the profiler: its operators, and what it takes of the memory.

On the host every allocation and release is an event of the profiler; the peak of their running sum includes the scratch
space inside kernels. The resident set of the process would not do: after a first call it grows no more. Elsewhere an
allocator counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from attnbench.storage.memory_events import MemoryEvent

if TYPE_CHECKING:  # as in devices/__init__.py
    from torch import Tensor

MEMORY = "[memory]"
"""The profiler's name of an event that takes or gives back memory."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """One call's memory in bytes, above what was held when it began: inputs and mask do not count."""

    peak_bytes: int  # the most that was held at once
    kept_bytes: int  # held after the call: its result, and what the graph saved for a backward pass
    result_bytes: int = 0  # of `kept_bytes`, the result's own memory
    num_allocations: int
    allocated_bytes: int  # of all allocations together
    reserved_bytes: int = 0  # the most that a caching allocator took from the device; 0: there is none


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One call as the profiler saw it."""

    events: list[Any]  # the profiler's own
    result: dict[int, int]  # the bytes of the result's storages, by where they lay
    device_s: Mapping[str, float] = field(default_factory=dict)  # own seconds of each operator's kernels, off the host
    allocated: Footprint | None = None  # less its result, as an allocator counted; None: the events show it

    def footprint(self, given: Iterable[Tensor] = ()) -> Footprint:
        """The call's memory. What the result shares with `given`, the inputs, is not its own."""
        inputs = {tensor.untyped_storage().data_ptr() for tensor in given}
        result_bytes = sum(size for place, size in self.result.items() if place not in inputs)
        counted = self.allocated or _counted([event.nbytes() for event in self.events if event.name() == MEMORY])
        return replace(counted, result_bytes=result_bytes)

    def memory_events(self) -> Iterator[MemoryEvent]:
        """The memory events in the order of time, each with the operator of its thread that was running."""
        running: dict[int, list[tuple[int, str]]] = {}  # by thread: end and name of each operator, inner ones last
        for event in sorted(self.events, key=_order):
            stack = running.setdefault(event.start_thread_id(), [])
            while stack and stack[-1][0] < event.start_ns():
                stack.pop()
            if event.name() == MEMORY:
                yield MemoryEvent(event.nbytes(), _telling([name for _, name in reversed(stack)]))
            else:
                stack.append((event.end_ns(), event.name()))


def record(
    call: Callable[[], object], activities: Sequence[str], finish: Callable[[], object] = lambda: None
) -> Recording:
    """Call once under the profiler, which watches `activities`; `finish` is called while the result is still there.

    Raises:
        Exception: whatever the call raises.
    """
    from torch.profiler import ProfilerActivity, profile

    watched = [getattr(ProfilerActivity, name) for name in activities]
    with profile(activities=watched, profile_memory=True) as seen:
        kept = call()
        finish()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    events = seen.profiler.kineto_results.events()
    averages = seen.key_averages() if len(activities) > 1 else ()
    device_s = {event.key: event.self_device_time_total / 1e6 for event in averages}
    return Recording(events=events, result=_storages(kept), device_s=device_s)


def _counted(changes: list[int]) -> Footprint:
    """What follows from the bytes of each allocation and, negative, of each release."""
    taken = [change for change in changes if change > 0]
    levels = list(itertools.accumulate(changes))
    return Footprint(
        peak_bytes=max(0, *levels, 0),
        kept_bytes=levels[-1] if levels else 0,
        num_allocations=len(taken),
        allocated_bytes=sum(taken),
    )


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
    from torch import Tensor

    tensors = result if isinstance(result, tuple | list) else [result]
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, Tensor)
    }
