"""Numbers drawn from samples on read: medians, paired ratios, their intervals, noise floors and growth exponents.

All intervals are made on the log scale and cluster by visit: samples of one visit share the machine's mood, so the
visit, not the sample, is the unit of evidence. Nothing here knows what was measured, or of torch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.records import Sample

CONFIDENCE = 0.95
POWER = 0.80
FEWEST_CLUSTERS = 3
"""With fewer visits than this there is no interval: two of them say next to nothing about their spread."""
MEDIAN_FACTOR = math.sqrt(math.pi / 2)
"""How much wider the error of a median is than that of a mean, at most, where the noise is normal."""

Visit = tuple[int, int]
Block = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A positive number with what its visits say about its error: time, ratio or size."""

    point: float
    standard_error: float | None  # of the log; None: fewer than FEWEST_CLUSTERS visits
    num_clusters: int
    num_samples: int

    @property
    def half_width(self) -> float | None:
        """Half the width of the 95 % interval on the log scale."""
        if self.standard_error is None:
            return None
        return t_quantile((1 + CONFIDENCE) / 2, self.num_clusters) * self.standard_error

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


def median(values: Iterable[float]) -> float:
    """The median of at least one value."""
    return float(np.median(np.fromiter(values, dtype=np.float64)))


def t_quantile(probability: float, num_clusters: int) -> float:
    """The quantile of Student's t with one degree of freedom fewer than there are clusters."""
    from scipy.special import stdtrit  # here, because it takes longer to import than --help may take

    return float(stdtrit(num_clusters - 1, probability))


def median_estimate(samples: Sequence[Sample]) -> Estimate:
    """The median of all samples, with an interval that clusters by visit.

    On the log scale the half width is t(0.975, n-1) * sd(visit medians) / sqrt(n) * sqrt(pi/2) over n visits. The last
    factor is the price of a median over a mean; without it the interval covers the truth 90 to 93 times of 100.

    Source: the level that varies is the one to repeat and to count, Kalibera and Jones, Rigorous Benchmarking in
    Reasonable Time, 2013, https://doi.org/10.1145/2464157.2464160; the variance of a median, Kendall and Stuart, The
    Advanced Theory of Statistics, vol. 1.
    """
    values = [sample.value for sample in samples]
    logs = _by_visit(((sample.epoch, sample.visit), math.log(sample.value)) for sample in samples)
    error = _standard_error(logs)
    return Estimate(
        point=median(values),
        standard_error=None if error is None else error * MEDIAN_FACTOR,
        num_clusters=len(logs),
        num_samples=len(values),
    )


def paired_ratio(arm: Sequence[Sample], *baseline: Sequence[Sample]) -> Estimate | None:
    """How many times longer `arm` takes than the baseline, from pairs inside one block; None without any pair.

    The baseline may have several arms (itself and its twin): a pair is the arm's log value less the mean of the
    baseline's log values in the same (epoch, visit, block). Each visit gives the median of its pairs; the point is the
    exponential of the visits' mean and the interval is Student's t over the visits, which makes its coverage exact
    where visits are alike and normal. Swapping arm and baseline turns the ratio upside down, exactly.

    Source: randomised complete blocks, Box, Hunter and Hunter, Statistics for Experimenters, chapter 4.
    """
    references = [_logs(samples) for samples in baseline if samples]
    pairs = {
        place: log - float(np.mean([reference[place] for reference in references if place in reference]))
        for place, log in _logs(arm).items()
        if any(place in reference for reference in references)
    }
    if not pairs:
        return None
    visits = _by_visit((place[:2], log) for place, log in pairs.items())
    return Estimate(
        point=math.exp(float(np.mean(visits))),
        standard_error=_standard_error(visits),
        num_clusters=len(visits),
        num_samples=len(pairs),
    )


def minimum_detectable_effect(estimate: Estimate, margin: float = 0.0) -> float | None:
    """The smallest relative slowdown that would be found in 80 % of repetitions; None without an interval.

    Found means: the interval excludes a ratio of 1 and the ratio is beyond 1 + `margin`.

    Source: Bloom, Minimum Detectable Effects, Evaluation Review 19(5), 1995, https://doi.org/10.1177/0193841X9501900504.
    """
    if estimate.standard_error is None or estimate.half_width is None:
        return None
    threshold = max(estimate.half_width, math.log1p(margin))
    return math.expm1(threshold + t_quantile(POWER, estimate.num_clusters) * estimate.standard_error)


def growth_exponent(lengths: Sequence[float], values: Sequence[float]) -> float | None:
    """The slope of log(value) over log(length) by least squares: 1 is linear, 2 quadratic; None below two lengths."""
    points = [(math.log(x), math.log(y)) for x, y in zip(lengths, values, strict=True) if x > 0 and y > 0]
    if len({x for x, _ in points}) <= 1:
        return None
    x, y = np.asarray(points).T
    return float(np.sum((x - x.mean()) * (y - y.mean())) / np.sum((x - x.mean()) ** 2))


def _logs(samples: Sequence[Sample]) -> dict[Block, float]:
    """The mean log value of each block."""
    blocks: dict[Block, list[float]] = {}
    for sample in samples:
        blocks.setdefault((sample.epoch, sample.visit, sample.block), []).append(math.log(sample.value))
    return {place: float(np.mean(logs)) for place, logs in blocks.items()}


def _by_visit(logs: Iterable[tuple[Visit, float]]) -> list[float]:
    """The median of each visit's values."""
    visits: dict[Visit, list[float]] = {}
    for visit, log in logs:
        visits.setdefault(visit, []).append(log)
    return [median(found) for found in visits.values()]


def _standard_error(visits: Sequence[float]) -> float | None:
    """Of the mean over visits; None where there are too few."""
    if len(visits) < FEWEST_CLUSTERS:
        return None
    return float(np.std(visits, ddof=1)) / math.sqrt(len(visits))
