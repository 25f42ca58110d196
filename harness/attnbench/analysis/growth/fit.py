"""How a count of bytes grows with length: an exponent with its interval, and the curve that foretells the rest.

Memory is a count, not a sample: the same call takes the same bytes. What is not known is how it goes on, so that all
intervals here come from how well a simple law fits the lengths that were measured.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from attnbench.statistics.intervals import growth_exponent, t_quantile

FEWEST_LENGTHS = 3
FEWEST_FITTED = 4
"""The longer half of the lengths is fitted, so many at least where there are: constant parts, and kernels that work
otherwise on short inputs, bend the line there."""
EXACT = 1e-9
"""A relative misfit of less is none."""

Parts = tuple[float, float, float]
"""Of a curve: a constant, bytes for each token, bytes for each pair of tokens."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """A length, and the lengths between which it lies as far as the fit can tell."""

    point: float
    low: float
    high: float

    @property
    def is_exact(self) -> bool:
        """Whether the fit leaves no doubt that a whole number of tokens could show."""
        return self.high - self.low < 1


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Growth over `lengths`, which are those that were fitted.

    `exponent` is the slope of log(bytes) over log(length): 1 is linear, 2 quadratic; `low` and `high` bound it at 95 %.
    `end` is the slope between the last two lengths. `parts` is the curve; `others` are those with a length left out.
    """

    lengths: tuple[int, ...]
    values: tuple[float, ...]
    exponent: float
    low: float
    high: float
    end: float
    parts: Parts
    others: tuple[Parts, ...]

    @property
    def misfit(self) -> float:
        """The largest relative distance of the curve from what was measured."""
        found = (abs(at(self.parts, x) / y - 1) for x, y in zip(self.lengths, self.values, strict=True))
        return max(found)

    def predict(self, length: float) -> float:
        """Bytes at a length."""
        return at(self.parts, length)

    def slope(self, length: float) -> float:
        """The exponent of the curve at a length."""
        _, b, c = self.parts
        return (b * length + 2 * c * length**2) / self.predict(length)

    def reach(self, limit: float) -> Reach | None:
        """Where `limit` bytes are reached; None where they never are."""
        curves = (self.parts, *self.others)
        off = self.misfit if self.misfit > EXACT else 0.0
        lows = [length for parts in curves if (length := solve(parts, limit / (1 + off))) is not None]
        highs = [length for parts in curves if (length := solve(parts, limit * (1 + off))) is not None]
        point = solve(self.parts, limit)
        return None if point is None else Reach(point=point, low=min(lows), high=max(highs))


def fit(points: Iterable[tuple[int, float]]) -> Fit | None:
    """The growth over (length, bytes); None with fewer than three lengths, or where nothing is taken."""
    every = sorted((length, value) for length, value in points if length > 0 and value > 0)
    if len({length for length, _ in every}) < FEWEST_LENGTHS:
        return None
    used = every[-max(FEWEST_FITTED, math.ceil(len(every) / 2)) :]
    lengths, values = tuple(x for x, _ in used), tuple(y for _, y in used)
    exponent, half = _slope(lengths, values)
    end = growth_exponent(lengths[-2:], values[-2:])
    assert end is not None
    left_out = [used[:place] + used[place + 1 :] for place in range(len(used))] if len(used) > FEWEST_LENGTHS else []
    return Fit(
        lengths=lengths,
        values=values,
        exponent=exponent,
        low=exponent - half,
        high=exponent + half,
        end=end,
        parts=curve(used),
        others=tuple(curve(rest) for rest in left_out),
    )


def _slope(lengths: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The least-squares slope on log scales, and half its 95 % interval by Student's t over the distances from it."""
    x, y = np.log(lengths), np.log(values)
    slope = growth_exponent(lengths, values)
    assert slope is not None
    rest = y - y.mean() - slope * (x - x.mean())
    degrees = len(x) - 2
    error = math.sqrt(float(np.sum(rest**2)) / degrees / float(np.sum((x - x.mean()) ** 2)))
    return slope, t_quantile(0.975, degrees) * error


def curve(points: Sequence[tuple[int, float]]) -> Parts:
    """The parts of a + b T + c T^2, none of them below 0, by least squares of relative distances.

    Attention holds tensors of three kinds: of no length, of one, and of two; none takes memory away. Source: C. L.
    Lawson and R. J. Hanson, Solving Least Squares Problems, 1974, chapter 23 (non-negative least squares).
    """
    from scipy.optimize import nnls  # here, because it takes longer to import than --help may take

    x, y = np.array(points, dtype=np.float64).T
    powers = np.vander(x / x[-1], 3, increasing=True) / y[:, None]
    found, _ = nnls(powers * y[-1], np.ones(len(x)))
    found[found < EXACT] = 0.0  # of the longest length's bytes: what rounding leaves must not grow into a limit
    a, b, c = (float(part * y[-1] / x[-1] ** power) for power, part in enumerate(found))
    return a, b, c


def at(parts: Parts, length: float) -> float:
    """Bytes on a curve."""
    a, b, c = parts
    return a + b * length + c * length**2


def solve(parts: Parts, limit: float) -> float | None:
    """The length at which a curve reaches `limit`; None where it does not, or starts above it."""
    a, b, c = parts
    room = limit - a
    if room <= 0 or (b <= 0 and c <= 0):
        return None
    return 2 * room / (b + math.sqrt(b**2 + 4 * c * room))  # the root that is not a difference of like numbers
