"""All the memory that one call asks for, one allocation after the other.

Where it is far more than the peak, memory is taken and given back again and again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.metrics import Metric

if TYPE_CHECKING:
    from attnbench.checking.case import Case


def measure(case: Case) -> float:
    """Bytes of all allocations of one call together."""
    return float(case.footprint.allocated_bytes)


METRIC = Metric(unit="bytes", summary="memory of all allocations of one call together", measure=measure)
