"""Medians and bytes of a run in the form that github-action-benchmark draws over time.

Source of the form: customSmallerIsBetter, https://github.com/benchmark-action/github-action-benchmark#readme.
"""

from collections.abc import Iterator, Sequence

from attnbench.analysis.results import Results
from attnbench.analysis.table import MetricColumn, Row, arm_of, metric_columns, rows, table
from attnbench.units import plain, significant

UNIT_S = "us"
"""One unit for all times, and bytes for all memory: a point is drawn next to last year's."""
PER_SECOND = 1e6


def entries(results: Results) -> list[dict[str, object]]:
    """A point for the time and each metric of each cell that has one."""
    metrics = metric_columns(results)
    return [entry for row in rows(table(results)) for entry in _entries(row, metrics)]


def _entries(row: Row, metrics: Sequence[MetricColumn]) -> Iterator[dict[str, object]]:
    cell = f"{arm_of(row)} on {row['workload']}"
    where = f"run {row['run']}, commit {row['commit'] or 'unknown'}"
    if row["latency_s"] is not None:
        low, high = row["latency_low_s"], row["latency_high_s"]
        half = "unknown" if low is None else f"± {significant((high - low) / 2 * PER_SECOND, 3)}"
        samples = f"median of {row['num_samples']} samples in {row['num_visits']} visits"
        time = {"unit": UNIT_S, "value": row["latency_s"] * PER_SECOND, "range": half}
        yield {"name": plain(f"{cell}: latency"), **time, "extra": plain(f"{where}, {samples}")}
    for metric in metrics:
        if row[metric.name] is not None:
            value = {"unit": metric.unit or "count", "value": row[metric.name], "range": "exact"}
            yield {"name": plain(f"{cell}: {metric.metric}"), **value, "extra": plain(where)}
