"""The device `second` of the tests, `second:0` and `second:1`: the clock of queues, and an allocator that counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from time import perf_counter
from typing import Any

from attnbench.devices import CROWDED_SHARE, Device
from attnbench.devices.loads import Load, products_and_copies
from attnbench.devices.queued import QueuedClock, Runtime, Span
from attnbench.devices.recording import Footprint, Recording, record

CACHE_BYTES = 2**16
SIDES, SMALLEST_COPY, LARGEST_COPY = (64, 128), 2**14, 2**18
SPIN_HZ = 1e9
BUSY_S = 5e-3
"""The device counts as busy on other streams only after this time: on a shared machine the host is often late."""


class Queue(Runtime):
    """Events and waits of torch, and a spin."""

    def __init__(self, device: str) -> None:
        self.device = device

    def current(self) -> AbstractContextManager[object]:
        import torch

        index = torch.device(self.device).index
        return torch.accelerator.device_index(torch.accelerator.current_device_index() if index is None else index)

    def event(self) -> Any:
        import torch

        return torch.Event("second", enable_timing=True)

    def spin(self, cycles: int) -> None:
        import torch

        torch.second.spin(cycles / SPIN_HZ)

    def synchronize(self) -> None:
        import torch

        torch.accelerator.synchronize(self.device)

    def host_s(self) -> float:
        return perf_counter()


class SecondClock(QueuedClock):
    def _is_busy_elsewhere(self, span: Span) -> bool:
        return span.left_s > BUSY_S


class Second(Device):
    is_host = False
    has_caching_allocator = False

    def __init__(self, name: str) -> None:
        self.name = self.torch_device = name
        self.clock = SecondClock(Queue(name))

    def seems_present(self) -> bool:
        return False

    def missing(self) -> str | None:
        import torch

        index = torch.device(self.name).index or 0
        return None if index < torch.second.device_count() else f"this machine has no device {self.name}"

    def missing_compiler(self) -> str | None:
        return "no compiler knows this device"

    def synchronize(self) -> None:
        self.clock.runtime.synchronize()

    def number(self) -> int | None:
        import torch

        return torch.second.device_count()

    def use(self, number: int) -> None:
        import torch

        torch.second.set_device(number)

    def generators(self) -> Mapping[str, Any]:
        import torch

        return {f"the generator of second:{n}": each for n, each in enumerate(torch.second.default_generators)}

    @property
    def _index(self) -> int:
        import torch

        index = torch.device(self.name).index
        return torch.second.current_device() if index is None else index

    def record(self, call: Callable[[], object]) -> Recording:
        import torch

        torch.second.reset_peak(self._index)
        before, after = torch.second.memory(self._index), []

        def finish() -> None:
            after.extend(torch.second.memory(self._index))

        recording = record(call, self.activities, finish)
        held, peak, number, total, _ = after
        counted = Footprint(
            peak_bytes=peak - before[0],
            kept_bytes=held - before[0],
            num_allocations=number - before[2],
            allocated_bytes=total - before[3],
        )
        return replace(recording, allocated=counted)

    def cache_bytes(self) -> int:
        return CACHE_BYTES

    @cached_property
    def _beyond_caches(self) -> Any:
        import torch

        return torch.empty(2 * CACHE_BYTES, dtype=torch.uint8, device=self.name)

    def flush(self) -> object:
        return self._beyond_caches.add_(1)

    def interference_probe(self, num_threads: int = 1) -> Callable[[], object]:
        import torch

        matrix = torch.ones(64, 64, device=self.name)
        return lambda: torch.matmul(matrix, matrix)

    def loads(self, dtype: str) -> list[Load]:
        import torch

        def empty(dtype: str, length: int) -> Any:
            return torch.empty(length, dtype=getattr(torch, dtype), device=self.name)

        return products_and_copies(empty, [dtype], SIDES, SMALLEST_COPY, CACHE_BYTES, LARGEST_COPY)

    def free_bytes(self) -> int:
        import torch

        held, _, _, _, limit = torch.second.memory(self._index)
        return limit - held

    def is_crowded(self) -> bool:
        import torch

        held, _, _, _, limit = torch.second.memory(self._index)
        return held > CROWDED_SHARE * limit

    @contextmanager
    def capped(self, limit_bytes: int) -> Iterator[None]:
        import torch

        index = self._index
        before = torch.second.set_limit(index, torch.second.memory(index)[0] + limit_bytes)
        try:
            yield
        finally:
            torch.second.set_limit(index, before)


DEVICE = Second
