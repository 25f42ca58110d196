"""Support for Intel GPUs, written from the documentation of torch.xpu but never run: treat it as untested.

Source: https://docs.pytorch.org/docs/stable/xpu.html.
"""

from attnbench.devices import Facts
from attnbench.devices.accelerators import Accelerator


class Xpu(Accelerator):
    """The current Intel GPU `xpu`, or `xpu:N`."""

    activities = ("CPU", "XPU")
    collectives = "xccl"
    untried = (
        "answers are compared with a float64 oracle, which computes on the GPU; times are between its events, and "
        "include pauses in which it waits for the host"
    )

    def seems_present(self) -> bool:
        """Return False: users must name the device, because it cannot be detected without torch."""
        return False

    def facts(self) -> Facts:
        """Return the device's name."""
        return Facts(accelerator=self.module.get_device_name(self.name) if self.module.is_available() else "")

    def cache_bytes(self) -> int:
        """Return an assumed size of the second-level cache in bytes, since torch does not report it.

        It exceeds the 204 MB of each half of Intel's Max 1550, which torch shows as two devices.
        """
        return 256 * 2**20


DEVICE = Xpu
