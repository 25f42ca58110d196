"""Find where two implementations change places: an adaptive bisection that may be watched at every step.

A parameter such as the length grows along a ladder of values. At each visited value, processes are sampled until the
faster implementation is decided, or the budget there is spent. The next value halves the gap between the last value
decided one way and the first decided the other way. Sampling happens elsewhere.

If the times cross once, the place lies inside the interval unless a decision was false, which happens in at most
`FALSE_SHARE` of all searches: all values and looks of all searches share that error.

Source of the idea: noisy bisection, Waeber, Frazier and Henderson, 2013, https://doi.org/10.1137/120861898.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

from attnbench.statistics.verdict import LOOKS, effect
from attnbench.storage.records import FALSE_SHARE

MOST_VALUES = 16  # largest number of values of a ladder to visit
NEAR = 0.005  # ratios this close to 1, on the log scale, count as near in a fit
STEP = 2 ** (1 / 8)  # approximate ratio of neighbouring values of a ladder


class Point(msgspec.Struct, frozen=True, kw_only=True, rename={"log": "log_ratio", "num_processes": "processes"}):
    """Two implementations at one size: -1 the first is faster, 1 the second, 0 undecided."""

    sign: int
    log: float
    num_processes: int


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """A crossover between `low` and `high`, the closest values with different decisions; `at` is its estimate.

    `sign` is the sign of the log ratio from there on: 1 if the first implementation is slower than the second.
    """

    low: int
    high: int
    at: float
    sign: int


def ladder(low: int, high: int, multiple: int = 1) -> list[int]:
    """Return whole numbers from `low` to `high` that grow by about `STEP`, rounded to multiples of `multiple`.

    Raises:
        ValueError: `low` is not below `high`, or not a multiple.
    """
    if not 0 < low < high or low % multiple:
        raise ValueError(f"from {low} to {high} is no way up in steps of {multiple}: give two numbers, the lower first")
    count = math.ceil(math.log(high / low) / math.log(STEP))
    exact = (low * (high / low) ** (step / count) for step in range(count + 1))
    return sorted({multiple * max(1, round(value / multiple)) for value in exact})


def point(numbers: Sequence[float], num_searches: int = 1) -> Point:
    """Decide one value from its log ratios, one for each process, in one of `num_searches` searches."""
    seen = effect(numbers)
    half = seen.half_width(FALSE_SHARE / (num_searches * MOST_VALUES * len(LOOKS)))
    is_decided = half is not None and abs(seen.log) > half
    sign = (1 if seen.log > 0 else -1) if is_decided else 0
    return Point(sign=sign, log=seen.log, num_processes=seen.num_measured)


def next_value(points: Mapping[int, Point], values: Sequence[int]) -> int | None:
    """The next value of the ladder to visit; None if nothing more can be learned.

    `points` holds the visited values, decided or not. The ends come first, then the middle. A gap between two different
    decisions is halved; around an undecided value, the wider gap on either side is halved.
    """
    places = {value: place for place, value in enumerate(values)}
    seen = sorted(places[value] for value in points if value in places)
    for end in (0, len(values) - 1):
        if end not in seen:
            return values[end]
    if len(points) >= MOST_VALUES:
        return None
    brackets = _brackets(seen, [points[values[place]].sign for place in seen])
    if not brackets:
        middle = (len(values) - 1) // 2
        return None if len(seen) > 2 or middle in seen else values[middle]  # noqa: PLR2004 - the two ends
    gaps = []  # before the first and after the last undecided value of each bracket
    for low, high in brackets:
        inside = [place for place in seen if low < place < high]
        gaps += [(low, inside[0]), (inside[-1], high)] if inside else [(low, high)]
    low, high = max(gaps, key=lambda gap: gap[1] - gap[0])
    return values[(low + high) // 2] if high - low > 1 else None


def _brackets(places: Sequence[int], signs: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring pairs of decided places with different decisions."""
    decided = [(place, sign) for place, sign in zip(places, signs, strict=True) if sign]
    return [(low, high) for (low, one), (high, other) in pairwise(decided) if one != other]


def find_crossovers(points: Mapping[int, Point]) -> list[Crossover]:
    """All crossovers, in order of the values."""
    values = sorted(points)
    found = []
    for low, high in _brackets(values, [points[value].sign for value in values]):
        inside = [value for value in values if low <= value <= high]
        found.append(Crossover(low=low, high=high, at=_at(inside, points), sign=points[high].sign))
    return found


def _at(values: Sequence[int], points: Mapping[int, Point]) -> float:
    """The zero of the log ratio, by a straight line through all points of a bracket, clipped to its ends."""
    logs = np.array([points[value].log for value in values])
    weights = np.sqrt([points[value].num_processes for value in values]) / (
        np.abs(logs) + NEAR
    )  # near 0 the curve is straight
    slope, start = np.polyfit(np.log(values), logs, 1, w=weights)
    crossing = -start / slope if slope else math.nan
    if not math.isfinite(crossing):
        return math.sqrt(values[0] * values[-1])
    return float(math.exp(min(max(crossing, math.log(values[0])), math.log(values[-1]))))
