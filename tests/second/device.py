"""The device `second` of the tests, `second:0` and `second:1`: the clock of queues, and an allocator that counts."""

from __future__ import annotations

from collections.abc import Callable

from attnbench.devices.accelerators import Accelerator
from attnbench.devices.queued import LEFT_SHARE, QueuedClock, Span

SPIN_HZ = 1e9
BUSY_S = 5e-3
"""The device counts as busy on other streams only after this time, since the host is often late on a shared machine,
above all after a long sleep."""


class SecondClock(QueuedClock):
    def _is_busy_elsewhere(self, span: Span) -> bool:
        return span.left_s > max(BUSY_S, LEFT_SHARE * span.device_s)


class Second(Accelerator):
    can_spin = True
    sides, smallest_copy, largest_copy = (64, 128), 2**14, 2**18

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.clock = SecondClock(self)

    def spin(self, cycles: int) -> None:
        self.module.spin(cycles / SPIN_HZ)

    def seems_present(self) -> bool:
        return False

    def missing_compiler(self) -> str | None:
        return "no compiler knows this device"

    def cache_bytes(self) -> int:
        return 2**16

    def interference_probe(self, num_threads: int = 1) -> Callable[[], object]:
        import torch

        matrix = torch.ones(64, 64, device=self.name)
        return lambda: torch.matmul(matrix, matrix)


DEVICE = Second
