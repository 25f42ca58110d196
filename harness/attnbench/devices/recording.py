"""One call under the profiler: its operators and its memory.

On the host every allocation and release is an event of the profiler; the peak of their running sum includes the scratch
space inside kernels. The resident set of the process would not show this space, because it stops growing after the
first call. On other devices the allocator's statistics give the memory.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from attnbench.devices.kernels import COMPILED
from attnbench.storage.records import Operator

if TYPE_CHECKING:  # devices can be listed without torch
    from torch import Tensor

MEMORY = "[memory]"  # the profiler's name of an allocation or release
DRIVER_CALL = re.compile("(cuda|cu|hip)[A-Z]")
"""Start of the names of driver calls, such as cudaLaunchKernel. A driver call and an operator can have the same id,
because CUPTI numbers the former and torch the latter."""
NUMBERED = (
    (rf"^## Call ({COMPILED}) \w+ ##$", r"\1"),
    (r"^(Torch-Compiled Region): .*$", r"\1"),
    (r"^(graph)_\d+(_kernel)$", r"\1\2"),  # from a template, such as flex_attention's on the CPU
)
"""Patterns of names with digests or numbers, which differ between processes, and their replacements without these."""
LONGEST_KERNEL = 200  # characters; longer names of kernels, with template arguments, are truncated
MANY_NAMES = 4096  # size of name caches: a loop over tokens has a hundred thousand events with few different names


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory of one call in bytes, beyond the memory in use at its start: inputs and mask do not count."""

    peak_bytes: int  # the most in use during the call
    kept_bytes: int  # in use after the call: its result, and tensors saved for a backward pass
    result_bytes: int = 0  # memory of the result, part of `kept_bytes`


class Kernel(NamedTuple):
    """A kernel or copy on a device, with the operator that launched it."""

    name: str  # without return type, parameters and parts that differ between processes
    duration_ns: int
    operator: str  # name of the operator; "" for none
    start_ns: int


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The profiler's record of one call."""

    events: list[Any]  # events of the profiler
    result: dict[int, int]  # bytes of the result's storages, by address
    allocated: Footprint | None = None  # the allocator's count, without `result_bytes`; None: use the events

    def footprint(self, given: Iterable[Tensor] = ()) -> Footprint:
        """Return the call's memory; storages that the result shares with the inputs `given` do not count as result."""
        inputs = {tensor.untyped_storage().data_ptr() for tensor in given}
        result_bytes = sum(size for place, size in self.result.items() if place not in inputs)
        if self.allocated is not None:
            return replace(self.allocated, result_bytes=result_bytes)
        changes = [event.nbytes() for event in self.events if event.name() == MEMORY]  # negative for a release
        levels = [0, *itertools.accumulate(changes)]
        return Footprint(peak_bytes=max(levels), kept_bytes=levels[-1], result_bytes=result_bytes)

    def operators(self) -> tuple[Operator, ...]:
        """Sum up the calls of each operator; sort the operators by self time, the longest first.

        If the call launched kernels, an operator's time is that of its kernels. A kernel that no operator launched, as
        from an extension or Triton, is listed under its own name.
        """
        num_calls, self_ns = Counter[str](), Counter[str]()  # without the time of nested operators
        running: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)  # ends and names of operators, by thread
        for event in sorted(filter(_is_operator, self.events), key=lambda event: (event.start_ns(), -event.end_ns())):
            name, start_ns, end_ns = plain_name(event.name()), event.start_ns(), event.end_ns()
            stack = running[event.start_thread_id()]
            while stack and stack[-1][0] <= start_ns and end_ns > stack[-1][0]:
                stack.pop()
            num_calls[name] += 1
            self_ns[name] += end_ns - start_ns
            if stack:
                self_ns[stack[-1][1]] -= end_ns - start_ns
            stack.append((end_ns, name))
        launched: defaultdict[str, dict[str, None]] = defaultdict(dict)  # kernels by operator, each once
        if kernels := self.kernels():
            self_ns.clear()
        for kernel in kernels:
            name = kernel.operator or kernel.name
            launched[name][kernel.name] = None
            self_ns[name] += kernel.duration_ns
            num_calls[name] += not kernel.operator
        operators = [
            Operator(name=name, num_calls=number, self_s=max(0, self_ns[name]) / 1e9, kernels=tuple(launched[name]))
            for name, number in num_calls.items()
        ]
        return tuple(sorted(operators, key=lambda operator: (-operator.self_s, operator.name)))

    def kernels(self) -> list[Kernel]:
        """Return the kernels and copies on devices other than the host, each with the operator that launched it."""
        from torch._C._autograd import DeviceType

        operators = {event.correlation_id(): event.name() for event in self.events if _is_operator(event)}
        return [
            Kernel(
                plain_kernel(event.name()),
                event.end_ns() - event.start_ns(),
                plain_name(operators.get(event.linked_correlation_id() or None, "")),
                event.start_ns(),
            )
            for event in self.events
            if event.device_type() != DeviceType.CPU and event.name() != MEMORY and not event.is_user_annotation()
        ]


@lru_cache(MANY_NAMES)
def plain_name(name: str) -> str:
    """Return an operator's name without the digests and numbers of compiled graphs."""
    for pattern, kept in NUMBERED:
        name = re.sub(pattern, kept, name)
    return name


@lru_cache(MANY_NAMES)
def plain_kernel(name: str) -> str:
    """Return a kernel's name without return type, parameters and parts that differ between processes."""
    bare = re.sub(r"_object_at_.*", "", name.removeprefix("void "))
    return bare.replace("(anonymous namespace)::", "").partition("(")[0][:LONGEST_KERNEL]


def busy_s(kernels: Iterable[Kernel]) -> float:
    """Return the seconds in which at least one kernel ran; overlapping kernels count once."""
    total_ns = end_ns = 0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_ns):
        last_ns = kernel.start_ns + kernel.duration_ns
        total_ns += max(0, last_ns - max(kernel.start_ns, end_ns))
        end_ns = max(end_ns, last_ns)
    return total_ns / 1e9


def _is_operator(event: Any) -> bool:  # noqa: ANN401 - the profiler's
    """Return whether an event is an operator on the host, and not a driver call that is linked to an operator."""
    from torch._C._autograd import DeviceType

    if event.device_type() != DeviceType.CPU or event.linked_correlation_id():
        return False
    return event.name() != MEMORY and not DRIVER_CALL.match(event.name())


def record(
    call: Callable[[], object], activities: Sequence[str], finish: Callable[[], object] = lambda: None
) -> Recording:
    """Make one call under the profiler with these `activities`; `finish` is called while the result is alive.

    This avoids torch.profiler, which imports the compiler and so takes a second.

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
    result = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return Recording(events=seen.kineto_results.events(), result=result)
