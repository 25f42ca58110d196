"""Metrics of first calls, which build, compile and plan. Fresh processes time them (processes/first_calls.py)."""

from __future__ import annotations

from attnbench.metrics import Metric
from attnbench.storage.records import FIRST_CACHED, FIRST_CALL, FIRST_LONGER
from attnbench.workloads.workload import Workload


def is_one_process(workload: Workload) -> bool:
    """Return whether a single process computes a call of the workload."""
    return workload.world_size == 1


METRIC = {
    FIRST_CALL: Metric(
        unit="s",
        summary="time of the first call in a fresh process with empty compile caches, import and build included",
        measure=None,
        fits=is_one_process,
    ),
    FIRST_CACHED: Metric(
        unit="s",
        summary="first call in a second process with the compile caches of the first; none if nothing was cached",
        measure=None,
        fits=is_one_process,
    ),
    FIRST_LONGER: Metric(
        unit="s",
        summary="time of the first call at another length, in the process of the first call",
        measure=None,
        fits=is_one_process,
    ),
}
