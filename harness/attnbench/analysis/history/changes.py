"""Where a series of numbers changed its level, and where it only wavered.

Change points are found by ruptures: PELT with a penalty of 5 log(n) variances, segments of three runs at least. Before
that, a value that stands alone is put back among its neighbours, so that one bad run is no change; and afterwards a
change must be larger than the noise and than what matters.

Sources: R. Killick, P. Fearnhead and I. A. Eckley, 2012, https://doi.org/10.1080/01621459.2012.737745; C. Truong,
L. Oudre and N. Vayatis, 2020, https://doi.org/10.1016/j.sigpro.2019.107299; the filter: F. R. Hampel, 1974.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from attnbench.statistics.intervals import NORMAL_MAD

Array = NDArray[np.float64]

FEWEST = 6
"""Runs: fewer say nothing of their noise."""
SHORTEST = 3
PENALTY = 5.0
ALONE = 3.0
"""Standard deviations from the median of itself and two neighbours on each side."""
LEAST_NOISE = 1e-5
"""What never varies has this, so that any change of it is one."""
SURELY = 3.0
"""A change must be as many standard errors of the difference of two levels."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A new level, from the value at `place` on."""

    place: int
    before: float  # the median level of the segment that ends
    after: float  # of the one that begins

    @property
    def effect(self) -> float:
        """The relative difference: 0.05 is five percent more."""
        return self.after / self.before - 1


def noise(logs: Array) -> float:
    """The standard deviation from one value to the next, large steps drawn in: a change of level is not noise."""
    steps = np.diff(logs)
    reach = ALONE * NORMAL_MAD * float(np.median(np.abs(steps)))
    return max(LEAST_NOISE, math.sqrt(float(np.mean(np.clip(steps, -reach, reach) ** 2)) / 2))


def among_neighbours(logs: Array) -> Array:
    """The same, with each value that stands alone replaced by the median of those around it."""
    around = np.lib.stride_tricks.sliding_window_view(np.pad(logs, 2, mode="edge"), 5)
    middle = np.median(around, axis=1)
    return np.where(np.abs(logs - middle) > ALONE * noise(logs), middle, logs)


def changes(values: Sequence[float], smallest: float) -> list[Change]:
    """The changes of level of positive `values`, in order, that are relatively larger than `smallest`."""
    if len(values) < FEWEST:
        return []
    import ruptures  # here, because it takes seconds to import

    logs = np.log(np.asarray(values, dtype=np.float64))
    smooth = among_neighbours(logs)
    spread = noise(smooth)
    search = ruptures.Pelt(model="l2", min_size=SHORTEST, jump=1).fit(smooth[:, None])
    ends = [0, *search.predict(pen=PENALTY * math.log(len(logs)) * spread**2)]
    return _merged(logs, ends, spread, math.log1p(smallest))


def _merged(logs: Array, ends: list[int], spread: float, smallest: float) -> list[Change]:
    """The segments' borders less those across which too little happens, the smallest first."""
    while len(ends) > 2:  # noqa: PLR2004 - the beginning and the end
        segments = [logs[start:end] for start, end in pairwise(ends)]
        steps = [
            abs(float(np.median(after) - np.median(before)))
            / max(smallest, SURELY * spread * math.sqrt(1 / len(before) + 1 / len(after)))
            for before, after in pairwise(segments)
        ]
        least = min(range(len(steps)), key=steps.__getitem__)
        if steps[least] >= 1:
            levels = [math.exp(float(np.median(segment))) for segment in segments]
            return [
                Change(place=place, before=before, after=after)
                for place, (before, after) in zip(ends[1:-1], pairwise(levels), strict=True)
            ]
        del ends[least + 1]
    return []
