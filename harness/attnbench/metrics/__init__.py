"""Metrics: each file here defines METRIC, a Metric named like the file, or a dict of several metrics by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # metrics can be listed without torch
    from collections.abc import Callable

    from attnbench.case import Case
    from attnbench.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A measured property of an implementation on a workload, with its unit; smaller is better.

    After the check, `measure` reads the metric of a case in a separate pass; it returns None if nothing can be read.
    `measure` itself is None for the latency, which is sampled while implementations take turns, and for first calls,
    which fresh processes time. `fits` returns whether a workload has the metric. `note` explains a value in words, or
    returns "". If `is_column` is true, tables have a column for the metric.
    """

    unit: str
    summary: str
    measure: Callable[[Case], float | None] | None
    fits: Callable[[Workload], bool] = lambda _: True
    note: Callable[[Case], str] = lambda _: ""
    is_column: bool = True
