"""One verdict for many cells: of a session with two sides, or of an implementation over all of its workloads."""

import math
from dataclasses import dataclass, replace

import numpy as np

from attnbench.analysis.cached import once
from attnbench.analysis.comparisons import effects, paired
from attnbench.analysis.results import Results
from attnbench.statistics import evidence
from attnbench.statistics.effects import Effect, margin, mean_over_cells, midmeans, robust_spread
from attnbench.statistics.intervals import Estimate, Pairs, mean_of, paired_ratio
from attnbench.statistics.verdicts import WHOLE_SHARE, Policy, judge
from attnbench.storage.records import BASE, Record, Status, Verdict

FEWEST_CELLS = 2


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The verdict on many cells together."""

    ratio: Estimate
    margin: float
    minimum_detectable_effect: float | None
    verdict: Verdict
    num_cells: int


WHOLE = Policy(false_share=WHOLE_SHARE)


def suite(results: Results) -> Suite | None:
    """The verdict on all cells together; None where no cell has enough visits for an interval."""
    effect = whole_effect(results)
    if effect is None:
        return None
    (judged,) = judge([effect], WHOLE)
    return Suite(
        ratio=effect.ratio,
        margin=effect.margin,
        minimum_detectable_effect=judged.detectable,
        verdict=judged.verdict,
        num_cells=len(_with_interval(results)),
    )


def whole_effect(results: Results) -> Effect | None:
    """What all cells of a session with two sides show together; None without any interval.

    A bet is made for each process, on all of its blocks: nothing need be found in any cell. Equivalent asks only that
    the interval lies within the margin.
    """
    cells = _with_interval(results)
    ratio = mean_over_cells([pairs.by_epoch() for _, pairs, _ in cells])
    if ratio is None:
        return None
    logs = midmeans([pairs for _, pairs, _ in cells])
    smallest = results.plan.smallest_effect
    return Effect(
        ratio=replace(ratio, num_samples=len(logs)),  # so many bets are made
        margin=margin(mean_over_cells([controls for _, _, controls in cells]), smallest),
        smallest=smallest,
        e_same=evidence.last(evidence.e_values(logs)),
        e_apart=math.inf,
        spread=robust_spread(logs),
    )


@once
def by_implementation(results: Results) -> dict[str, Suite]:
    """What each implementation's workloads say together, where it has two at least; in the order of the ratios.

    The e-value against "the same code on every workload" is the mean of the workloads' own, which is an e-value
    whatever they share. Verdicts hold among all implementations of a session, apart from those on single cells. With
    fewer than three processes there is a mean without an interval.
    """
    e_values = {record.key: effect.e_same for record, effect in effects(results)}
    cells: dict[str, list[tuple[Pairs, Pairs, float]]] = {}
    for record, pairs, controls in _with_interval(results):
        counted = pairs if results.plan.sides is None else pairs.by_epoch()
        cells.setdefault(record.implementation, []).append((counted, controls, e_values[record.key]))
    together: dict[str, Effect] = {}
    for name, rows in cells.items():
        ratios = [ratio for pairs, _, _ in rows if (ratio := paired_ratio(pairs)) is not None]
        mean = mean_over_cells([pairs for pairs, _, _ in rows])
        floor = mean_over_cells([controls for _, controls, _ in rows])
        if len(rows) >= FEWEST_CELLS:
            together[name] = Effect(
                ratio=mean or replace(mean_of(ratios), standard_error=None),
                margin=margin(floor, results.plan.smallest_effect),
                smallest=results.plan.smallest_effect,
                e_same=float(np.mean([e_same for _, _, e_same in rows])),
                e_apart=math.inf,
            )
    judged = dict(zip(together, judge(list(together.values())), strict=True))
    return {
        name: Suite(
            ratio=each.effect.ratio,
            margin=each.effect.margin,
            minimum_detectable_effect=None,
            verdict=each.verdict,
            num_cells=len(cells[name]),
        )
        for name, each in sorted(judged.items(), key=lambda item: item[1].effect.ratio.point)
    }


def _with_interval(results: Results) -> list[tuple[Record, Pairs, Pairs]]:
    """The compared cells with enough visits for an interval, of two sides with enough processes."""
    has_sides = results.plan.sides is not None
    found = []
    for record, pairs, controls in paired(results):
        ratio = paired_ratio(pairs.by_epoch() if has_sides else pairs)
        if ratio is not None and ratio.standard_error is not None:
            found.append((record, pairs, controls))
    return found


def by_side(results: Results) -> tuple[list[Record], list[Record]]:
    """The base's records and the candidate's. A cell that only one side has is in that side's list alone."""
    base = [record for record in results.records if record.side == BASE]
    return base, [record for record in results.records if record.side != BASE]


def losses(results: Results) -> list[str]:
    """What the candidate did worse than is allowed whatever its speed: who is gone, wrong or failed, a line each."""
    sides = results.plan.sides
    assert sides is not None
    base, candidate = by_side(results)
    before = {(record.workload.id, record.implementation): record.status for record in base}
    lines = [f"lost: {name}: {reason}" for name, reason in sides.lost.items()]
    for record in candidate:
        was = before.get((record.workload.id, record.implementation))
        if record.is_finding or (was is Status.ok and record.status is not Status.ok):
            before_it = "" if was is None else f" (the base: {was})"
            where = f"{record.implementation} on {record.workload.id}"
            lines.append(f"{record.status}: {where}{before_it}: {record.message}")
    return lines
