"""Memory that CUDA's allocator has taken from the device at its peak and no tensor uses at theirs.

Reserved less allocated: rests of segments that are too small, or cut up, for what is asked.
"""

from attnbench.metrics import Metric, has_caching_allocator

METRIC = Metric(
    unit="bytes",
    summary="reserved peak less allocated peak of CUDA's allocator",
    measure=lambda case: float(case.footprint.reserved_bytes - case.footprint.peak_bytes),
    fits=has_caching_allocator,
)
