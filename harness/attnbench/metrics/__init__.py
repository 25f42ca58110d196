"""One file for each metric: a file here that holds METRIC is the plug, and its stem is the metric's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnbench.devices import device

if TYPE_CHECKING:  # a metric can be listed where torch is missing
    from collections.abc import Callable

    from attnbench.checking.case import Case
    from attnbench.workloads.workload import Workload


def has_caching_allocator(workload: Workload) -> bool:
    """Where torch keeps memory that it has taken from the device, as CUDA's allocator does."""
    return device(workload.device).has_caching_allocator


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What is measured of a cell, in which unit, and how; smaller is better.

    `measure` reads the metric from a case in a pass of its own, after the check and apart from timing. None says that
    the metric is what the interleaved blocks sample. `fits` says on which workloads there is such a thing.
    """

    unit: str
    summary: str
    measure: Callable[[Case], float] | None
    fits: Callable[[Workload], bool] = lambda _: True
