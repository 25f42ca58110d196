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
    """A measured property of a cell, with its unit; smaller is better.

    `measure` reads the metric of a case in a pass of its own after the check; it returns None if nothing can be read.
    `measure` itself is None for the latency, which comes from interleaved blocks, and for first calls, which fresh
    processes time. `fits` says whether a workload has the metric. `note` explains a value in words, or returns "".
    `is_column` adds the metric to tables.
    """

    unit: str
    summary: str
    measure: Callable[[Case], float | None] | None
    fits: Callable[[Workload], bool] = lambda _: True
    note: Callable[[Case], str] = lambda _: ""
    is_column: bool = True
