"""Verdicts on one run: each implementation against the baseline of its workload, from pairs inside blocks.

A verdict needs both an interval that excludes a ratio of 1 and a ratio beyond the margin: 2 %, or what identical code
showed in the same cell, whichever is more. A sequential test that may be watched continuously can take the place of
`verdict` without any change elsewhere.
"""

import math
from collections.abc import Iterator

from harness.records import Comparison, Record, Sample, Status, Verdict, Workload
from harness.stats import Estimate, minimum_detectable_effect, paired_ratio
from harness.store import Results

SMALLEST_EFFECT = 0.02
"""A difference below this is called equivalent however sure it is: nobody should choose code by it."""
LARGEST_EQUIVALENCE = 0.10
"""On a machine so noisy that identical code seems further apart than this, nothing is called equivalent any more."""


def comparisons(results: Results) -> list[Comparison]:
    """Every cell that has times, except the baseline's own, against the plan's baseline on the same workload."""
    return list(_comparisons(results))


def noise_floors(results: Results) -> dict[str, Estimate]:
    """By workload id: the ratio of the baseline's twin to the baseline, identical code, which ought to be 1."""
    floors = {
        record.workload.id: paired_ratio(_samples(record, "latency_twin"), _samples(record, "latency"))
        for record in _baselines(results)
    }
    return {workload: floor for workload, floor in floors.items() if floor is not None}


def margin(floor: Estimate | None) -> float:
    """The relative difference below which nothing is called faster or slower: max(2 %, the cell's own A/A floor)."""
    largest = None if floor is None else floor.largest_log
    return max(SMALLEST_EFFECT, 0.0 if largest is None else math.expm1(largest))


def verdict(ratio: Estimate, margin: float) -> Verdict:
    """What the interval of a ratio says against 1 and a relative margin, both taken on the log scale."""
    if ratio.half_width is None:
        return Verdict.undecided
    log, half, limit = math.log(ratio.point), ratio.half_width, math.log1p(margin)
    if abs(log) > max(half, limit):
        return Verdict.slower if log > 0 else Verdict.faster
    alike = min(limit, math.log1p(LARGEST_EQUIVALENCE))
    return Verdict.equivalent if abs(log) + half <= alike else Verdict.undecided


def _comparisons(results: Results) -> Iterator[Comparison]:
    baselines = {record.workload.id: record for record in _baselines(results)}
    floors = noise_floors(results)
    for record in results.records:
        baseline = baselines.get(record.workload.id)
        if record.status is not Status.ok or baseline is None or record is baseline:
            continue
        pairs = (_samples(baseline, "latency"), _samples(baseline, "latency_twin"))
        ratio = paired_ratio(_samples(record, "latency"), *pairs)
        if ratio is not None:
            yield _comparison(record.workload, record.implementation, results.plan.baseline, ratio, floors)


def _comparison(
    workload: Workload, implementation: str, baseline: str, ratio: Estimate, floors: dict[str, Estimate]
) -> Comparison:
    limit = margin(floors.get(workload.id))
    return Comparison(
        workload=workload,
        implementation=implementation,
        baseline=baseline,
        metric="latency",
        ratio=ratio.point,
        low=ratio.low,
        high=ratio.high,
        minimum_detectable_effect=minimum_detectable_effect(ratio, limit),
        verdict=verdict(ratio, limit),
    )


def _baselines(results: Results) -> Iterator[Record]:
    named = (record for record in results.records if record.implementation == results.plan.baseline)
    return (record for record in named if record.status is Status.ok)


def _samples(record: Record, metric: str) -> tuple[Sample, ...]:
    found = record.measurement(metric)
    return () if found is None else found.samples
