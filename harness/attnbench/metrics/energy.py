"""The metric of energy: joules of a call on a GPU, from the counter of the GPU's driver."""

from __future__ import annotations

import math
from time import perf_counter
from typing import TYPE_CHECKING

from attnbench.devices import device
from attnbench.metrics import Metric

if TYPE_CHECKING:  # metrics can be listed without torch
    from collections.abc import Callable

    from attnbench.case import Case
    from attnbench.devices import Device

LEAST_S, MOST_S = 3.0, 15.0
"""Least and most seconds of the measured calls. The driver updates its counter about ten times a second."""
QUEUED_S = 0.02  # seconds of calls that are queued before the host waits, so that the device is not idle between calls


def measure(case: Case) -> float | None:
    """Measure the joules of one call, the mean over LEAST_S or more seconds of calls; None without a usable counter.

    The measurement begins and ends when the counter changes. The counter covers the whole device, so the joules include
    idle power and the work of other processes.
    """
    with case.grad_mode():
        return _of_calls(case.call(), case.device)


def _of_calls(call: Callable[[], object], here: Device) -> float | None:
    call()
    here.synchronize()
    start_s = perf_counter()
    call()
    here.synchronize()
    num_queued = max(1, math.ceil(QUEUED_S / max(perf_counter() - start_s, 1e-9)))
    first: tuple[float, int, float] | None = None  # joules, calls so far and seconds at the first change
    last_j, num_calls = here.energy_j(), 0
    while last_j is not None and perf_counter() - start_s < MOST_S:
        for _ in range(num_queued):
            call()
        here.synchronize()
        num_calls += num_queued
        now_j, now_s = here.energy_j(), perf_counter()
        if now_j is None:
            return None
        if now_j != last_j:
            if first is not None and now_s - first[2] >= LEAST_S:
                return (now_j - first[0]) / (num_calls - first[1])
            first = first or (now_j, num_calls, now_s)
            last_j = now_j
    return None


METRIC = Metric(
    unit="J",
    summary="energy of one call of the whole device, work of others included, over seconds of calls",
    measure=measure,
    fits=lambda workload: workload.world_size == 1 and device(workload.device).counts_energy,
)
