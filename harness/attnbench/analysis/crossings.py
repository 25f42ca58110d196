"""Crossings: the length at which an implementation and the baseline change places."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.recommendation import changes_along
from attnbench.analysis.results import Results
from attnbench.storage.records import Comparison, Verdict
from attnbench.workloads.workload import Workload

DECIDED = {Verdict.faster, Verdict.slower}


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Where the ratio of two times is 1, between a length that is decided one way and a later one that is the other.

    `at` is a length in keys, by a straight line between the logarithms of ratio and length. `low` and `high` are where
    the ends of the ratios' 95 % intervals are 1, or None where they are not between `before` and `after`, the next
    lengths that are decided. `verdict` is the implementation's from there on, relative to `reference`. Where they were
    searched for, `at` is a value of the axis of the search.
    """

    workload: Workload
    implementation: str
    reference: str
    verdict: Verdict
    at: float
    low: float | None
    high: float | None
    before: int
    after: int


def crossings(results: Results, group: Callable[[Workload], str]) -> list[Crossing]:
    """All crossings of a run, in the order of its workloads; `group` is equal where only lengths differ.

    Workloads with as many queries as keys are compared with one another, and others with those of as many queries.
    What is undecided or equivalent between two decided lengths belongs to the way from the one to the other.
    """
    if results.plan.ladders:
        return _searched(results)
    found = []

    def shape(workload: Workload) -> tuple[str, int]:
        return group(workload), 0 if workload.seq_len == workload.kv_len else workload.seq_len

    order = {each: number for number, each in enumerate(dict.fromkeys(map(shape, results.plan.workloads)))}

    def place(each: Comparison) -> tuple[int, str]:
        return order[shape(each.workload)], each.implementation

    by_place = sorted(comparisons(results), key=lambda each: (*place(each), _length(each)))
    for _, own in groupby(by_place, key=place):
        members = [each for each in own if each.ratio > 0]
        decided = [number for number, each in enumerate(members) if each.verdict in DECIDED]
        for first, last in pairwise(decided):
            if members[first].verdict is not members[last].verdict:
                found.append(_crossing(members[first : last + 1], results.plan.baseline))
    return found


def _searched(results: Results) -> list[Crossing]:
    """Those that a run searched for, along each of its ladders (processes/choosing.py)."""
    workloads = {each.id: each for each in results.plan.workloads}
    return [
        Crossing(
            workload=workloads[ladder.by_value[change.place.high]],
            implementation=change.after,
            reference=change.before,
            verdict=Verdict.faster,
            at=change.place.at,
            low=None,
            high=None,
            before=change.place.low,
            after=change.place.high,
        )
        for ladder in results.plan.ladders
        for change in changes_along(results, ladder)
    ]


def _crossing(way: Sequence[Comparison], reference: str) -> Crossing:
    """The crossing on the way from the first to the last."""
    lengths = [_length(each) for each in way]
    ratios = [each.ratio for each in way]
    lows = [each.ratio if each.low is None else each.low for each in way]
    highs = [each.ratio if each.high is None else each.high for each in way]
    at = _where_one(lengths, ratios)
    assert at is not None, "the first and the last are on two sides"
    ends = [_where_one(lengths, lows), _where_one(lengths, highs)]
    early, late = ends if way[-1].verdict is Verdict.faster else reversed(ends)
    return Crossing(
        workload=way[-1].workload,
        implementation=way[-1].implementation,
        reference=reference,
        verdict=way[-1].verdict,
        at=at,
        low=early,
        high=late,
        before=lengths[0],
        after=lengths[-1],
    )


def _where_one(lengths: Sequence[int], ratios: Sequence[float]) -> float | None:
    """The last length at which the ratio is 1, if there is one."""
    logs = [math.log(ratio) if ratio > 0 else -math.inf for ratio in ratios]
    for number in reversed(range(len(logs) - 1)):
        here, there = logs[number], logs[number + 1]
        if math.isfinite(here) and math.isfinite(there) and here != there and here * there <= 0:
            share = here / (here - there)
            return float(lengths[number] ** (1 - share) * lengths[number + 1] ** share)
    return None


def _length(each: Comparison) -> int:
    return each.workload.kv_len
