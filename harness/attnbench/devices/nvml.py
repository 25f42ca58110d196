"""The limits and the state of a GPU as its driver reports them through nvidia-ml-py, if that is installed.

Source: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from attnbench.devices import T
from attnbench.storage.records import DeviceState

POWER_CAP = 0x4
"""The throttle reason that most GPUs have whenever they work hard; all others are unusual."""
CLOCK_EVENTS = {
    POWER_CAP: "power cap",
    0x8: "hardware slowdown",
    0x10: "clocks in step with other GPUs",
    0x20: "thermal slowdown",
    0x40: "thermal slowdown",
    0x80: "power brake",
}
"""Reasons for a reduced clock, by the bit of NVML's `nvmlClocksEventReasons`. An idle device and clocks set by a user
are left out: they slow nothing down unintentionally."""
SLOWING = sum(CLOCK_EVENTS)
"""The union of these bits."""


def library() -> Any:  # noqa: ANN401 - a module without types, or None
    """The initialised module pynvml; None if it is missing or finds no driver."""
    try:
        found = import_module("pynvml")
        found.nvmlInit()
    except Exception:  # noqa: BLE001 - an optional module: its error type is unknown before the import
        return None
    return found


def handle(uuid: str, nvml: Any) -> Any:  # noqa: ANN401 - as `library` gives it
    """NVML's handle of the GPU with this UUID, or of that part of a GPU (MIG); None if it does not know it."""
    for kind in ("GPU", "MIG"):
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
    return None


def limits(uuid: str, nvml: Any) -> dict[str, str]:  # noqa: ANN401 - as `library` gives it
    """The limits and modes of the GPU with this UUID, as text by name; those that it lacks are left out."""
    if (found := handle(uuid, nvml)) is None:
        return {}
    asked: dict[str, Callable[[], str]] = {
        "gpu SM clock limit": lambda: f"{nvml.nvmlDeviceGetMaxClockInfo(found, nvml.NVML_CLOCK_SM)} MHz",
        "gpu memory clock limit": lambda: f"{nvml.nvmlDeviceGetMaxClockInfo(found, nvml.NVML_CLOCK_MEM)} MHz",
        "gpu power limit": lambda: f"{nvml.nvmlDeviceGetEnforcedPowerLimit(found) / 1000:.0f} W",
        "gpu ECC": lambda: "on" if nvml.nvmlDeviceGetEccMode(found)[0] else "off",
        "gpu MIG": lambda: "on" if nvml.nvmlDeviceGetMigMode(found)[0] else "off",
    }
    return {name: text for name, ask in asked.items() if (text := _known(ask, nvml, ""))}


def moment(nvml: Any, handle: Any) -> DeviceState:  # noqa: ANN401 - as `library` gives it
    """Current clock, temperature and power; unreadable values are 0."""
    return DeviceState(
        clock_mhz=_known(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)), nvml, 0.0),
        temperature_c=_known(
            lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)), nvml, 0.0
        ),
        power_w=_known(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000, nvml, 0.0),
        slowed_by=_known(lambda: _slowed_by(handle, nvml), nvml, 0),
    )


def _known(ask: Callable[[], T], nvml: Any, default: T) -> T:  # noqa: ANN401 - as above
    """The answer of the driver; the default if it has none."""
    try:
        return ask()
    except nvml.NVMLError:
        return default


def reasons(slowed_by: int) -> str:
    """Reasons for reduced clocks, in words; "" without any."""
    return ", ".join(dict.fromkeys(words for bit, words in CLOCK_EVENTS.items() if slowed_by & bit))


def _slowed_by(handle: Any, nvml: Any) -> int:  # noqa: ANN401 - as above
    """The reason bits; older packages and drivers use a function name that CUDA 14 will remove."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except (AttributeError, nvml.NVMLError):
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
