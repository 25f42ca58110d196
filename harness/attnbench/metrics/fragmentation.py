"""Memory that CUDA's allocator has taken from the device at its peak and no tensor uses at theirs.

Reserved less allocated: rests of segments that are too small, or cut up, for what is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.metrics import Metric, has_caching_allocator

if TYPE_CHECKING:
    from attnbench.checking.case import Case


def measure(case: Case) -> float:
    """Bytes between the two peaks."""
    found = case.footprint
    assert found.reserved_bytes is not None  # `fits` saw to it
    return float(found.reserved_bytes - found.peak_bytes)


METRIC = Metric(
    unit="bytes",
    summary="reserved peak less allocated peak of CUDA's allocator",
    measure=measure,
    fits=has_caching_allocator,
)
