"""Effects: how many times longer one thing takes than another, and the evidence for and against a difference.

There are three sources: pairs in blocks (`paired_effect`), two runs that share no moment of the machine
(`effect_between_runs`), and many of either taken together (`mean_over_cells`, `mean_between_runs`). What to conclude
from an effect is decided in one place, `statistics/verdicts.py`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnbench.statistics import evidence
from attnbench.statistics.intervals import (
    CONFIDENCE,
    KNOWN,
    NORMAL_MAD,
    Array,
    Estimate,
    Pairs,
    grouped,
    mean_of,
    paired_ratio,
    t_quantile,
    total_error,
)
from attnbench.storage.records import LARGEST_EQUIVALENCE
from attnbench.workloads.sweep import SMALLEST_EFFECT

FEWEST_EPOCHS = 3
"""With fewer processes than this nothing is said of a session as a whole."""
LARGEST_LOG = 100.0
"""Noise floors are cut off here: a number larger than any real one, and still finite."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A ratio of times, how far apart identical code would seem, and the evidence for and against a difference."""

    ratio: Estimate
    margin: float
    """Relative. No smaller difference is called one: the smallest effect that matters, or the noise floor above it."""
    smallest: float = SMALLEST_EFFECT
    """Relative. What the margin would be without any noise."""
    e_same: float
    """The e-value against "the same code". Between two runs 1 / p-value, which the correction accounts for."""
    e_apart: float = 0.0
    """The e-value against "apart by the margin or more"; infinity where the interval alone decides."""
    spread: float = 0.0
    """A robust standard deviation of the pairs, on the log scale."""
    num_processes: int = 0
    """In how many it was measured, of two runs in the one with fewer; 0 where a policy does not ask."""
    allowed: float | None = None
    """Relative. By how much a rule allows the time to grow; None: no rule does."""
    lowest: float = 0.0
    """The lowest `allowed` that can be judged here; 0: any."""

    @property
    def log(self) -> float:
        """The logarithm of the ratio."""
        return math.log(self.ratio.point)

    @property
    def is_floor(self) -> bool:
        """Whether the margin is a noise floor, which falls with more visits and differs between repetitions."""
        return self.margin > self.smallest

    @property
    def sameness(self) -> float:
        """By what share two times may differ that are called equivalent."""
        return min(self.margin, LARGEST_EQUIVALENCE)

    @property
    def is_beyond(self) -> bool:
        """Whether the ratio is further from 1 than the margin, and than the half width of its interval."""
        half = self.ratio.half_width
        return half is not None and abs(self.log) > max(half, math.log1p(self.margin))

    @property
    def is_within(self) -> bool:
        """Whether the interval lies inside what may be called equivalent."""
        half = self.ratio.half_width
        return half is not None and abs(self.log) + half <= math.log1p(self.sameness)

    @property
    def seems_slower(self) -> bool:
        """Whether the interval lies above 1."""
        return self.ratio.low is not None and self.ratio.low > 1


def margin(floor: Estimate | None, smallest: float = SMALLEST_EFFECT) -> float:
    """The relative difference below which nothing is called faster or slower: `smallest` or the cell's A/A floor."""
    largest = None if floor is None else floor.largest_log
    return max(smallest, 0.0 if largest is None else math.expm1(min(largest, LARGEST_LOG)))


def paired_effect(pairs: Pairs, floor: Estimate | None, smallest: float = SMALLEST_EFFECT) -> Effect | None:
    """The effect that pairs in blocks show, where the baseline to itself is `floor`; None without any pair."""
    ratio, limit = paired_ratio(pairs), margin(floor, smallest)
    if ratio is None:
        return None
    medians = np.array(list(pairs.medians.values()))
    return Effect(
        ratio=ratio,
        margin=limit,
        smallest=smallest,
        e_same=evidence.last(evidence.e_values(pairs.logs, pairs.controls)),
        e_apart=evidence.against_beyond(medians, math.log1p(min(limit, LARGEST_EQUIVALENCE))),
        spread=robust_spread(pairs.halfway),
    )


def robust_spread(logs: Array) -> float:
    """The standard deviation of normal noise with the same median absolute deviation."""
    return NORMAL_MAD * float(np.median(np.abs(logs - np.median(logs))))


def mean_over_cells(cells: Sequence[Pairs]) -> Estimate | None:
    """The geometric mean of the cells' ratios; its interval counts processes, which all cells of a moment share.

    None without cells, or with fewer than three processes. Where cells seem to agree better than visits of their own
    do, the latter count.

    Source: a mean of clustered values, Liang and Zeger, 1986, https://doi.org/10.1093/biomet/73.1.13.
    """
    ratios = [ratio for pairs in cells if (ratio := paired_ratio(pairs)) is not None]
    epochs = sorted({epoch for pairs in cells for epoch, _ in pairs.visits})
    if len(epochs) < FEWEST_EPOCHS or any(ratio.standard_error is None for ratio in ratios):
        return None
    pulls = dict.fromkeys(epochs, 0.0)  # of each process on the mean
    for pairs, ratio in zip(cells, ratios, strict=True):
        visits = pairs.centres
        for (epoch, _), log in visits.items():
            pulls[epoch] += (log - math.log(ratio.point)) / (len(visits) * len(cells))
    number = len(epochs)
    error = math.sqrt(number / (number - 1) * sum(pull**2 for pull in pulls.values()))
    alone = mean_of(ratios)
    if error <= (alone.standard_error or 0.0):
        return alone
    return replace(alone, standard_error=error, num_clusters=number, degrees=number - 1.0)


