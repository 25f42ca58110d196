"""Medians, paired ratios and growth exponents of samples, with their intervals.

All intervals are made on the log scale and cluster by visit and epoch: samples of one visit share the machine's drift,
and visits of one epoch share the memory layout of a process.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import linear_regression
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from attnbench.statistics.samples import Samples
from attnbench.storage.records import BLOCK_BITS, VISIT_BITS, Sample

CONFIDENCE = 0.95
NORMAL_MAD = 1.4826
"""The standard deviation of a normal distribution, as a multiple of its median absolute deviation."""
REACH = 2.5
"""A visit further out than this many standard deviations is winsorized: moved to there."""
FEWEST_TO_WINSORIZE = 5
FEWEST_CLUSTERS = 3
"""With fewer visits than this there is no interval: two of them say next to nothing about their spread."""
KNOWN = 1e6
"""The degrees of freedom of an error that is known rather than estimated: practically infinite."""
MEDIAN_FACTOR = math.sqrt(math.pi / 2)
"""How much wider the error of a median is than that of a mean, at most, where the noise is normal."""

Array = NDArray[np.float64]
Visit = tuple[int, int]
Block = tuple[int, int, int]
Group = TypeVar("Group")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A positive number with what its visits say about its error: time, ratio or size."""

    point: float
    standard_error: float | None  # of the log; None: fewer than FEWEST_CLUSTERS visits
    num_clusters: int
    num_samples: int
    degrees: float = 0.0  # of freedom of the standard error; 0: one fewer than there are clusters

    @property
    def freedom(self) -> float:
        """The degrees of freedom of the standard error."""
        return self.degrees or self.num_clusters - 1

    def quantile(self, probability: float) -> float:
        """The quantile of Student's t with the degrees of freedom of the standard error."""
        return t_quantile(probability, self.freedom)

    def unsteadiness(self, probability: float) -> float:
        """By what share the standard error of a repetition is larger, at most, with this probability."""
        from scipy.special import fdtri  # as in t_quantile

        return math.sqrt(float(fdtri(self.freedom, self.freedom, probability))) - 1

    @property
    def half_width(self) -> float | None:
        """Half the width of the 95 % interval on the log scale."""
        if self.standard_error is None:
            return None
        return self.quantile((1 + CONFIDENCE) / 2) * self.standard_error

    @property
    def low(self) -> float | None:
        """The lower end of the 95 % interval, or None."""
        return None if self.half_width is None else self.point * math.exp(-self.half_width)

    @property
    def high(self) -> float | None:
        """The upper end of the 95 % interval, or None."""
        return None if self.half_width is None else self.point * math.exp(self.half_width)

    @property
    def largest_log(self) -> float | None:
        """The largest |log| inside the interval: for a ratio of identical code, its noise floor."""
        return None if self.half_width is None else abs(math.log(self.point)) + self.half_width


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The log ratios of an arm to the baseline, and to its control, inside their common blocks, in time order."""

    logs: Array  # (n,)
    visits: tuple[Visit, ...]  # where each stands
    controls: Array | None = None  # (n,), NaN where a block has no control; None: no block has

    @cached_property
    def medians(self) -> dict[Visit, float]:
        """The median log ratio of each visit, in time order."""
        return _medians_of(self.visits, self.logs)

    @cached_property
    def centres(self) -> dict[Visit, float]:
        """The same, or where there are controls, halfway between it and the median log ratio to the control."""
        if self.controls is None:
            return self.medians
        known = np.flatnonzero(~np.isnan(self.controls))
        by_control = _medians_of([self.visits[place] for place in known], self.controls[known])
        return {visit: (log + by_control.get(visit, log)) / 2 for visit, log in self.medians.items()}

    @property
    def halfway(self) -> Array:
        """The log ratio of each block to what lies halfway between baseline and control (n,)."""
        controls = self.logs if self.controls is None else self.controls
        return (self.logs + np.where(np.isnan(controls), self.logs, controls)) / 2

    def by_epoch(self) -> "Pairs":
        """One for each process: the mean of its visits' medians, for where a process may have a bias of its own."""
        epochs = grouped(((epoch, log) for (epoch, _), log in self.medians.items()), np.mean)
        return Pairs(logs=np.array(list(epochs.values())), visits=tuple((epoch, 0) for epoch in epochs))

    def of_visits(self, parity: int) -> "Pairs":
        """Those of every second visit: of the even ones with parity 0, of the odd ones with 1."""
        kept = np.array([number % 2 == parity for _, number in self.visits], dtype=bool)
        controls = None if self.controls is None else self.controls[kept]
        return Pairs(logs=self.logs[kept], visits=tuple(itertools.compress(self.visits, kept)), controls=controls)


