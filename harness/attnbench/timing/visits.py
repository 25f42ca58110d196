"""Choose the number of blocks of a workload that a process samples, from the data so far.

More blocks reduce the noise inside a process. More processes also reduce the effect of differences between processes.
The error of a mean is smallest if each process samples sqrt((cost of a process / cost of a block) * (variance inside a
process / variance between processes)) blocks.

Source: Kalibera and Jones, Rigorous Benchmarking in Reasonable Time, 2013, https://doi.org/10.1145/2464157.2464160,
section 6.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from attnbench.statistics.intervals import MEDIAN_FACTOR, NORMAL_MAD, medians_by, pairs
from attnbench.statistics.verdict import FEWEST_PROCESSES, LOOKS, half_widths
from attnbench.storage.records import FALSE_SHARE, Arm, Sample
from attnbench.storage.samples import Samples

FRESH_S = 0.3  # seconds of a process outside of its blocks; assumed until some are measured
BETWEEN, INSIDE = 0.005, 0.02
"""Standard deviations of a log ratio between processes (BETWEEN) and between the blocks of a process (INSIDE), which
are assumed until they can be estimated."""
LEAST_BETWEEN = 0.001  # smallest standard deviation between processes, since the estimate from a few may be 0
MEDIAN_VARIANCE = MEDIAN_FACTOR**2  # variance of the median of normal values, divided by that of their mean
MOST_TIMES = 8  # most blocks, as a multiple of the best number: a longer visit delays the first verdict
LEAST_SHARE = 0.7  # least share of a process's time for its blocks, if possible
FEWEST_BLOCKS = 2  # in a visit, even if time is short
KEPT_SHARE = 0.95  # share of the remaining time that is planned; the rest is for ending the run


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds that a process spends outside of its blocks, and seconds of one block."""

    process_s: float
    block_s: float


@dataclass(frozen=True, kw_only=True)
class Share:
    """One process's work on a workload: the number of blocks, and the seconds for all of them (0: no limit)."""

    num_blocks: int
    longest_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Variances of log ratios: `inside` a process, between its blocks, and `between` processes."""

    inside: float
    between: float


def spread_of(taken: Mapping[Arm, Sequence[Sample]], references: Mapping[Arm, Arm]) -> Spread:
    """Estimate the variances of log ratios from the samples so far: medians over all comparisons with a reference.

    A variance that cannot be estimated yet is the square of INSIDE or BETWEEN.
    """
    inside, between = list[float](), list[float]()
    for arm, reference in references.items():
        visits, logs = pairs(taken.get(arm, ()), taken.get(reference, ()))
        if arm == reference or not len(logs):
            continue
        first, middles = medians_by(visits, logs)
        of_visit = dict(zip(visits[first].tolist(), middles.tolist(), strict=True))
        distances = np.abs(logs - np.array([of_visit[visit] for visit in visits.tolist()]))
        noise = float(NORMAL_MAD * np.median(distances)) ** 2
        inside.append(noise)
        if len(middles) >= FEWEST_PROCESSES:
            of_medians = MEDIAN_VARIANCE * noise * len(middles) / len(logs)
            between.append(float(np.var(middles, ddof=1)) - of_medians)
    return Spread(
        inside=median(inside or [INSIDE**2]),
        between=max(LEAST_BETWEEN**2, median(between or [BETWEEN**2])),
    )


def in_blocks(taken: Mapping[Arm, Sequence[Sample]]) -> tuple[float, int]:
    """Return the total seconds of all blocks, including pauses and untimed calls between samples, and their number."""
    arms = [Samples.of(samples) for samples in taken.values() if len(samples)]
    visits = np.concatenate([each.visits for each in arms])
    starts = np.concatenate([each.start_s for each in arms])
    ends = starts + np.concatenate([each.value * each.num_calls for each in arms])
    blocks = np.concatenate([each.block for each in arms])
    seconds, number = 0.0, 0
    for visit in np.unique(visits):
        own = visits == visit
        seconds += float(ends[own].max() - starts[own].min())
        number += int(blocks[own].max()) + 1
    return seconds, number


def best(costs: Costs, spread: Spread) -> float:
    """Return the number of blocks per process that makes a mean over processes most precise for a given total time."""
    return math.sqrt(costs.process_s / costs.block_s * MEDIAN_VARIANCE * spread.inside / spread.between)


def share(costs: Costs, spread: Spread, *, num_taken: int, left_s: float, limits: tuple[int, int]) -> Share:
    """Choose the blocks and seconds of the next process on a workload, after `num_taken` processes.

    A comparison is judged only at its looks, the numbers of processes in LOOKS. The processes up to the chosen look
    share the `left_s` seconds that are left for the workload. The chosen look is the one with the narrowest expected
    interval, among those that leave at least LEAST_SHARE of the time to the blocks; if none does, it is the next look.
    `limits` has the fewest blocks of a process, and the fewest processes.
    """
    least, num_rounds = limits
    looks = [look for look in LOOKS if look > num_taken and look >= num_rounds] or [num_taken + 1]
    seconds = {look: KEPT_SHARE * left_s / (look - num_taken) - costs.process_s for look in looks}
    least_s = max(least * costs.block_s, LEAST_SHARE / (1 - LEAST_SHARE) * costs.process_s)
    fitting = [look for look in looks if seconds[look] >= least_s] or looks[:1]

    def width(look: int) -> float:
        error = math.sqrt((spread.between + MEDIAN_VARIANCE * spread.inside * costs.block_s / seconds[look]) / look)
        return float(half_widths(error, look - 1.0, FALSE_SHARE / len(LOOKS)))

    longest_s = seconds[min(fitting, key=width) if len(fitting) > 1 else fitting[0]]
    longest_s = max(longest_s, FEWEST_BLOCKS * costs.block_s)
    most = MOST_TIMES * max(best(costs, spread), least)
    return Share(num_blocks=max(least, int(min(longest_s / costs.block_s, most))), longest_s=longest_s)
