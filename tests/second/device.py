"""The device `second` of the tests, `second:0` and `second:1`: the clock of queues, and an allocator that counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from attnbench.devices import CROWDED_SHARE
from attnbench.devices.accelerators import Accelerator
from attnbench.devices.queued import QueuedClock, Span
from attnbench.devices.recording import Footprint, Recording, record

SPIN_HZ = 1e9
BUSY_S = 5e-3
"""The device counts as busy on other streams only after this time: on a shared machine the host is often late."""


class SecondClock(QueuedClock):
    def _is_busy_elsewhere(self, span: Span) -> bool:
        return span.left_s > BUSY_S


class Second(Accelerator):
    has_caching_allocator = False
    can_spin = True
    sides, smallest_copy, largest_copy = (64, 128), 2**14, 2**18

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.clock = SecondClock(self)

    def current(self) -> AbstractContextManager[object]:
        import torch

        return torch.accelerator.device_index(self._index)

    def event(self) -> Any:
        import torch

        return torch.Event("second", enable_timing=True)

    def spin(self, cycles: int) -> None:
        self.module.spin(cycles / SPIN_HZ)

    def seems_present(self) -> bool:
        return False

    def missing_compiler(self) -> str | None:
        return "no compiler knows this device"

    @property
    def _index(self) -> int:
        import torch

        index = torch.device(self.name).index
        return self.module.current_device() if index is None else index

    def record(self, call: Callable[[], object]) -> Recording:
        self.module.reset_peak(self._index)
        before, after = self.module.memory(self._index), []

        def finish() -> None:
            after.extend(self.module.memory(self._index))

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
        return 2**16

    def interference_probe(self, num_threads: int = 1) -> Callable[[], object]:
        import torch

        matrix = torch.ones(64, 64, device=self.name)
        return lambda: torch.matmul(matrix, matrix)

    def _free_and_whole(self) -> tuple[int, int]:
        held, _, _, _, limit = self.module.memory(self._index)
        return limit - held, limit

    def is_crowded(self) -> bool:
        free, limit = self._free_and_whole()
        return limit - free > CROWDED_SHARE * limit


DEVICE = Second
