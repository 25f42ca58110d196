"""Estimate times with confidence intervals, and reduce each process to one number in a comparison.

An arm is an implementation that takes part in a block. A block samples each arm once, which gives the log ratio of the
times of each pair of arms. A visit consists of a few blocks of one workload in one process. In a comparison, the number
of a process is the median log ratio of each visit, averaged over the visits of the process.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from attnbench.statistics.verdict import FEWEST_PROCESSES, LAYOUT_LOG, Effect, effect, half_widths
from attnbench.storage.records import BLOCK_BITS, VISIT_BITS, Sample
from attnbench.storage.samples import Samples

CONFIDENCE = 0.95
MEDIAN_FACTOR = math.sqrt(math.pi / 2)
"""Standard error of the median of many normally distributed values, divided by that of their mean; smaller for few
values."""
NORMAL_MAD = 1.4826  # standard deviation of normally distributed values, divided by their median absolute deviation

Array = NDArray[np.float64]
Visit = tuple[int, int]  # epoch (the number of the process), and number of the visit in this process
Block = tuple[int, int, int]  # epoch, visit, and number of the block in this visit
Group = TypeVar("Group")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The median of a metric in its unit, with a 95 % confidence interval that treats each process as one number."""

    point: float
    low: float | None  # None with fewer than FEWEST_PROCESSES processes
    high: float | None
    num_processes: int
    num_visits: int
    num_samples: int


def means_of(values: Iterable[tuple[Group, float]]) -> dict[Group, float]:
    """Return the mean of the values of each group; the groups are in the order of their first value."""
    values_of: dict[Group, list[float]] = {}
    for group, value in values:
        values_of.setdefault(group, []).append(value)
    return {group: float(np.mean(members)) for group, members in values_of.items()}


def medians_by(codes: NDArray[Any], values: Array) -> tuple[NDArray[np.int64], Array]:
    """Group values (n,) by codes (n,); return the index of each group's first value (m,) and each group's median (m,).

    The groups are in the order of their first value.
    """
    _, first, inverse, sizes = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    ordered = values[np.lexsort((values, inverse))]
    ends = np.cumsum(sizes)
    medians = (ordered[ends - sizes + (sizes - 1) // 2] + ordered[ends - sizes + sizes // 2]) / 2
    order = np.argsort(first)
    return first[order], medians[order]


def place_of(sample: Sample) -> Block:
    """Return the epoch (number of the process), the visit and the block to which a sample belongs."""
    return sample.epoch, sample.visit, sample.block


def are_among(places: NDArray[np.int64], blocks: Collection[Block]) -> NDArray[np.bool_]:
    """Return whether each of `places` (n,), numbered as in `Samples.places`, is one of `blocks`: booleans (n,)."""
    packed = [(((epoch << VISIT_BITS) | visit) << BLOCK_BITS) | block for epoch, visit, block in blocks]
    return np.isin(places, packed) if packed else np.zeros(len(places), dtype=np.bool_)


def median(values: Iterable[float]) -> float:
    """Return the median of one or more values."""
    return float(np.median(values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=np.float64)))


def median_estimate(samples: Sequence[Sample]) -> Estimate:
    """Estimate the median of all samples, with a 95 % confidence interval from the spread between processes.

    A process counts as one number: the mean, over its visits, of the median log sample. On the log scale, the
    half-width is t(0.975) * (standard error of the mean over processes) * sqrt(pi / 2). The last factor allows for the
    larger error of a median. Without it, the interval contains the true median in only 90 to 93 of 100 cases.

    Sources: for processes as the unit, Kalibera and Jones, Rigorous Benchmarking in Reasonable Time, 2013,
    https://doi.org/10.1145/2464157.2464160; for the variance of a median, Kendall and Stuart, The Advanced Theory of
    Statistics, vol. 1.
    """
    taken = Samples.of(samples)
    first, logs = medians_by(taken.visits, np.log(taken.value))
    epochs = taken.epoch[first].tolist()
    means = np.array([*means_of(zip(epochs, logs.tolist(), strict=True)).values()])
    number, point, low, high = len(means), median(taken.value), None, None
    if number >= FEWEST_PROCESSES:
        error = MEDIAN_FACTOR * float(np.std(means, ddof=1)) / math.sqrt(number)
        half = float(half_widths(error, number - 1.0, 1 - CONFIDENCE))
        low, high = point * math.exp(-half), point * math.exp(half)
    return Estimate(
        point=point,
        low=low,
        high=high,
        num_processes=number,
        num_visits=len(first),
        num_samples=len(taken),
    )


def pairs(
    arm: Sequence[Sample], baseline: Sequence[Sample], discarded: Collection[Block] = ()
) -> tuple[NDArray[np.int64], Array]:
    """Return the visit (n,) and the log ratio of `arm` to `baseline` (n,) of each of n blocks, in time order.

    Visits are numbered as in `Samples.visits`. Discarded blocks are left out, and so are blocks that lack either arm.
    """
    (places, logs), (references, base) = map(_mean_logs, (arm, baseline))
    kept = np.isin(places, references) & ~are_among(places, discarded)
    places, logs = places[kept], logs[kept]
    return places >> BLOCK_BITS, logs - base[np.searchsorted(references, places)]


def visit_numbers(
    arm: Sequence[Sample], baseline: Sequence[Sample], discarded: Collection[Block] = ()
) -> dict[Visit, float]:
    """Return the median log ratio of `arm` to `baseline` over the undiscarded blocks of each visit, in time order."""
    codes, logs = pairs(arm, baseline, discarded)
    first, medians = medians_by(codes, logs)
    visits = [divmod(code, 2**VISIT_BITS) for code in codes[first].tolist()]
    return dict(sorted(zip(visits, medians.tolist(), strict=True)))


def by_process(visits: Mapping[Visit, float]) -> dict[int, float]:
    """Average the log ratios of each process; return one mean for each process, by its number (its epoch).

    A process contributes a log ratio for each of its visits, that is, short series of timed blocks.
    """
    return means_of((epoch, log) for (epoch, _), log in visits.items())


def effect_of(visits: Mapping[Visit, float]) -> Effect:
    """Compute the effect (mean log ratio with its error) of a comparison from one log ratio for each visit.

    The log ratios of the visits (short series of timed blocks) are averaged to one number for each process. With a
    single process, each of its visits counts as a number. Differences below LAYOUT_SPREAD then stay undecided, because
    processes that run the same code differ by as much.

    Raises:
        ValueError: there is no visit.
    """
    processes = by_process(visits)
    return effect([*visits.values()], bias=LAYOUT_LOG) if len(processes) == 1 else effect([*processes.values()])


def _mean_logs(samples: Sequence[Sample]) -> tuple[NDArray[np.int64], Array]:
    """Return the sorted distinct `Samples.places` of the samples (n,), and the mean log value at each place (n,)."""
    taken = Samples.of(samples)
    places, logs = taken.places, np.log(taken.value)
    if (places[1:] > places[:-1]).all():  # in time order, one sample in each place
        return places, logs
    places, inverse, sizes = np.unique(places, return_inverse=True, return_counts=True)
    return places, np.bincount(inverse, logs, len(places)) / sizes
