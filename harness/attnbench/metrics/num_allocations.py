"""How many times one call asks for memory.

Each request costs time of its own, and more where the memory was given back to the system before.
"""

from attnbench.metrics import Metric

METRIC = Metric(
    unit="allocations",
    summary="allocations of one call",
    measure=lambda case: float(case.footprint.num_allocations),
)
