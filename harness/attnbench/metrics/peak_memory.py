"""The most memory that one call holds at once, beyond its inputs: exact on the CPU, from the profiler's memory events.

Scratch space inside kernels and the result count, inputs and mask do not (devices/recording.py).
"""

from attnbench.metrics import Metric

METRIC = Metric(
    unit="bytes",
    summary="peak memory of one call beyond its inputs",
    measure=lambda case: float(case.footprint.peak_bytes),
)
