"""Times and their intervals, and the one number that each process adds to a comparison.

A visit consists of a few blocks. A block samples each arm that takes part once, which gives a log ratio for each pair
of these arms. A process adds one number to each comparison: the median log ratio of each visit, averaged over the
process's visits.
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
"""Largest ratio of the standard error of a median to that of a mean under normal noise."""

Array = NDArray[np.float64]
Visit = tuple[int, int]  # epoch (the process's number), visit
Block = tuple[int, int, int]  # epoch, visit, block
Group = TypeVar("Group")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The median of a metric, in its unit, with a 95 % interval from one number for each process."""

    point: float
    low: float | None  # None with fewer than FEWEST_PROCESSES processes
    high: float | None
    num_processes: int
    num_visits: int
    num_samples: int


def means_of(values: Iterable[tuple[Group, float]]) -> dict[Group, float]:
    """The mean of each group's values; groups in the order of their first value."""
    values_of: dict[Group, list[float]] = {}
    for group, value in values:
        values_of.setdefault(group, []).append(value)
    return {group: float(np.mean(members)) for group, members in values_of.items()}


def medians_by(codes: NDArray[Any], values: Array) -> tuple[NDArray[np.int64], Array]:
    """Group values (n,) by their codes (n,): for each code, the index of its first value, and the median.

    Groups are in the order of their first value.
    """
    _, first, inverse, sizes = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    ordered = values[np.lexsort((values, inverse))]
    ends = np.cumsum(sizes)
    medians = (ordered[ends - sizes + (sizes - 1) // 2] + ordered[ends - sizes + sizes // 2]) / 2
    order = np.argsort(first)
    return first[order], medians[order]


def place_of(sample: Sample) -> Block:
    """The epoch, visit and block that a sample belongs to."""
    return sample.epoch, sample.visit, sample.block


def are_among(places: NDArray[np.int64], blocks: Collection[Block]) -> NDArray[np.bool_]:
    """Whether each of `places` (n,), block numbers as in `Samples.places`, is one of `blocks`: boolean (n,)."""
    packed = [(((epoch << VISIT_BITS) | visit) << BLOCK_BITS) | block for epoch, visit, block in blocks]
    return np.isin(places, packed) if packed else np.zeros(len(places), dtype=np.bool_)


def median(values: Iterable[float]) -> float:
    """The median; needs at least one value."""
    return float(np.median(values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=np.float64)))


def median_estimate(samples: Sequence[Sample]) -> Estimate:
    """The median of all samples, with a 95 % interval from the spread between processes.

    On the log scale the half-width is t(0.975) * (standard error of the mean over processes) * sqrt(pi/2), where the
    number of a process is the mean of its visits' medians. The last factor allows for the larger error of a median;
    without it the interval covers the truth in only 90 to 93 of 100 cases.

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
    """For each of n blocks, its visit (n,), as in `Samples.visits`, and the log ratio (n,) of `arm` to `baseline`.

    Blocks are in time order; discarded blocks, and blocks without both arms, are left out.
    """
    (places, logs), (references, base) = map(_mean_logs, (arm, baseline))
    kept = np.isin(places, references) & ~are_among(places, discarded)
    places, logs = places[kept], logs[kept]
    return places >> BLOCK_BITS, logs - base[np.searchsorted(references, places)]


def visit_numbers(
    arm: Sequence[Sample], baseline: Sequence[Sample], discarded: Collection[Block] = ()
) -> dict[Visit, float]:
    """One log ratio of `arm` to `baseline` for each visit, in time order: the median over its undiscarded blocks."""
    codes, logs = pairs(arm, baseline, discarded)
    first, medians = medians_by(codes, logs)
    visits = [divmod(code, 2**VISIT_BITS) for code in codes[first].tolist()]
    return dict(sorted(zip(visits, medians.tolist(), strict=True)))


def by_process(visits: Mapping[Visit, float]) -> dict[int, float]:
    """One log ratio for each process, by epoch: the mean over its visits."""
    return means_of((epoch, log) for (epoch, _), log in visits.items())


def effect_of(visits: Mapping[Visit, float]) -> Effect:
    """The effect from log ratios of visits, averaged to one number for each process.

    With a single process, its visits count instead, and differences below LAYOUT_SPREAD, by which processes differ,
    stay undecided.

    Raises:
        ValueError: there is no visit.
    """
    processes = by_process(visits)
    return effect([*visits.values()], bias=LAYOUT_LOG) if len(processes) == 1 else effect([*processes.values()])


def _mean_logs(samples: Sequence[Sample]) -> tuple[NDArray[np.int64], Array]:
    """The distinct `Samples.places` of the samples, sorted (n,), and the mean log value at each (n,)."""
    taken = Samples.of(samples)
    places, logs = taken.places, np.log(taken.value)
    if (places[1:] > places[:-1]).all():  # in time order, one sample in each place
        return places, logs
    places, inverse, sizes = np.unique(places, return_inverse=True, return_counts=True)
    return places, np.bincount(inverse, logs, len(places)) / sizes
