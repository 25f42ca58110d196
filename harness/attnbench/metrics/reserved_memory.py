"""The most memory that CUDA's allocator takes from the device for one call, beyond its inputs.

The allocator takes segments and cuts tensors out of them: this is what other processes miss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.metrics import Metric, has_caching_allocator

if TYPE_CHECKING:
    from attnbench.checking.case import Case


def measure(case: Case) -> float:
    """Bytes at the peak, inputs not counted."""
    reserved = case.footprint.reserved_bytes
    assert reserved is not None  # `fits` saw to it
    return float(reserved)


METRIC = Metric(
    unit="bytes",
    summary="peak of what CUDA's allocator takes from the device, beyond the inputs",
    measure=measure,
    fits=has_caching_allocator,
)
