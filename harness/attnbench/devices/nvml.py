"""What the driver says of a GPU, by nvidia-ml-py where it is installed: clocks, power, temperature, ECC, MIG.

Source: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from attnbench.storage.records import DeviceState

POWER_CAP = 0x4
"""The reason that most GPUs have whenever they work hard; the others are no usual state."""
CLOCK_EVENTS = {
    POWER_CAP: "power cap",
    0x8: "hardware slowdown",
    0x10: "clocks in step with other GPUs",
    0x20: "thermal slowdown",
    0x40: "thermal slowdown",
    0x80: "power brake",
}
"""Why a clock is below what it could be, by the bit of NVML's `nvmlClocksEventReasons`. That nothing runs, or that
somebody has set the clocks, slows nothing down that was not meant to."""
SLOWING = sum(CLOCK_EVENTS)
"""All these bits."""


def library() -> Any:  # noqa: ANN401 - a module without types, or None
    """The module pynvml, ready to be asked; None where it is missing or finds no driver."""
    try:
        found = import_module("pynvml")
        found.nvmlInit()
    except Exception:  # noqa: BLE001 - its own errors have no common type before it is imported; it is optional
        return None
    return found


def handle(uuid: str, nvml: Any) -> Any:  # noqa: ANN401 - as `library` gives it
    """By what NVML knows the GPU with this UUID; None where it does not."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None


def state(uuid: str, nvml: Any) -> dict[str, str]:  # noqa: ANN401 - as `library` gives it
    """What can be read of the GPU with this UUID, by name, in words; what cannot be read is left out."""
    if (found := handle(uuid, nvml)) is None:
        return {}
    asked: dict[str, Callable[[], str]] = {
        "gpu SM clock limit": lambda: f"{nvml.nvmlDeviceGetMaxClockInfo(found, nvml.NVML_CLOCK_SM)} MHz",
        "gpu memory clock limit": lambda: f"{nvml.nvmlDeviceGetMaxClockInfo(found, nvml.NVML_CLOCK_MEM)} MHz",
        "gpu SM clock": lambda: f"{nvml.nvmlDeviceGetClockInfo(found, nvml.NVML_CLOCK_SM)} MHz",
        "gpu power limit": lambda: f"{nvml.nvmlDeviceGetEnforcedPowerLimit(found) / 1000:.0f} W",
        "gpu temperature": lambda: f"{nvml.nvmlDeviceGetTemperature(found, nvml.NVML_TEMPERATURE_GPU)} C",
        "gpu throttle reasons": lambda: f"{_slowed_by(found, nvml):#x}",
        "gpu ECC": lambda: "on" if nvml.nvmlDeviceGetEccMode(found)[0] else "off",
        "gpu MIG": lambda: "on" if nvml.nvmlDeviceGetMigMode(found)[0] else "off",
    }
    said = {}
    for name, ask in asked.items():
        try:
            said[name] = ask()
        except nvml.NVMLError:  # this GPU has no such thing
            continue
    return said


def moment(nvml: Any, handle: Any) -> DeviceState:  # noqa: ANN401 - as `library` gives it
    """Clock, temperature and power as they are now; what cannot be read is 0."""

    def known(ask: Callable[[], float]) -> float:
        try:
            return ask()
        except nvml.NVMLError:
            return 0.0

    return DeviceState(
        clock_mhz=known(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
        temperature_c=known(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
        power_w=known(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        slowed_by=int(known(lambda: _slowed_by(handle, nvml))),
    )


def reasons(slowed_by: int) -> str:
    """Why clocks are below what they could be, in words; empty where nothing says so."""
    return ", ".join(dict.fromkeys(words for bit, words in CLOCK_EVENTS.items() if slowed_by & bit))


def _slowed_by(handle: Any, nvml: Any) -> int:  # noqa: ANN401 - as above
    """The bits; older packages and drivers have the function by a name that CUDA 14 is to remove."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except (AttributeError, nvml.NVMLError):
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
