"""How many times one call asks for memory.

Each request costs time of its own, and more where the memory was given back to the system before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.metrics import Metric

if TYPE_CHECKING:
    from attnbench.checking.case import Case


def measure(case: Case) -> float:
    """Allocations of one call."""
    return float(case.footprint.num_allocations)


METRIC = Metric(unit="allocations", summary="allocations of one call", measure=measure)
