"""Seconds for one call, sampled in randomised interleaved blocks (timing/blocks.py)."""

from attnbench.metrics import Metric

METRIC = Metric(unit="s", summary="time of one call, from interleaved blocks", measure=None)
