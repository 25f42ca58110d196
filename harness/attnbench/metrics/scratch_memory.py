"""The most memory that one call holds at once, beyond its inputs and the size of its results.

What an implementation could save at the most: inputs and results must be somewhere, whoever computes them.
"""

from attnbench.metrics import Metric

METRIC = Metric(
    unit="bytes",
    summary="peak memory of one call beyond its inputs and results",
    measure=lambda case: float(case.footprint.peak_bytes - case.footprint.result_bytes),
)
