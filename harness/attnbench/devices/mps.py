"""Apple's GPUs through Metal, written against the signatures of torch.mps and never run: everything here is untried.

They have no float64, so right answers come from the CPU. Source: https://docs.pytorch.org/docs/stable/mps.html.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from attnbench.devices import CROWDED_SHARE, Facts, processor
from attnbench.devices.accelerators import Accelerator, TorchMarks
from attnbench.devices.queued import EventClock
from attnbench.devices.recording import Footprint, Recording, record

CACHE_BYTES = 64 * 2**20
"""At least the system cache of all chips up to 2025; Metal does not report it."""


class MpsMarks(TorchMarks):
    """Events of torch.mps, all on its only stream."""

    def current(self) -> AbstractContextManager[object]:
        """Do nothing: there is one device."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait for all queued work."""
        import torch

        torch.mps.synchronize()


class Mps(Accelerator):
    """The GPU of a Mac."""

    is_single = True
    has_float64 = False
    sides, largest_copy = (512, 1024, 2048), 2**28
    untried = (
        "answers are compared with a float64 oracle on the CPU; times are between Metal's events, and include pauses "
        "in which the GPU waits for the host; peak memory is that of the allocator's heaps"
    )

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.clock = EventClock(MpsMarks(name))

    def seems_present(self) -> bool:
        """Whether this is a Mac with an Apple chip."""
        return (platform.system(), platform.machine()) == ("Darwin", "arm64")

    def missing(self) -> str | None:
        """Report missing Metal."""
        import torch

        return None if torch.backends.mps.is_available() else f"this machine has no device {self.name}"

    def facts(self) -> Facts:
        """The chip, and variables that affect its speed."""
        chip = "" if self.missing() else f"{processor()}, Metal"
        return Facts(accelerator=chip, settings=("PYTORCH_MPS_*", "PYTORCH_ENABLE_MPS_FALLBACK"))

    def synchronize(self) -> None:
        """Wait for all queued work."""
        self.module.synchronize()

    def select(self) -> None:
        """Do nothing: it is always the current one."""

    def generators(self) -> Mapping[str, Any]:
        """The only generator of the GPU."""
        if self.missing():
            return {}
        return {"the generator of mps": self.module._get_default_mps_generator()}  # noqa: SLF001 - it has no other name

    def record(self, call: Callable[[], object]) -> Recording:
        """Make one call under the profiler, which sees only the host; the peak is the growth of the heaps."""
        self.synchronize()
        self.module.empty_cache()
        before, after = self._held_bytes(), list[int]()

        def finish() -> None:
            self.synchronize()
            after.extend(self._held_bytes())

        recording = record(call, self.activities, finish)
        kept_bytes, reserved_bytes = (late - early for late, early in zip(after, before, strict=True))
        peak_bytes = max(kept_bytes, reserved_bytes)
        sizes = {"kept_bytes": kept_bytes, "allocated_bytes": kept_bytes, "reserved_bytes": reserved_bytes}
        return replace(recording, allocated=Footprint(peak_bytes=peak_bytes, num_allocations=0, **sizes))

    def _held_bytes(self) -> tuple[int, int]:
        """Bytes of tensors, and of the allocator's heaps."""
        return self.module.current_allocated_memory(), self.module.driver_allocated_memory()

    def cache_bytes(self) -> int:
        """Bytes of the largest cache, assumed."""
        return CACHE_BYTES

    def is_crowded(self) -> bool:
        """Whether this process's tensors hold more than a quarter of the memory that Metal recommends."""
        tensors, _ = self._held_bytes()
        return bool(tensors > CROWDED_SHARE * self.module.recommended_max_memory())

    def _free_and_whole(self) -> tuple[int, int]:
        _, heaps = self._held_bytes()
        whole: int = self.module.recommended_max_memory()
        return max(0, whole - heaps), whole


DEVICE = Mps
