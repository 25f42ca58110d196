"""One call under the profiler: its operators, and what it takes of the memory.

On the host every allocation and release is an event of the profiler; the peak of their running sum includes the scratch
space inside kernels. The resident set of the process would not do: after a first call it grows no more. Elsewhere an
allocator counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attnbench.storage.memory_events import MemoryEvent
from attnbench.storage.operator_kinds import Kernel, Span, nested

if TYPE_CHECKING:  # as in devices/__init__.py
    from torch import Tensor

MEMORY = "[memory]"
"""The profiler's name of an event that takes or gives back memory."""
HOST = "CPU"
"""The activity that is the host's."""
BARE_ALLOCATIONS = ("aten::empty", "aten::resize", "aten::new_empty")


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """One call's memory in bytes, above what was held when it began: inputs and mask do not count."""

    peak_bytes: int  # the most that was held at once
    kept_bytes: int  # held after the call: its result, and what the graph saved for a backward pass
    result_bytes: int = 0  # of `kept_bytes`, the result's own memory
    num_allocations: int
    allocated_bytes: int  # of all allocations together
    reserved_bytes: int = 0  # the most that a caching allocator took from the device; 0: there is none
    unused_bytes: int = 0  # the most that it held of the device, less the most that tensors held of that


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One call as the profiler saw it."""

    events: list[Any]  # the profiler's own
    result: dict[int, int]  # the bytes of the result's storages, by where they lay
    allocated: Footprint | None = None  # less its result, as an allocator counted; None: the events show it

    def footprint(self, given: Iterable[Tensor] = ()) -> Footprint:
        """The call's memory. What the result shares with `given`, the inputs, is not its own."""
        inputs = {tensor.untyped_storage().data_ptr() for tensor in given}
        result_bytes = sum(size for place, size in self.result.items() if place not in inputs)
        if self.allocated is not None:
            return replace(self.allocated, result_bytes=result_bytes)
        changes = [event.nbytes() for event in self.events if event.name() == MEMORY]  # negative where it is given back
        taken = [change for change in changes if change > 0]
        levels = [0, *itertools.accumulate(changes)]
        return Footprint(
            peak_bytes=max(levels),
            kept_bytes=levels[-1],
            result_bytes=result_bytes,
            num_allocations=len(taken),
            allocated_bytes=sum(taken),
        )

    def spans(self) -> Iterator[Span]:
        """What the host did: operators, and among them what it took of the memory and gave back."""
        from torch._C._autograd import DeviceType

        for event in self.events:  # a hundred thousand, of a loop over tokens
            name, start_ns = event.name(), event.start_ns()
            if name == MEMORY:
                yield Span(name, event.start_thread_id(), start_ns, start_ns, event.nbytes())
            elif event.device_type() == DeviceType.CPU:
                yield Span(name, event.start_thread_id(), start_ns, event.end_ns())

    def kernels(self) -> list[Kernel]:
        """What another device than the host did, each with the operator that launched it; empty on the host."""
        from torch._C._autograd import DeviceType

        launching: dict[int, str] = {}
        found = []
        for event in self.events:
            if event.device_type() == DeviceType.CPU:
                launching[event.correlation_id()] = event.name()
            elif event.name() != MEMORY and not event.is_user_annotation():
                found.append(event)
        return [
            Kernel(
                event.name(),
                event.end_ns() - event.start_ns(),
                launching.get(event.linked_correlation_id(), ""),
                start_ns=event.start_ns(),
                stream=event.device_resource_id(),
            )
            for event in found
        ]

    def memory_events(self) -> Iterator[MemoryEvent]:
        """The memory events in the order of time, each with the operator of its thread that was running.

        That is the innermost one that says more than that memory was taken.
        """
        for span, running in nested(self.spans()):
            if span.allocated_bytes is not None:
                names = [each.name for each in reversed(running)] or [""]
                operator = next((name for name in names if not name.startswith(BARE_ALLOCATIONS)), names[0])
                yield MemoryEvent(span.allocated_bytes, operator)


def record(
    call: Callable[[], object], activities: Sequence[str], finish: Callable[[], object] = lambda: None
) -> Recording:
    """Call once under the profiler, which watches `activities`; `finish` is called while the result is still there.

    torch.profiler would import the compiler first, which takes a second.

    Raises:
        Exception: whatever the call raises.
    """
    from torch import Tensor
    from torch.autograd.profiler import profile

    beyond_host = next((name.lower() for name in activities if name != HOST), None)
    with profile(use_kineto=True, use_cpu=HOST in activities, use_device=beyond_host, profile_memory=True) as seen:
        kept = call()
        finish()
    assert seen.kineto_results is not None
    tensors = [each for each in (kept if isinstance(kept, tuple | list) else [kept]) if isinstance(each, Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return Recording(
        events=seen.kineto_results.events(),
        result={storage.data_ptr(): storage.nbytes() for storage in storages},
    )
