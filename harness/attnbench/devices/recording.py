"""One call under the profiler: its operators and its memory.

On the host every allocation and release is an event of the profiler; the peak of their running sum includes the scratch
space inside kernels. The resident set of the process would not do: it stops growing after the first call. On other
devices an allocator counts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attnbench.storage.operator_kinds import Kernel, Span

if TYPE_CHECKING:  # as in devices/__init__.py
    from torch import Tensor

MEMORY = "[memory]"
"""The profiler's name of an allocation or release."""
DRIVER_CALL = re.compile("(cuda|cu|hip)[A-Z]")
"""Start of the names of driver calls, such as cudaLaunchKernel: CUPTI counts them, and torch counts operators, so that
both have the same ids."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory of one call in bytes, beyond the memory in use at its start: inputs and mask do not count."""

    peak_bytes: int  # the peak
    kept_bytes: int  # in use after the call: its result, and tensors saved for a backward pass
    result_bytes: int = 0  # memory of the result, part of `kept_bytes`
    num_allocations: int
    allocated_bytes: int  # sum of all allocations
    reserved_bytes: int = 0  # peak of a caching allocator's device memory; 0: there is none


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The profiler's record of one call."""

    events: list[Any]  # of the profiler
    result: dict[int, int]  # bytes of the result's storages, by address
    allocated: Footprint | None = None  # without the result, as an allocator counted; None: use the events

    def footprint(self, given: Iterable[Tensor] = ()) -> Footprint:
        """The call's memory; storages that the result shares with the inputs `given` do not count."""
        inputs = {tensor.untyped_storage().data_ptr() for tensor in given}
        result_bytes = sum(size for place, size in self.result.items() if place not in inputs)
        if self.allocated is not None:
            return replace(self.allocated, result_bytes=result_bytes)
        changes = [event.nbytes() for event in self.events if event.name() == MEMORY]  # negative for a release
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
        """Operators on the host."""
        for event in self.events:  # a loop over tokens has a hundred thousand
            if _is_operator(event):
                yield Span(event.name(), event.start_thread_id(), event.start_ns(), event.end_ns())

    def kernels(self) -> list[Kernel]:
        """Kernels on other devices, each with the operator that launched it; empty for the host."""
        from torch._C._autograd import DeviceType

        operators = {event.correlation_id(): event.name() for event in self.events if _is_operator(event)}
        return [
            Kernel(
                event.name(),
                event.end_ns() - event.start_ns(),
                operators.get(event.linked_correlation_id() or None, ""),
                start_ns=event.start_ns(),
                stream=event.device_resource_id(),
            )
            for event in self.events
            if event.device_type() != DeviceType.CPU and event.name() != MEMORY and not event.is_user_annotation()
        ]


def _is_operator(event: Any) -> bool:  # noqa: ANN401 - the profiler's
    """Whether an event is an operator on the host; a driver call may be linked to one."""
    from torch._C._autograd import DeviceType

    if event.device_type() != DeviceType.CPU or event.linked_correlation_id():
        return False
    return event.name() != MEMORY and not DRIVER_CALL.match(event.name())


def record(
    call: Callable[[], object], activities: Sequence[str], finish: Callable[[], object] = lambda: None
) -> Recording:
    """Make one call under the profiler with these `activities`; `finish` is called while the result is alive.

    Avoids torch.profiler, which imports the compiler and so takes a second.

    Raises:
        Exception: any exception of the call.
    """
    from torch import Tensor
    from torch.autograd.profiler import profile

    beyond_host = next((name.lower() for name in activities if name != "CPU"), None)
    with profile(use_kineto=True, use_cpu="CPU" in activities, use_device=beyond_host, profile_memory=True) as seen:
        kept = call()
        finish()
    assert seen.kineto_results is not None
    tensors = [each for each in (kept if isinstance(kept, tuple | list) else [kept]) if isinstance(each, Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return Recording(
        events=seen.kineto_results.events(),
        result={storage.data_ptr(): storage.nbytes() for storage in storages},
    )
