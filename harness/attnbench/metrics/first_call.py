"""Metrics of first calls, which build, compile and plan. Fresh processes time them (processes/first_calls.py)."""

from __future__ import annotations

from attnbench.metrics import Metric
from attnbench.storage.records import FIRST_CACHED, FIRST_CALL, FIRST_OTHERS
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
}
METRIC |= {
    metric: Metric(
        unit="s",
        summary=f"time of the first call at a {words}, in the process of the first call",
        measure=None,
        fits=is_one_process,
    )
    for metric, words in FIRST_OTHERS.items()
}
