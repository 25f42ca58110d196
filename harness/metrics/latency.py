"""Seconds for one call, sampled in randomised interleaved blocks (harness/engine/measure.py)."""

from harness.metrics import Metric

METRIC = Metric(unit="s", summary="time of one call, from interleaved blocks", measure=None)
