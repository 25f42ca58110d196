"""The most memory that CUDA's allocator takes from the device for one call, beyond its inputs.

The allocator takes segments and cuts tensors out of them: this is what other processes miss.
"""

from attnbench.metrics import Metric, has_caching_allocator

METRIC = Metric(
    unit="bytes",
    summary="peak of what CUDA's allocator takes from the device, beyond the inputs",
    measure=lambda case: float(case.footprint.reserved_bytes),
    fits=has_caching_allocator,
)