def grouped(values: Iterable[tuple[Group, float]], combine: Callable[[list[float]], Any]) -> dict[Group, float]:
    """One number for each group, such as the median of its values, in the order in which groups first appear."""
    groups: dict[Group, list[float]] = {}
    for group, value in values:
        groups.setdefault(group, []).append(value)
    return {group: float(combine(members)) for group, members in groups.items()}


def medians_by(codes: NDArray[Any], values: Array) -> tuple[NDArray[np.int64], Array]:
    """The median of the values (n,) that share a code (n,): where each group begins, in that order, and its median."""
    _, first, inverse, sizes = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    ordered = values[np.lexsort((values, inverse))]
    ends = np.cumsum(sizes)
    medians = (ordered[ends - sizes + (sizes - 1) // 2] + ordered[ends - sizes + sizes // 2]) / 2
    order = np.argsort(first)
    return first[order], medians[order]


def _medians_of(visits: Sequence[Visit], values: Array) -> dict[Visit, float]:
    """The median of the values of each visit, in the order in which visits first appear."""
    if not len(visits):
        return {}
    places = np.array(visits, dtype=np.int64)
    first, medians = medians_by((places[:, 0] << VISIT_BITS) | places[:, 1], values)
    return {visits[place]: median for place, median in zip(first.tolist(), medians.tolist(), strict=True)}


def place_of(sample: Sample) -> Block:
    """The epoch, visit and block that a sample belongs to."""
    return sample.epoch, sample.visit, sample.block


def are_among(places: NDArray[np.int64], blocks: Collection[Block]) -> NDArray[np.bool_]:
    """Which of the places (n,), as `Samples.places` has them, are those of the blocks."""
    packed = [(((epoch << VISIT_BITS) | visit) << BLOCK_BITS) | block for epoch, visit, block in blocks]
    return np.isin(places, packed) if packed else np.zeros(len(places), dtype=np.bool_)


def median(values: Iterable[float]) -> float:
    """The median of at least one value."""
    return float(np.median(values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=np.float64)))


def t_quantile(probability: float, degrees: float) -> float:
    """The quantile of Student's t with that many degrees of freedom."""
    from scipy.special import stdtrit  # here, because it takes longer to import than --help may take

    return float(stdtrit(degrees, probability))


def median_estimate(samples: Sequence[Sample]) -> Estimate:
    """The median of all samples, with an interval that clusters by visit and epoch.

    On the log scale the half width is t(0.975) * (error of the mean of the visits' medians) * sqrt(pi/2). The last
    factor is the price of a median over a mean; without it the interval covers the truth 90 to 93 times of 100.

    Source: the levels that vary are the ones to repeat and to count, Kalibera and Jones, Rigorous Benchmarking in
    Reasonable Time, 2013, https://doi.org/10.1145/2464157.2464160; the variance of a median, Kendall and Stuart, The
    Advanced Theory of Statistics, vol. 1.
    """
    own = Samples.of(samples)
    first, logs = medians_by(own.visits, np.log(own.value))
    medians = {
        (epoch, visit): log
        for epoch, visit, log in zip(own.epoch[first].tolist(), own.visit[first].tolist(), logs.tolist(), strict=True)
    }
    error, degrees = _error_of_mean(medians)
    return Estimate(
        point=median(own.value),
        standard_error=None if error is None else error * MEDIAN_FACTOR,
        num_clusters=len(medians),
        num_samples=len(own),
        degrees=degrees,
    )


def pairs(
    arm: Sequence[Sample],
    baseline: Sequence[Sample],
    discarded: Collection[Block] = (),
    controls: Sequence[Sample] = (),
) -> Pairs:
    """The log ratio of `arm` to `baseline`, and to its control, in each block that holds both and is not discarded."""
    (places, logs), (references, base), (others, control) = map(_mean_logs, (arm, baseline, controls))
    kept = np.isin(places, references) & ~are_among(places, discarded)
    places, logs = places[kept], logs[kept]
    to_control = np.full(len(places), np.nan)
    with_control = np.isin(places, others)
    to_control[with_control] = logs[with_control] - control[np.searchsorted(others, places[with_control])]
    visits = places >> BLOCK_BITS
    numbers = visits & (2**VISIT_BITS - 1)
    return Pairs(
        logs=logs - base[np.searchsorted(references, places)],
        visits=tuple(zip((visits >> VISIT_BITS).tolist(), numbers.tolist(), strict=True)),
        controls=to_control if len(others) else None,
    )


def _mean_logs(samples: Sequence[Sample]) -> tuple[NDArray[np.int64], Array]:
    """The places of samples in order, and the mean logarithm of their values in each."""
    own = Samples.of(samples)
    places, logs = own.places, np.log(own.value)
    if (places[1:] > places[:-1]).all():  # as they were taken, one in each
        return places, logs
    places, inverse, sizes = np.unique(places, return_inverse=True, return_counts=True)
    return places, np.bincount(inverse, logs, len(places)) / sizes


def pairs_with_baseline(
    arm: Sequence[Sample],
    baseline: Sequence[Sample],
    control: Sequence[Sample],
    discarded: Collection[Block] = (),
    own_control: Sequence[Sample] | None = None,
) -> tuple[Pairs, Pairs]:
    """An arm's pairs with its baseline, and in the same blocks those of the baseline's A/A control.

    `own_control` belongs to the arm, and is given, if only empty, where two sides are compared. Where both sides have a
    control, as in processes of their own, the mean of a side's two logs counts, which scatters less. Where only the
    base has one it is left out: the sides must be exchangeable for a bet on the sign to be fair.
    """
    arm, baseline, control = map(Samples.of, (arm, baseline, control))
    control = control.where(np.isin(control.places, arm.places))
    controls = pairs(control, baseline, discarded)
    if own_control is None:
        return pairs(arm, baseline, discarded, control), controls
    if own_control and control:
        arm, baseline = Samples.joined([arm, Samples.of(own_control)]), Samples.joined([baseline, control])
    return pairs(arm, baseline, discarded), controls


def paired_ratio(paired: Pairs) -> Estimate | None:
    """How many times longer the arm takes than the baseline; None without any pair.

    Each visit gives the median of its pairs, or the mean of two where the baseline has a control; the point is the
    exponential of the visits' winsorized mean. The interval clusters by visit and epoch. Without controls, swapping arm
    and baseline inverts the ratio exactly.

    Sources: randomised complete blocks, Box, Hunter and Hunter, Statistics for Experimenters, chapter 4; winsorizing,
    Tukey and McLaughlin, 1963, https://www.jstor.org/stable/25049278.
    """
    medians = paired.centres
    if not medians:
        return None
    winsorized = _winsorized(medians)
    error, degrees = _error_of_mean(winsorized)
    num_moved = sum(winsorized[visit] != medians[visit] for visit in medians)
    if error is not None and num_moved:  # they say less than they seem to
        error *= (len(medians) - 1) / (len(medians) - 1 - num_moved)
        degrees *= (len(medians) - 1 - num_moved) / (len(medians) - 1)
    return Estimate(
        point=math.exp(float(np.mean(list(winsorized.values())))),
        standard_error=error,
        num_clusters=len(medians),
        num_samples=len(paired.logs),
        degrees=degrees,
    )


def _winsorized(medians: Mapping[Visit, float]) -> dict[Visit, float]:
    """The same, with outliers moved to REACH standard deviations from the median of all visits or of their epoch.

    An epoch that lies apart as a whole stays where it is: to show that is what epochs are for.
    """
    if len(medians) < FEWEST_TO_WINSORIZE:
        return dict(medians)
    values = np.array(list(medians.values()))
    middle = np.median(values)
    reach = REACH * NORMAL_MAD * np.median(np.abs(values - middle))
    if reach > 0:
        epochs = np.array([epoch for epoch, _ in medians])
        own = np.full_like(values, middle)
        for epoch in np.unique(epochs):
            if (epochs == epoch).sum() >= FEWEST_CLUSTERS:
                own[epochs == epoch] = np.median(values[epochs == epoch])
        values = np.clip(values, np.minimum(own, middle) - reach, np.maximum(own, middle) + reach)
    return dict(zip(medians, values.tolist(), strict=True))


def mean_of(ratios: Sequence[Estimate]) -> Estimate:
    """The geometric mean of ratios that each have a standard error; each counts the same."""
    error, degrees = total_error(
        [(((ratio.standard_error or 0.0) / len(ratios)) ** 2, ratio.freedom) for ratio in ratios]
    )
    return Estimate(
        point=math.exp(float(np.mean([math.log(ratio.point) for ratio in ratios]))),
        standard_error=error,
        num_clusters=sum(ratio.num_clusters for ratio in ratios),
        num_samples=sum(ratio.num_samples for ratio in ratios),
        degrees=degrees,
    )


def total_error(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The standard error of a sum of independent parts, each a variance and its degrees of freedom, and its own.

    Source: F. E. Satterthwaite, 1946, https://doi.org/10.2307/3002019.
    """
    total = sum(variance for variance, _ in parts)
    uncertainty = sum(variance**2 / degrees for variance, degrees in parts)
    return math.sqrt(total), total**2 / uncertainty if uncertainty else KNOWN


def growth_exponent(lengths: Sequence[float], values: Sequence[float]) -> float | None:
    """The slope of log(value) over log(length) by least squares: 1 is linear, 2 quadratic; None below two lengths."""
    points = [(math.log(x), math.log(y)) for x, y in zip(lengths, values, strict=True) if x > 0 and y > 0]
    if len({x for x, _ in points}) <= 1:
        return None
    return linear_regression(*zip(*points, strict=True)).slope


def _error_of_mean(medians: Mapping[Visit, float]) -> tuple[float | None, float]:
    """The standard error of the mean over visits, and its degrees of freedom; None where there are too few.

    Visits lie inside epochs, and an epoch may have a bias of its own that more visits do not remove. Where the epochs
    lie further apart than their visits explain, the mean squares of both levels are combined.

    Source: unbalanced one-way random effects, Searle, Casella and McCulloch, Variance Components, chapter 3; degrees of
    freedom, F. E. Satterthwaite, 1946, https://doi.org/10.2307/3002019.
    """
    number = len(medians)
    if number < FEWEST_CLUSTERS:
        return None, 0.0
    values = np.array(list(medians.values()))
    _, epochs, sizes = np.unique([epoch for epoch, _ in medians], return_inverse=True, return_counts=True)
    simple = float(np.std(values, ddof=1)) / math.sqrt(number), number - 1.0
    if len(sizes) in {1, number}:
        return simple
    means = np.bincount(epochs, values) / sizes
    within = float(np.sum((values - means[epochs]) ** 2)) / (number - len(sizes))
    between = float(np.sum(sizes * (means - values.mean()) ** 2)) / (len(sizes) - 1)
    if between <= within:
        return simple
    crowding = float(np.sum(sizes**2)) / number  # how many visits an epoch has, as a visit sees it
    share = crowding / ((number - crowding) / (len(sizes) - 1)) / number
    parts = share * between, (1 / number - share) * within
    variance = sum(parts)
    cubes = float(np.sum(sizes**3)) / number
    free = (number - crowding) ** 2 / (number * crowding - 2 * cubes + crowding**2)  # an epoch of one visit says little
    degrees = variance**2 / (parts[0] ** 2 / free + parts[1] ** 2 / (number - len(sizes)))
    return math.sqrt(variance), max(degrees, free)  # lower only where one epoch holds most visits
