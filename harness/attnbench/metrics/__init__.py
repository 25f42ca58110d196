"""Metrics: a file here that holds METRIC is the plug, and its stem is the metric's name; or METRIC names several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a metric can be listed where torch is missing
    from collections.abc import Callable

    from attnbench.checking.case import Case
    from attnbench.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A measured property of a cell, with its unit; smaller is better.

    `measure` reads the metric from a case in a pass of its own, after the check and apart from timing. None says that
    the metric is what the interleaved blocks sample. `fits` says on which workloads there is such a thing, and `note`
    what a reader should know of a value, in words; "": nothing. `is_column` says that tables show it.
    """

    unit: str
    summary: str
    measure: Callable[[Case], float] | None
    fits: Callable[[Workload], bool] = lambda _: True
    note: Callable[[Case], str] = lambda _: ""
    is_column: bool = True
