"""Where two things change places: an adaptive bisection whose every step may be watched.

Something grows along a ladder of values, such as lengths. At each value that is looked at, processes are sampled until
it is decided which of two takes less time, or no more may be spent there. The next value halves what lies between the
last that is decided one way and the first that is decided the other way. What samples is elsewhere.

Where times cross once, the place is inside the interval unless some decision was false, which happens in `FALSE_SHARE`
of all searches at most: all values and looks of all searches share that error.

Source of the idea: noisy bisection, Waeber, Frazier and Henderson, 2013, https://doi.org/10.1137/120861898.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from attnbench.statistics.verdict import LOOKS, effect
from attnbench.storage.records import FALSE_SHARE

MOST_VALUES = 16
"""So many values of a ladder are looked at, at most."""
NEAR = 0.005
"""On the log scale: how near to 1 a ratio counts as near in a fit."""
STEP = 2 ** (1 / 8)
"""From each value of a ladder to the next, about."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """What is known at one value: the sign of the logarithm of the ratio, 0 where it is open, and its estimate."""

    sign: int
    log: float
    num_processes: int


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where two change places: between `low` and `high`, next to one another as far as is decided; `at` within them.

    `sign` is that of the ratio from there on: 1 where the first takes longer than the second.
    """

    low: int
    high: int
    at: float
    sign: int


def ladder(low: int, high: int, multiple: int = 1) -> list[int]:
    """Whole numbers from `low` to `high`, each about `STEP` times the one before; both ends, and multiples between.

    Raises:
        ValueError: `low` is not below `high`, or not a multiple.
    """
    if not 0 < low < high or low % multiple:
        raise ValueError(f"from {low} to {high} is no way up in steps of {multiple}: give two numbers, the lower first")
    count = math.ceil(math.log(high / low) / math.log(STEP))
    exact = (low * (high / low) ** (step / count) for step in range(count + 1))
    return sorted({multiple * max(1, round(value / multiple)) for value in exact})


def point(numbers: Sequence[float], num_searches: int = 1) -> Point:
    """What the log ratios at one value show, one for each process, in one of that many searches."""
    seen = effect(numbers)
    half = seen.half_width(FALSE_SHARE / (num_searches * MOST_VALUES * len(LOOKS)))
    is_decided = half is not None and abs(seen.log) > half
    sign = (1 if seen.log > 0 else -1) if is_decided else 0
    return Point(sign=sign, log=seen.log, num_processes=seen.num_measured)


def following(points: Mapping[int, Point], values: Sequence[int]) -> int | None:
    """The value of the ladder to look at next; None where nothing more can be learned.

    `points` are those that were looked at, whatever was found. The ends come first, then the middle; between two that
    are decided differently the gap is halved, and around one that stays open the wider of the gaps on either side.
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
    gaps = [gap for low, high in brackets for gap in _gaps(low, high, seen)]
    widest = max(gaps, key=lambda gap: gap[1] - gap[0], default=None)
    return None if widest is None else values[sum(widest) // 2]


def _brackets(places: Sequence[int], signs: Sequence[int]) -> list[tuple[int, int]]:
    """Next to one another among those that are decided, and decided differently."""
    decided = [(place, sign) for place, sign in zip(places, signs, strict=True) if sign]
    return [(low, high) for (low, one), (high, other) in pairwise(decided) if one != other]


def _gaps(low: int, high: int, seen: Iterable[int]) -> list[tuple[int, int]]:
    """Where nothing was looked at between two places: before the first and after the last that stayed open."""
    inside = [place for place in seen if low < place < high]
    around = [(low, inside[0]), (inside[-1], high)] if inside else [(low, high)]
    return [(one, other) for one, other in around if other - one > 1]


def located(points: Mapping[int, Point]) -> list[Place]:
    """Every place where two change places, in order of the values."""
    values = sorted(points)
    found = []
    for low, high in _brackets(values, [points[value].sign for value in values]):
        inside = [value for value in values if low <= value <= high]
        found.append(Place(low=low, high=high, at=_at(inside, points), sign=points[high].sign))
    return found


def _at(values: Sequence[int], points: Mapping[int, Point]) -> float:
    """Where the logarithm of the ratio is 0, by a straight line through all points of a bracket, within its ends."""
    logs = np.array([points[value].log for value in values])
    weights = np.sqrt([points[value].num_processes for value in values]) / (
        np.abs(logs) + NEAR
    )  # near 0 it is straight
    slope, start = np.polyfit(np.log(values), logs, 1, w=weights)
    crossing = -start / slope if slope else math.nan
    if not math.isfinite(crossing):
        return math.sqrt(values[0] * values[-1])
    return float(math.exp(min(max(crossing, math.log(values[0])), math.log(values[-1]))))
