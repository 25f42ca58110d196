"""One verdict for many cells: of a session with two sides, or of an implementation over all of its workloads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnbench.analysis.cached import once
from attnbench.analysis.comparisons import comparisons, paired
from attnbench.analysis.results import Results
from attnbench.statistics import evidence
from attnbench.statistics.intervals import NORMAL_MAD, Estimate, Pairs, mean_of, paired_ratio
from attnbench.statistics.verdicts import FALSE_SHARE, FEWEST_EPOCHS, WHOLE_SHARE, Judgement, detectable, margin
from attnbench.storage.records import BASE, Record, Status, Verdict

FEWEST_CELLS = 2


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What many cells say together."""

    ratio: Estimate
    margin: float
    minimum_detectable_effect: float | None
    verdict: Verdict
    num_cells: int


def suite(results: Results) -> Suite | None:
    """The verdict on all cells together; None where no cell has enough visits for an interval.

    Slower and faster ask what a cell's verdict asks, by a part of the false verdicts that are allowed which is the
    whole's own: nothing need be found in any cell. Equivalent asks that the interval lies within the margin.
    """
    cells = [(found, controls) for _, found, controls in paired(results) if _has_interval(found.by_epoch())]
    ratio = mean_over([found.by_epoch() for found, _ in cells])
    if ratio is None:
        return None
    logs = _of_processes([found for found, _ in cells])
    smallest = results.plan.smallest_effect
    judged = Judgement(
        ratio=ratio,
        margin=margin(mean_over([controls for _, controls in cells]), smallest),
        smallest=smallest,
        e_same=evidence.last(evidence.e_values(logs)),
        e_apart=0.0,
        spread=NORMAL_MAD * float(np.median(np.abs(logs - np.median(logs)))),
    )
    of_processes = replace(judged, ratio=replace(ratio, num_samples=len(logs)))  # so many bets were made
    return Suite(
        ratio=ratio,
        margin=judged.margin,
        minimum_detectable_effect=detectable(of_processes, 1 / WHOLE_SHARE),
        verdict=_verdict(judged, differs=judged.e_same >= 1 / WHOLE_SHARE),
        num_cells=len(cells),
    )


@once
def by_implementation(results: Results) -> dict[str, Suite]:
    """What each implementation's workloads say together, where it has two at least; in the order of the ratios.

    The e-value against "the same code on every workload" is the mean of the workloads' own, which is one whatever they
    share: nobody bets anew. Verdicts hold among all implementations of a session, beside those on single cells. With
    fewer than three processes there is a mean, and nothing that says how sure it is.
    """
    e_values = {each.key: each.e_same for each in comparisons(results)}
    cells: dict[str, list[tuple[Pairs, Pairs, float]]] = {}
    for record, pairs, controls in paired(results):
        found = pairs if results.plan.sides is None else pairs.by_epoch()
        if _has_interval(found):
            cells.setdefault(record.implementation, []).append((found, controls, e_values[record.key]))
    judged = {
        name: _together(own, results.plan.smallest_effect) for name, own in cells.items() if len(own) >= FEWEST_CELLS
    }
    differ = evidence.discoveries(np.array([each.e_same * each.is_beyond for each in judged.values()]), FALSE_SHARE)
    told = {
        name: Suite(
            ratio=each.ratio,
            margin=each.margin,
            minimum_detectable_effect=None,
            verdict=_verdict(each, differs=bool(differs)),
            num_cells=len(cells[name]),
        )
        for (name, each), differs in zip(judged.items(), differ, strict=True)
    }
    return dict(sorted(told.items(), key=lambda item: item[1].ratio.point))


def _together(cells: Sequence[tuple[Pairs, Pairs, float]], smallest: float) -> Judgement:
    found = [pairs for pairs, _, _ in cells]
    ratios = [ratio for pairs in found if (ratio := paired_ratio(pairs)) is not None]
    return Judgement(
        ratio=mean_over(found) or replace(mean_of(ratios), standard_error=None),
        margin=margin(mean_over([controls for _, controls, _ in cells]), smallest),
        smallest=smallest,
        e_same=float(np.mean([e_same for _, _, e_same in cells])),
        e_apart=0.0,
        spread=0.0,
    )


def _verdict(judged: Judgement, *, differs: bool) -> Verdict:
    if judged.is_within:
        return Verdict.equivalent
    if differs and judged.is_beyond:
        return Verdict.slower if judged.log > 0 else Verdict.faster
    return Verdict.undecided


def _has_interval(found: Pairs) -> bool:
    ratio = paired_ratio(found)
    return ratio is not None and ratio.standard_error is not None


def mean_over(cells: Sequence[Pairs]) -> Estimate | None:
    """The geometric mean of the cells' ratios; its interval counts processes, which all cells of a moment share.

    None without cells, or with fewer than three processes. Where cells seem to agree better than visits of their own
    do, the latter count.

    Source: a mean of clustered values, Liang and Zeger, 1986, https://doi.org/10.1093/biomet/73.1.13.
    """
    ratios = [ratio for found in cells if (ratio := paired_ratio(found)) is not None]
    epochs = sorted({epoch for found in cells for epoch, _ in found.visits})
    if len(epochs) < FEWEST_EPOCHS or any(ratio.standard_error is None for ratio in ratios):
        return None
    pulls = dict.fromkeys(epochs, 0.0)  # of each process on the mean
    for found, ratio in zip(cells, ratios, strict=True):
        visits = found.centres
        for (epoch, _), log in visits.items():
            pulls[epoch] += (log - math.log(ratio.point)) / (len(visits) * len(cells))
    number = len(epochs)
    error = math.sqrt(number / (number - 1) * sum(pull**2 for pull in pulls.values()))
    alone = mean_of(ratios)
    if error <= (alone.standard_error or 0.0):
        return alone
    return Estimate(
        point=alone.point,
        standard_error=error,
        num_clusters=number,
        num_samples=alone.num_samples,
        degrees=number - 1.0,
    )


def _of_processes(cells: Sequence[Pairs]) -> evidence.Array:
    """For each process, the mean of the middle half of all blocks of all cells; the disturbed have no say.

    It turns its sign where the sides change places, so that a bet on it is as fair as on a single block, and scatters
    less than their median.
    """
    logs: dict[int, list[float]] = {}
    for found in cells:
        for (epoch, _), log in zip(found.visits, found.logs.tolist(), strict=True):
            logs.setdefault(epoch, []).append(log)
    return np.array([_midmean(logs[epoch]) for epoch in sorted(logs)])


def _midmean(values: Sequence[float]) -> float:
    """The mean of the middle half: a quarter is cut off at either end; of up to four values it is the median."""
    cut = (len(values) + 1) // 4
    return float(np.mean(sorted(values)[cut : len(values) - cut]))


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
            told = "" if was is None else f" (the base: {was})"
            where = f"{record.implementation} on {record.workload.id}"
            lines.append(f"{record.status}: {where}{told}: {record.message}")
    return lines
