"""The most memory that one call holds at once, beyond its inputs: exact on the CPU, from the profiler's memory events.

Scratch space inside kernels counts, and so does the result (devices/recording.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.metrics import Metric

if TYPE_CHECKING:
    from attnbench.checking.case import Case


def measure(case: Case) -> float:
    """Bytes at the peak of one call, inputs and mask not counted, output counted."""
    return float(case.footprint.peak_bytes)


METRIC = Metric(unit="bytes", summary="peak memory of one call beyond its inputs", measure=measure)
