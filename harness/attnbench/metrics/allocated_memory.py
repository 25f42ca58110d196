"""All the memory that one call asks for, one allocation after the other.

Where it is far more than the peak, memory is taken and given back again and again.
"""

from attnbench.metrics import Metric

METRIC = Metric(
    unit="bytes",
    summary="memory of all allocations of one call together",
    measure=lambda case: float(case.footprint.allocated_bytes),
)
