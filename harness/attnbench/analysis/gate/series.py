"""Medians and bytes of a run in the form that github-action-benchmark draws over time.

Source of the form: customSmallerIsBetter, https://github.com/benchmark-action/github-action-benchmark#readme.
"""

from collections.abc import Iterator

from attnbench.analysis.gate.rulings import LATENCY
from attnbench.analysis.results import Results
from attnbench.reports.words import plain
from attnbench.statistics.intervals import Estimate, median, median_estimate
from attnbench.storage.records import Measurement, Record
from attnbench.units import significant

UNIT_S = "us"
"""One unit for all times, and bytes for all memory: a point is drawn beside last year's."""
PER_SECOND = 1e6


def entries(results: Results) -> list[dict[str, object]]:
    """A point for each metric of each cell that has one."""
    return [entry for record in results.records for entry in _entries(record)]


def _entries(record: Record) -> Iterator[dict[str, object]]:
    for found in record.measurements:
        if not found.samples or found.metric == "latency_control":
            continue
        entry: dict[str, object] = {"name": plain(f"{record.arm} on {record.workload.id}: {found.metric}")}
        extra = f"run {record.run}, commit {record.commit or 'unknown'}"
        if found.metric == LATENCY:
            estimate = median_estimate(found.samples)
            entry |= {"unit": UNIT_S, "value": estimate.point * PER_SECOND, "range": _range(estimate)}
            extra = f"{extra}, median of {estimate.num_samples} samples in {estimate.num_clusters} visits"
        else:
            entry |= _value(found)
        yield {**entry, "extra": plain(extra)}


def _range(estimate: Estimate) -> str:
    """Half the width of the 95 % interval, as the action prints it behind the value."""
    if estimate.low is None or estimate.high is None:
        return "unknown"
    return f"± {significant((estimate.high - estimate.low) / 2 * PER_SECOND, 3)}"


def _value(found: Measurement) -> dict[str, object]:
    return {"unit": found.unit or "count", "value": median(sample.value for sample in found.samples), "range": "exact"}
