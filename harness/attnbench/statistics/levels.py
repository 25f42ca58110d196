"""Find changes of the level of a series of values, such as the times of one cell in many runs.

A series is split into two parts where the sum of absolute deviations from the medians of the parts is smallest. The
split counts if the two medians differ by more than the noise and by at least the smallest change of interest. Each part
is then split in the same way. A part has at least three values, so that a single outlier is not a change.

Source: binary segmentation, A. J. Scott and M. Knott, 1974, https://doi.org/10.2307/2529204; here with medians.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from attnbench.statistics.intervals import MEDIAN_FACTOR, NORMAL_MAD, Array

FEWEST = 6  # fewest values of a series from which noise can be estimated
SHORTEST = 3  # fewest values of a part
ALONE = 3.0
"""Differences of neighbouring values are clipped at this many of their standard deviations, because a change of level
is not noise."""
LEAST_NOISE = 1e-5  # floor of the noise: a constant series has none, and any change in it must count
SURELY = 3.0  # fewest standard errors between two levels for a change to count


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of level: `place` is the index of the first value at the new level."""

    place: int
    before: float  # the median level of the segment before
    after: float  # the median level of the segment after

    @property
    def effect(self) -> float:
        """The relative difference: 0.05 is 5 % more."""
        return self.after / self.before - 1


def noise(logs: Array) -> float:
    """Estimate the standard deviation of log values (n,) from the differences of neighbours; for clipping see ALONE."""
    steps = np.diff(logs)
    reach = ALONE * NORMAL_MAD * float(np.median(np.abs(steps)))
    return max(LEAST_NOISE, math.sqrt(float(np.mean(np.clip(steps, -reach, reach) ** 2)) / 2))


def changes(values: Sequence[float], smallest: float) -> list[Change]:
    """Find the changes of level by at least `smallest`, a fraction (0.05 is 5 %), in the order of the values.

    There are none with fewer than FEWEST values, or if any value is not positive.
    """
    if len(values) < FEWEST or min(values) <= 0:
        return []
    logs = np.log(np.asarray(values, dtype=np.float64))
    places = _splits(logs, 0, len(logs), noise(logs), math.log1p(smallest))
    levels = [float(np.exp(np.median(part))) for part in np.split(logs, places)]
    return [
        Change(place=place, before=before, after=after)
        for place, (before, after) in zip(places, pairwise(levels), strict=True)
    ]


def _splits(logs: Array, start: int, end: int, spread: float, smallest: float) -> list[int]:
    """Return the indices from `start` to `end` at which `logs` step by at least `smallest`; `spread` is the noise."""
    places = range(start + SHORTEST, end - SHORTEST + 1)
    place = min(places, key=lambda at: _deviation(logs[start:at]) + _deviation(logs[at:end]), default=None)
    if place is None:
        return []
    step = abs(float(np.median(logs[place:end]) - np.median(logs[start:place])))
    error = MEDIAN_FACTOR * spread * math.sqrt(1 / (place - start) + 1 / (end - place))
    if step < max(smallest, SURELY * error):
        return []
    before, after = ((start, place), (place, end))
    return [*_splits(logs, *before, spread, smallest), place, *_splits(logs, *after, spread, smallest)]


def _deviation(part: Array) -> float:
    """Return the sum of absolute deviations of log values (n,) from their median."""
    return float(np.abs(part - np.median(part)).sum())