def midmeans(cells: Sequence[Pairs]) -> Array:
    """For each process, the mean of the middle half of all blocks of all cells (n,); outliers do not count.

    Its sign turns where the sides change places, so that a bet on it is as fair as on a single block, and it scatters
    less than a median. Of up to four values the middle half is the median.
    """
    logs = sorted(
        (epoch, log) for pairs in cells for (epoch, _), log in zip(pairs.visits, pairs.logs.tolist(), strict=True)
    )

    def midmean(values: list[float]) -> float:
        cut = (len(values) + 1) // 4
        return float(np.mean(values[cut : len(values) - cut]))

    return np.array(list(grouped(logs, midmean).values()))


@dataclass(frozen=True, kw_only=True)
class Relative:
    """A cell's time in one run, relative to that run's reference."""

    ratio: Estimate
    floor: Estimate | None  # the reference's A/A control relative to it, in the same blocks
    num_epochs: int


def effect_between_runs(base: Relative, candidate: Relative, between_runs: float, least_floor: float = 0.0) -> Effect:
    """How many times longer a cell takes than in another run, each relative to the reference of its own run.

    Two runs share no block, so that no pair can be made between them, and the state of a machine differs by tens of
    percent from run to run. The ratio to the reference differs less: by `between_runs`, a standard deviation. The noise
    floor is at least `least_floor`, by which two machines may differ. Why: docs/adr/0019.

    Source: B. L. Welch, 1947, https://doi.org/10.1093/biomet/34.1-2.28 (two means, unequal errors).
    """
    both = base.ratio, candidate.ratio
    parts = [(each.standard_error**2, each.freedom) for each in both if each.standard_error is not None]
    error, degrees = total_error([*parts, (2 * between_runs**2, KNOWN)])
    ratio = Estimate(
        point=candidate.ratio.point / base.ratio.point,
        standard_error=error if len(parts) == len(both) else None,
        num_clusters=sum(each.num_clusters for each in both),
        num_samples=sum(each.num_samples for each in both),
        degrees=degrees,
    )
    floors = [each.floor.largest_log for each in (base, candidate) if each.floor is not None]
    logs = [log for log in floors if log is not None]
    if len(logs) == len(both):  # how far from 1 a ratio of ratios of identical code may lie, by the A/A of both runs
        drift = t_quantile((1 + CONFIDENCE) / 2, KNOWN) * math.sqrt(2) * between_runs
        least_floor = max(math.expm1(math.hypot(drift, *logs)), least_floor)
    return _between_runs(ratio, least_floor, min(base.num_epochs, candidate.num_epochs))


def _between_runs(ratio: Estimate, floor: float, num_processes: int) -> Effect:
    p = p_value(ratio)
    e_same = 1 / p if p else math.inf
    return Effect(ratio=ratio, margin=floor, smallest=0.0, e_same=e_same, num_processes=num_processes)


def p_value(ratio: Estimate) -> float:
    """How often identical code would seem as far apart or further; 1 where there is no standard error."""
    if ratio.standard_error is None:
        return 1.0
    log = abs(math.log(ratio.point))
    if ratio.standard_error == 0.0:
        return float(log == 0.0)
    from scipy.special import stdtr  # here, because it takes longer to import than --help may take

    return 2 * float(stdtr(ratio.freedom, -log / ratio.standard_error))


def mean_between_runs(
    workloads: Iterable[Sequence[Estimate]], between_runs: float, least_floor: float = 0.0, num_processes: int = 0
) -> Effect:
    """The geometric mean of ratios between two runs, by workload, to whose errors `between_runs` is still to be added.

    The cells of a workload share a reference: their errors are taken as one and the same.
    """
    means = [
        Estimate(
            point=math.exp(sum(math.log(ratio.point) for ratio in ratios) / len(ratios)),
            standard_error=sum(ratio.standard_error or 0.0 for ratio in ratios) / len(ratios),
            num_clusters=min(ratio.num_clusters for ratio in ratios),
            num_samples=sum(ratio.num_samples for ratio in ratios),
            degrees=min(ratio.freedom for ratio in ratios),
        )
        for ratios in workloads
    ]
    mean = mean_of(means)
    error, degrees = total_error([((mean.standard_error or 0.0) ** 2, mean.freedom), (2 * between_runs**2, KNOWN)])
    ratio = replace(mean, standard_error=error, num_clusters=len(means), degrees=degrees)
    return _between_runs(ratio, least_floor, num_processes)
