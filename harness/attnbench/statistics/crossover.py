"""Find the size at which the faster of two implementations changes, by adaptive bisection.

A parameter, such as the sequence length, takes values from a ladder, which is a list of increasing values. At each
visited value, processes are sampled until one implementation is shown to be faster, or until the budget for this value
is spent. The next value lies in the middle between two visited values at which different implementations are faster.
This module makes the decisions; sampling happens elsewhere.

If the times cross once, the crossover lies inside the reported interval unless a decision was false. The probability of
any false decision in a run is at most `FALSE_SHARE`, because all values, all searches and all looks (the numbers of
processes at which a value is judged) share this error level.

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

MOST_VALUES = 16  # largest number of values of a ladder that are visited
NEAR = 0.005  # added to |log ratio| in the denominator of a fit's weights, so that a ratio of 1 has a finite weight
STEP = 2 ** (1 / 8)  # approximate ratio of neighbouring values of a ladder


class Point(msgspec.Struct, frozen=True, kw_only=True, rename={"log": "log_ratio", "num_processes": "processes"}):
    """Two implementations compared at one size; `sign` is -1 if the first is faster, 1 if the second is, else 0."""

    sign: int
    log: float  # mean log ratio of the first's time to the second's
    num_processes: int


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """A crossover between `low` and `high`, two neighbouring values with decisions; `at` is the estimate.

    `sign` is the sign of the log ratio at `high`: 1 if the first implementation is slower there, -1 if it is faster.
    """

    low: int
    high: int
    at: float
    sign: int


def ladder(low: int, high: int, multiple: int = 1) -> list[int]:
    """Return integers from `low` to `high` that grow by a factor of about `STEP`, rounded to multiples of `multiple`.

    Raises:
        ValueError: `low` is not positive, not below `high`, or not a multiple of `multiple`.
    """
    if not 0 < low < high or low % multiple:
        raise ValueError(f"{low} to {high} in steps of {multiple} is no range: give two multiples, the lower first")
    count = math.ceil(math.log(high / low) / math.log(STEP))
    exact = (low * (high / low) ** (step / count) for step in range(count + 1))
    return sorted({multiple * max(1, round(value / multiple)) for value in exact})


def point(numbers: Sequence[float], num_searches: int = 1) -> Point:
    """Decide which implementation is faster at one value, from one log ratio for each process.

    The error level FALSE_SHARE is divided among `num_searches` searches.
    """
    seen = effect(numbers)
    half = seen.half_width(FALSE_SHARE / (num_searches * MOST_VALUES * len(LOOKS)))
    is_decided = half is not None and abs(seen.log) > half
    sign = (1 if seen.log > 0 else -1) if is_decided else 0
    return Point(sign=sign, log=seen.log, num_processes=seen.num_measured)


def next_value(points: Mapping[int, Point], values: Sequence[int]) -> int | None:
    """Return the next value of the ladder `values` to visit; None if nothing more can be learned, or after MOST_VALUES.

    `points` has the visited values, decided or not. The two ends are visited first. If they show no crossover, the
    middle follows. Otherwise the gap between two values with different decisions is halved. If there are undecided
    values in this gap, the gap before the first or after the last of them is halved, whichever is wider.
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
    gaps = []  # of each bracket: before its first and after its last undecided value
    for low, high in brackets:
        inside = [place for place in seen if low < place < high]
        gaps += [(low, inside[0]), (inside[-1], high)] if inside else [(low, high)]
    low, high = max(gaps, key=lambda gap: gap[1] - gap[0])
    return values[(low + high) // 2] if high - low > 1 else None


def _brackets(places: Sequence[int], signs: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs of neighbouring decided places with different signs; undecided places (sign 0) are skipped."""
    decided = [(place, sign) for place, sign in zip(places, signs, strict=True) if sign]
    return [(low, high) for (low, one), (high, other) in pairwise(decided) if one != other]


def find_crossovers(points: Mapping[int, Point]) -> list[Crossover]:
    """Find a crossover between any two neighbouring decided values at which different implementations are faster."""
    values = sorted(points)
    found = []
    for low, high in _brackets(values, [points[value].sign for value in values]):
        inside = [value for value in values if low <= value <= high]
        found.append(Crossover(low=low, high=high, at=_at(inside, points), sign=points[high].sign))
    return found


def _at(values: Sequence[int], points: Mapping[int, Point]) -> float:
    """Estimate where a line, fitted to log ratios over log values, is 0; the result is inside the range of `values`."""
    logs = np.array([points[value].log for value in values])
    weights = np.sqrt([points[value].num_processes for value in values]) / (
        np.abs(logs) + NEAR
    )  # points with a ratio near 1 weigh most, because the curve is nearly straight there
    slope, start = np.polyfit(np.log(values), logs, 1, w=weights)
    crossing = -start / slope if slope else math.nan
    if not math.isfinite(crossing):
        return math.sqrt(values[0] * values[-1])
    return float(math.exp(min(max(crossing, math.log(values[0])), math.log(values[-1]))))
