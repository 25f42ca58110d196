"""Fit memory as a function of length: the sum of a constant, a linear and a quadratic term."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

FEWEST_LENGTHS = 3  # fewest different lengths for a fit of three coefficients
FEWEST_FITTED = 4
"""The curve is fitted to the longer half of the points, and to at least this many points if possible. Short lengths are
left out because some kernels behave differently there."""
ROUNDING = 1e-9
"""A term whose share of the bytes at the longest length is smaller than this is a rounding error, and its coefficient
becomes 0."""
LARGEST_MISFIT = 0.1
"""Largest relative error of a curve at a fitted length; a curve with a larger error is rejected."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Bytes as a function of the length T, a + b T + c T^2, and the lengths to which it was fitted."""

    lengths: tuple[int, ...]
    parts: tuple[float, float, float]  # a, b, c: constant bytes, bytes per token, bytes per pair of tokens

    def exponent(self, length: float) -> float:
        """Return the slope of log(bytes) over log(length) at `length`: 1 is linear growth, 2 quadratic growth."""
        a, b, c = self.parts
        return (b * length + 2 * c * length**2) / (a + b * length + c * length**2)

    def slope(self, length: float) -> float:
        """Return the bytes that one more token needs at `length`."""
        _, b, c = self.parts
        return b + 2 * c * length

    def reach(self, limit: float) -> float | None:
        """Return the length that needs `limit` bytes; None if the constant a reaches `limit`, or bytes do not grow."""
        a, b, c = self.parts
        room = limit - a
        if room <= 0 or (b <= 0 and c <= 0):
            return None
        return 2 * room / (b + math.sqrt(b**2 + 4 * c * room))  # this form of the root avoids cancellation


def fit(points: Iterable[tuple[int, float]]) -> Fit | None:
    """Fit bytes = a + b T + c T^2, with coefficients of at least 0, to points (length T, bytes).

    The fit minimises the sum of squared relative errors, and uses only the longer half of the points (at least
    FEWEST_FITTED if possible). Points with 0 bytes are ignored. Attention allocates tensors of constant, linear or
    quadratic size. None if fewer than three lengths remain, or a fitted point's relative error exceeds LARGEST_MISFIT.

    Source: C. L. Lawson and R. J. Hanson, Solving Least Squares Problems, 1974, chapter 23 (non-negative least
    squares).
    """
    from scipy.optimize import nnls  # here, because it imports too slowly for --help

    every = sorted((length, value) for length, value in points if length > 0 and value > 0)
    if len({length for length, _ in every}) < FEWEST_LENGTHS:
        return None
    x, y = np.array(every[-max(FEWEST_FITTED, math.ceil(len(every) / 2)) :], dtype=np.float64).T
    powers = np.vander(x / x[-1], 3, increasing=True) / y[:, None]
    solved, _ = nnls(powers * y[-1], np.ones(len(x)))
    solved[solved < ROUNDING] = 0.0  # else `reach` would extrapolate a rounding error
    if np.abs(powers @ solved * y[-1] - 1).max() > LARGEST_MISFIT:
        return None
    a, b, c = (float(part * y[-1] / x[-1] ** power) for power, part in enumerate(solved))
    return Fit(lengths=tuple(map(int, x)), parts=(a, b, c))
