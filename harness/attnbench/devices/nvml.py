"""What the driver says of a GPU, by nvidia-ml-py where it is installed: clocks, power limit, ECC, MIG, throttling.

Source: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def library() -> Any:  # noqa: ANN401 - a module without types, or None
    """The module pynvml, ready to be asked; None where it is missing or finds no driver."""
    try:
        found = import_module("pynvml")
        found.nvmlInit()
    except Exception:  # noqa: BLE001 - its own errors have no common type before it is imported; it is optional
        return None
    return found


def state(uuid: str, nvml: Any) -> dict[str, str]:  # noqa: ANN401 - as `library` gives it
    """What can be read of the GPU with this UUID, by name, in words; what cannot be read is left out."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return {}
    asked: dict[str, Callable[[], str]] = {
        "gpu SM clock limit": lambda: f"{nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)} MHz",
        "gpu memory clock limit": lambda: f"{nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)} MHz",
        "gpu SM clock": lambda: f"{nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)} MHz",
        "gpu power limit": lambda: f"{nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000:.0f} W",
        "gpu temperature": lambda: f"{nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)} C",
        "gpu throttle reasons": lambda: f"{nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle):#x}",
        "gpu ECC": lambda: "on" if nvml.nvmlDeviceGetEccMode(handle)[0] else "off",
        "gpu MIG": lambda: "on" if nvml.nvmlDeviceGetMigMode(handle)[0] else "off",
    }
    found = {}
    for name, ask in asked.items():
        try:
            found[name] = ask()
        except nvml.NVMLError:  # this GPU has no such thing
            continue
    return found
