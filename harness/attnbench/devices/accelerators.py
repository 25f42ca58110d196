"""The common code of devices with queues and an allocator, which torch.get_device_module(name) controls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attnbench.devices import Device
from attnbench.devices.loads import Load, products_and_copies
from attnbench.devices.queued import QueuedClock
from attnbench.devices.recording import Footprint, Recording, record

if TYPE_CHECKING:  # the description of a device needs no torch
    from torch import Tensor


class Accelerator(Device):
    """The device NAME:N, or NAME for the current device of that kind. Its clock reads events of the current stream."""

    is_host = False
    can_spin = False  # there is `spin(cycles)`, a kernel that keeps the device busy while calls are queued
    sides: tuple[int, ...] = (1024, 2048, 4096, 8192)  # side lengths of the products that show the highest rate
    smallest_copy = 2**22  # bytes
    largest_copy = 2**30  # bytes; a cache of 64 MiB contains only a thirtieth of the data that is read and written

    def __init__(self, name: str) -> None:
        self.name = self.torch_device = name
        self.clock = QueuedClock(self)

    @property
    def module(self) -> Any:  # noqa: ANN401 - a module
        """Torch's module with the functions of this kind of device, such as torch.cuda."""
        import torch

        return torch.get_device_module(self.name)

    def current(self) -> AbstractContextManager[object]:
        """Make the device the current one inside the context."""
        return self.module.device(self.name)  # type: ignore[no-any-return]  # a module has no types

    def event(self) -> Any:  # noqa: ANN401 - its type needs torch
        """Create an event, which can record a time in a stream."""
        return self.module.Event(enable_timing=True)

    def missing(self) -> str | None:
        """Return a message if there is no driver, or too few devices for the number in the name; otherwise None."""
        import torch

        index = torch.device(self.name).index or 0
        is_here = self.module.is_available() and index < self.module.device_count()
        return None if is_here else f"this machine has no device {self.name}"

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        self.module.synchronize(self.name)

    def select(self) -> None:
        """Make this the current device; if its name has no number, the first device of its kind."""
        self.module.set_device(int(self.name.partition(":")[2] or 0))

    def generators(self) -> Mapping[str, Any]:
        """Return one generator for each device of this kind, by name; none before the first use of such a device."""
        if not self.module.is_initialized():
            return {}
        kind = self.name.partition(":")[0]
        return {f"the generator of {kind}:{n}": each for n, each in enumerate(self.module.default_generators)}

    def record(self, call: Callable[[], object]) -> Recording:
        """Make one call under the profiler; the allocator, whose cache is emptied first, counts the memory."""
        self.synchronize()
        self.module.empty_cache()
        before, after = self.counts(), {}

        def finish() -> None:
            self.synchronize()
            after.update(self.counts())

        return replace(record(call, self.activities, finish), allocated=self.allocated(before, after))

    def counts(self) -> dict[str, int]:
        """Return the allocator's statistics in bytes, by name, and reset its peaks."""
        counts: dict[str, int] = self.module.memory_stats(self.name)
        self.module.reset_peak_memory_stats(self.name)
        return counts

    @staticmethod
    def allocated(before: Mapping[str, int], after: Mapping[str, int]) -> Footprint:
        """Return the memory of a call from the `counts` before and after it; `before` lacks counts at first use."""
        inputs = before.get("allocated_bytes.all.current", 0)
        return Footprint(
            peak_bytes=after["allocated_bytes.all.peak"] - inputs,
            kept_bytes=after["allocated_bytes.all.current"] - inputs,
        )

    @cached_property
    def _beyond_caches(self) -> tuple[Tensor, Tensor]:
        import torch

        size = 2 * self.cache_bytes()
        written = torch.empty(size, dtype=torch.uint8, device=self.name)
        return written, torch.zeros(size // 4, dtype=torch.int32, device=self.name)

    def flush(self) -> object:
        """Write twice the bytes of the largest cache, then read as many, so that the caches hold no modified data."""
        written, read = self._beyond_caches
        written.add_(1)
        return read.sum()

    def interference_probe(self, num_threads: int = 1) -> Callable[[], object]:  # noqa: ARG002 - it uses the whole device
        """Return a function that computes a matrix product and makes a copy."""
        import torch

        draws = torch.Generator(device=self.name).manual_seed(0)  # equal numbers would take less power and time
        matrix = torch.randn(512, 512, device=self.name, generator=draws)
        source = torch.randn(2**22, device=self.name, generator=draws)
        product, target = torch.empty_like(matrix), torch.empty_like(source)

        def work() -> None:
            torch.matmul(matrix, matrix, out=product)
            target.copy_(source)

        return work

    def loads(self, dtype: str) -> list[Load]:
        """Return products in `dtype`, and copies from `smallest_copy` to `largest_copy`, which exceeds the caches."""
        import torch

        def empty(dtype: str, length: int) -> Tensor:
            return torch.empty(length, dtype=getattr(torch, dtype), device=self.name)

        return products_and_copies(empty, [dtype], self.sides, self.smallest_copy, self.largest_copy)
