"""The most memory that one call holds at once, beyond its inputs and the size of its results.

What an implementation could save at the most: inputs and results must be somewhere, whoever computes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.metrics import Metric

if TYPE_CHECKING:
    from attnbench.checking.case import Case


def measure(case: Case) -> float:
    """Bytes at the peak of one call, less those of its results."""
    found = case.footprint
    return float(found.peak_bytes - found.result_bytes)


METRIC = Metric(unit="bytes", summary="peak memory of one call beyond its inputs and results", measure=measure)
