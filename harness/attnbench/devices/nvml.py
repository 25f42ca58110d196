"""The limits and the state of a GPU as its driver reports them through nvidia-ml-py, if that is installed.

Source: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

from attnbench.storage.records import DeviceState

POWER_CAP = 0x4  # the reason that slows most GPUs whenever they work hard; all other reasons are unusual
CLOCK_EVENTS = {
    POWER_CAP: "power cap",
    0x8: "hardware slowdown",
    0x10: "clocks in step with other GPUs",
    0x20: "thermal slowdown",
    0x40: "thermal slowdown",
    0x80: "power brake",
}
"""Reasons for a reduced clock, by the bit of NVML's `nvmlClocksEventReasons`. An idle device and clocks set by a user
are left out, because these reductions are expected."""
SM = 1  # NVML's number for the clock of the multiprocessors
SLOWING = sum(CLOCK_EVENTS)  # all bits of CLOCK_EVENTS


def find(uuid: object) -> tuple[Any, Any]:
    """Return the module pynvml, and the handle of the GPU or MIG instance with this UUID; None for each missing one."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - an optional module: its error type is unknown before the import
        return None, None
    for kind in ("GPU", "MIG"):
        with suppress(nvml.NVMLError):
            return nvml, nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
    return nvml, None


def limits(nvml: Any, handle: Any) -> dict[str, str]:  # noqa: ANN401 - nvml and handle come from `find`
    """Return the power limit of a GPU and its modes ECC and MIG as texts, by name; facts that it lacks are left out."""
    texts = {}
    if (limit_mw := _ask(nvml, "EnforcedPowerLimit", handle)) is not None:
        texts["gpu power limit"] = f"{limit_mw / 1000:.0f} W"
    for name in ("Ecc", "Mig"):
        if (modes := _ask(nvml, f"{name}Mode", handle)) is not None:
            texts[f"gpu {name.upper()}"] = "on" if modes[0] else "off"
    return texts


def moment(nvml: Any, handle: Any) -> DeviceState:  # noqa: ANN401 - nvml and handle come from `find`
    """Read the current clock, temperature and power, and the reasons for a reduced clock; unreadable values are 0."""
    slowed_by = _ask(nvml, "CurrentClocksEventReasons", handle)
    if slowed_by is None:  # the older name, which CUDA 14 will remove
        slowed_by = _ask(nvml, "CurrentClocksThrottleReasons", handle)
    return DeviceState(
        clock_mhz=float(_ask(nvml, "ClockInfo", handle, SM) or 0),
        temperature_c=float(_ask(nvml, "Temperature", handle, 0) or 0),
        power_w=(_ask(nvml, "PowerUsage", handle) or 0) / 1000,
        slowed_by=slowed_by or 0,
    )


def energy_j(nvml: Any, handle: Any) -> float | None:  # noqa: ANN401 - nvml and handle come from `find`
    """Return the joules used since the driver was loaded; None if the GPU has no counter, as before Volta."""
    used_mj = _ask(nvml, "TotalEnergyConsumption", handle)
    return None if used_mj is None else used_mj / 1000


def _ask(nvml: Any, name: str, *operands: Any) -> Any:  # noqa: ANN401 - nvml and handle come from `find`
    """Call nvmlDeviceGetNAME, where NAME is `name`; return None if there is no driver, no handle or no such value."""
    if operands[0] is None:
        return None
    with suppress(AttributeError, nvml.NVMLError):
        return getattr(nvml, f"nvmlDeviceGet{name}")(*operands)
    return None


def reasons(slowed_by: int) -> str:
    """Return, as text, the reasons for a reduced clock whose bits are set in `slowed_by`; "" if there are none."""
    return ", ".join(dict.fromkeys(words for bit, words in CLOCK_EVENTS.items() if slowed_by & bit))
