"""How sure a difference is, at any moment: e-values that may be watched while samples come in.

An e-value is what a fair bet against a hypothesis has made of 1: where the hypothesis holds, it ever reaches 1 / alpha
with probability alpha at most, however often one looks and whenever one stops. Knows nothing of what was measured.

Sources: G. Shafer, Testing by betting, 2021, https://doi.org/10.1111/rssa.12647; Vovk and Wang, Nonparametric e-tests
of symmetry, 2024, https://arxiv.org/abs/2010.14208 (a sign times a size known beforehand is a fair bet); Wang and
Ramdas, False discovery rate control with e-values, 2022, https://doi.org/10.1111/rssb.12489.
"""

import numpy as np
from numpy.typing import NDArray

from harness.statistics.stats import NORMAL_MAD

Array = NDArray[np.float64]

STAKES = np.array([0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9])
"""Shares of what one has that are bet, each by a player of its own; the e-value is the mean of what they all have."""
WINDOW = 200
"""The scale of a difference is taken from this many before it."""
FIRST = 4
"""The first few differences have no scale yet: half is bet on their sign."""
LARGEST_LOG = 690.0
"""Beyond e^690 nobody counts, and floating point numbers end soon after."""


def scores(differences: Array) -> Array:
    """Bets from -1 to 1 on differences (n,) or (n, paths): odd in each, their size known from earlier ones alone."""
    import pandas as pd  # here, because it takes longer to import than --help may take

    sizes = pd.DataFrame(np.abs(differences)).shift().rolling(WINDOW, min_periods=1).median()
    scale = 2 * NORMAL_MAD * sizes.to_numpy().reshape(np.shape(differences))
    has_scale = (np.arange(len(differences)) >= FIRST).reshape(-1, *[1] * (np.ndim(differences) - 1)) & (scale > 0)
    with np.errstate(over="ignore"):  # what is beyond all numbers is beyond 1, too
        scaled = np.divide(differences, scale, where=has_scale, out=np.zeros_like(differences))
    return np.where(has_scale, np.clip(scaled, -1.0, 1.0), np.sign(differences) / 2)


def e_values(differences: Array, others: Array | None = None, *, upwards_only: bool = False) -> Array:
    """After each difference, the e-value against "they lie symmetrically about 0"; shape as given, (n,) or (n, paths).

    With `upwards_only` the hypothesis is that they lie about 0 or below. One half of the stakes is bet on `scores`,
    which sees small differences among outliers, the other on signs, which decides in few steps what is plain.

    `others` are the differences from the baseline's twin, NaN where there is none. Then each bet is the mean of the two
    that could be made: where all three are the same code in a random order, either is fair whatever the noise, and so
    is their mean, though it is not symmetric.
    """
    differences = np.asarray(differences, dtype=np.float64)
    stakes = STAKES if upwards_only else np.concatenate([STAKES, -STAKES])
    total = np.zeros_like(differences)
    for bet in (scores, np.sign):
        bets = bet(differences)
        if others is not None:
            bets = np.where(np.isnan(others), bets, (bets + bet(np.nan_to_num(others))) / 2)
        for stake in stakes:
            total += np.exp(np.minimum(np.cumsum(np.log1p(stake * bets), axis=0), LARGEST_LOG))
    return total / (2 * len(stakes))


def when_alike(number: int) -> float:
    """The e-value that so many differences lead to which are all alike: as plain as can be.

    On their signs all is bet, on their sizes a half for the first few and then what a difference as large as the
    others is worth.
    """
    stakes = np.concatenate([STAKES, -STAKES])
    few = min(number, FIRST)
    by_size = few * np.log1p(stakes / 2) + (number - few) * np.log1p(stakes / (2 * NORMAL_MAD))
    by_sign = number * np.log1p(stakes)
    return float(np.mean(np.exp(np.minimum(np.concatenate([by_size, by_sign]), LARGEST_LOG))))


def last(values: Array) -> float:
    """The e-value at the end of a path; 1, which says nothing, for an empty one."""
    return float(values[-1]) if len(values) else 1.0


def against_beyond(differences: Array, margin: float) -> float:
    """The e-value against "apart by `margin` or more, in either direction", differences and margin on the log scale."""
    low, high = (last(e_values(margin + sign * differences, upwards_only=True)) for sign in (1, -1))
    return min(low, high)


def discoveries(e_values: Array, false_share: float) -> NDArray[np.bool_]:
    """Which of many hypotheses to reject, so that the expected share of false rejections is `false_share` at most.

    This is e-BH: the k largest of n are rejected, for the largest k whose k-th e-value is n / (k * false_share) or
    more. It holds under any dependence between them.
    """
    values = np.asarray(e_values, dtype=np.float64)
    order = np.argsort(-values, kind="stable")
    ranks = np.arange(1, len(values) + 1)
    reached = np.flatnonzero(values[order] * ranks * false_share >= len(values))
    rejected = np.zeros(len(values), dtype=np.bool_)
    rejected[order[: reached[-1] + 1 if len(reached) else 0]] = True
    return rejected


def needed(num_hypotheses: int, num_rejected: int, false_share: float) -> float:
    """The e-value that the next hypothesis needs to be rejected beside `num_rejected` others."""
    return num_hypotheses / ((num_rejected + 1) * false_share)
