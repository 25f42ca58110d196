"""Apple's GPUs through Metal, written against the signatures of torch.mps and never run: everything here is untried.

The GPUs have no float64, so right answers come from the CPU. Source: https://docs.pytorch.org/docs/stable/mps.html.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from attnbench.devices import Facts, processor
from attnbench.devices.accelerators import Accelerator
from attnbench.devices.recording import Footprint


class Mps(Accelerator):
    """The GPU of a Mac."""

    is_single = True
    has_float64 = False
    sides, largest_copy = (512, 1024, 2048), 2**28
    untried = (
        "answers are compared with a float64 oracle on the CPU; times are between Metal's events, and include pauses "
        "in which the GPU waits for the host; peak memory is that of the allocator's heaps"
    )

    def current(self) -> AbstractContextManager[object]:
        """Return a context that does nothing: there is only one device."""
        return nullcontext()

    def seems_present(self) -> bool:
        """Return whether this is a Mac with an Apple chip."""
        return (platform.system(), platform.machine()) == ("Darwin", "arm64")

    def facts(self) -> Facts:
        """Return the chip's name, and the names of environment variables that affect its speed."""
        chip = "" if self.missing() else f"{processor()}, Metal"
        return Facts(accelerator=chip, settings=("PYTORCH_MPS_*", "PYTORCH_ENABLE_MPS_FALLBACK"))

    def synchronize(self) -> None:
        """Wait for all queued work."""
        self.module.synchronize()

    def select(self) -> None:
        """Do nothing: the only GPU is always the current device."""

    def generators(self) -> Mapping[str, Any]:
        """Return the GPU's only generator; none if the GPU is missing."""
        if self.missing():
            return {}
        return {"the generator of mps": self.module._get_default_mps_generator()}  # noqa: SLF001 - it has no other name

    def counts(self) -> dict[str, int]:
        """Return the bytes of tensors and of the allocator's heaps, by name."""
        return {"tensors": self.module.current_allocated_memory(), "heaps": self.module.driver_allocated_memory()}

    @staticmethod
    def allocated(before: Mapping[str, int], after: Mapping[str, int]) -> Footprint:
        """Return the memory of a call from the `counts` before and after it; the peak is the growth of the heaps."""
        kept_bytes, grown_bytes = (after[name] - before[name] for name in ("tensors", "heaps"))
        return Footprint(peak_bytes=max(kept_bytes, grown_bytes), kept_bytes=kept_bytes)

    def cache_bytes(self) -> int:
        """Return the bytes of the largest cache of an Apple chip up to 2025 (M1 Ultra); Metal does not report them."""
        return 96 * 2**20


DEVICE = Mps
