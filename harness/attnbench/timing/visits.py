"""How many blocks a process takes of a workload, from the data so far.

More blocks reduce the noise inside a process, and more processes also the difference between processes. With the cost
of a process, the cost of a block and both variances, the number of blocks that gives the narrowest interval in a given
time is the square root of (cost of a process / cost of a block) * (variance inside / variance between).

Source: Kalibera and Jones, Rigorous Benchmarking in Reasonable Time, 2013, https://doi.org/10.1145/2464157.2464160,
section 6.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from attnbench.statistics.intervals import medians_by, pairs
from attnbench.statistics.verdict import FEWEST_PROCESSES, LOOKS
from attnbench.storage.records import Arm, Sample

FRESH_S = 0.3  # seconds of a process besides its blocks, until some were measured
BETWEEN, INSIDE = 0.002, 0.02
"""Standard deviations of a log ratio between processes and between the blocks of one, until some were measured."""
LEAST_BETWEEN = 0.001  # the variance between a few processes may look like 0
MEDIAN_VARIANCE = math.pi / 2  # of a median, over that of a mean
OF_DEVIATIONS = 1.4826  # a normal standard deviation over the median absolute one
MOST_TIMES = 8  # the largest number of blocks, over the best one: a longer visit delays the first verdict
KEPT_SHARE = 0.95  # of the time that is left; the rest ends the run


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of a process besides its blocks, and of one block."""

    process_s: float
    block_s: float


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a process takes of a workload: blocks, and seconds in which all of them should fit; 0: no limit."""

    num_blocks: int
    longest_s: float = 0.0


def variances(taken: Mapping[Arm, Sequence[Sample]], references: Mapping[Arm, Arm]) -> tuple[float, float]:
    """The variances of log ratios inside a process and between processes: the medians over all comparisons."""
    inside, between = list[float](), list[float]()
    for arm, reference in references.items():
        visits, logs = pairs(taken.get(arm, ()), taken.get(reference, ()))
        if arm == reference or not len(logs):
            continue
        first, middles = medians_by(visits, logs)
        of_visit = dict(zip(visits[first].tolist(), middles.tolist(), strict=True))
        distances = np.abs(logs - np.array([of_visit[visit] for visit in visits.tolist()]))
        noise = float(OF_DEVIATIONS * np.median(distances)) ** 2
        inside.append(noise)
        if len(middles) >= FEWEST_PROCESSES:
            of_medians = MEDIAN_VARIANCE * noise * len(middles) / len(logs)
            between.append(float(np.var(middles, ddof=1)) - of_medians)
    return median(inside or [INSIDE**2]), max(LEAST_BETWEEN**2, median(between or [BETWEEN**2]))


def best(costs: Costs, inside: float, between: float) -> float:
    """The number of blocks that gives the narrowest interval in a given time."""
    return math.sqrt(costs.process_s / costs.block_s * MEDIAN_VARIANCE * inside / between)


def share(  # noqa: PLR0913 - the numbers that decide it
    costs: Costs, wanted: float, *, num_taken: int, left_s: float, least: int, num_rounds: int
) -> Share:
    """The share of the next process after `num_taken` ones, if `left_s` seconds are left for the workload.

    A comparison is judged at its looks only. The processes up to the last look that the time allows, with `wanted`
    blocks or more, share all of it; before the first look they share it with fewer blocks if need be.
    """
    looks = [look for look in LOOKS if look > num_taken and look >= num_rounds] or [num_taken + 1]
    least_s = costs.process_s + max(wanted, least) * costs.block_s
    ahead = max((look - num_taken for look in looks if (look - num_taken) * least_s <= left_s), default=0)
    ahead = ahead or looks[0] - num_taken
    longest_s = max(KEPT_SHARE * left_s / ahead - costs.process_s, costs.block_s)
    most = MOST_TIMES * max(wanted, least)
    return Share(num_blocks=max(least, int(min(longest_s / costs.block_s, most))), longest_s=longest_s)
