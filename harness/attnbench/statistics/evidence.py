"""How sure a difference is, at any moment: e-values that may be watched while samples come in.

An e-value is what a fair bet against a hypothesis has made of 1: where the hypothesis holds, it ever reaches 1 / alpha
with probability alpha at most, however often one looks and whenever one stops.

Sources: G. Shafer, Testing by betting, 2021, https://doi.org/10.1111/rssa.12647; Vovk and Wang, Nonparametric e-tests
of symmetry, 2024, https://arxiv.org/abs/2010.14208 (a sign times a size known beforehand is a fair bet); Wang and
Ramdas, False discovery rate control with e-values, 2022, https://doi.org/10.1111/rssb.12489.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

STAKES = np.array([0.05, 0.15, 0.3, 0.6, 0.9])
"""Shares of what one has that are bet, each by a player of its own; the e-value is the mean of what they all have."""
WIDTHS = (3.0, 1.0, 0.0)
"""Which difference is worth a whole stake, in medians of the sizes before it: a large one, a usual one, or any."""
NUM_PLAYERS = 2 * len(WIDTHS) * len(STAKES)
"""Half of them bet on each direction."""
WINDOW = 200
"""The usual size of a difference is taken from this many before it."""
FIRST = 4
"""The first few differences have no usual size yet: half is bet on their sign, or all of it where size is none."""
SHIFTS = np.array([0.01, 0.02, 0.04, 0.08])
"""On the log scale: by how much things may differ, each bet on by a player of its own, where spreads are known."""
FURTHEST = 2.5
APART = (0.5, 1.0, 2.0, 4.0)
"""In standard deviations: how far above 0 a mean may lie, where no spread is known; a player bets on each."""
REACH, NUM_STEPS = 9.0, 500
"""Integrals reach so far on either side of their peak, which is about 1 wide, in so many steps."""
LARGEST_LOG = 690.0
"""Wealth is cut off at e^690, soon before floating point numbers end."""


def usual(differences: Array) -> Array:
    """The median size of those before each of the differences (n,) or (n, paths); 0 for the first few."""
    if differences.ndim == 1:  # usually a few dozen, and often: a table of pandas takes ten times as long
        return np.array(list(_medians_before(np.abs(differences).tolist())))
    import pandas as pd  # here, because it takes longer to import than --help may take

    sizes = pd.DataFrame(np.abs(differences)).shift().rolling(WINDOW, min_periods=FIRST).median()
    filled: Array = sizes.fillna(0.0).to_numpy().reshape(np.shape(differences))
    return filled


def _medians_before(sizes: list[float]) -> Iterator[float]:
    ordered: list[float] = []
    for place, size in enumerate(sizes):
        number = len(ordered)
        yield (ordered[number // 2] + ordered[(number - 1) // 2]) / 2 if number >= FIRST else 0.0
        if place >= WINDOW and not math.isnan(sizes[place - WINDOW]):
            del ordered[bisect_left(ordered, sizes[place - WINDOW])]
        if not math.isnan(size):
            insort(ordered, size)


def scores(differences: Array, sizes: Array, width: float) -> Array:
    """Bets from -1 to 1 on differences: odd in each, and whole from `width` times its usual size on."""
    if not width:
        signs: Array = np.sign(differences)
        return signs
    with np.errstate(over="ignore"):  # what is beyond all numbers is beyond 1, too
        scaled = np.divide(differences, width * sizes, where=sizes > 0, out=np.sign(differences) / 2)
    return np.clip(scaled, -1.0, 1.0)


def e_values(differences: Array, others: Array | None = None, *, upwards_only: bool = False) -> Array:
    """After each difference, the e-value against "they lie symmetrically about 0"; shape as given, (n,) or (n, paths).

    With `upwards_only` the hypothesis is that they lie about 0 or below. A third of the players bets by each of the
    widths: large ones see small differences among outliers, signs decide in few steps what is plain, and usual sizes
    serve what scatters about as much as it differs.

    `others` are the differences from the baseline's A/A control, NaN where there is none. Then each bet is the mean
    of the two that could be made: where all three are the same code in a random order, either is fair whatever the
    noise, and so is their mean, though it is not symmetric. And a fourth of the players bets on the place among the
    three, to win twice the stake: what is plain is seen after two thirds as many differences.
    """
    differences = np.asarray(differences, dtype=np.float64)
    stakes = STAKES if upwards_only else np.concatenate([STAKES, -STAKES])
    controls = None if others is None or np.isnan(others).all() else np.asarray(others, dtype=np.float64)
    both = [differences] if controls is None else [differences, np.nan_to_num(controls)]
    sizes = [usual(each) for each in both]
    played = []
    for width in WIDTHS:
        bets, *others_bets = (scores(each, size, width) for each, size in zip(both, sizes, strict=True))
        if controls is not None:
            bets = np.where(np.isnan(controls), bets, (bets + others_bets[0]) / 2)
        played += [(stake, bets) for stake in stakes]
    if controls is not None:
        slower, faster = (
            np.where(np.isnan(controls), sign * np.sign(differences), _first_of_three(*(sign * each for each in both)))
            for sign in (1, -1)
        )
        played += [(abs(stake), slower if stake > 0 else faster) for stake in stakes]
    total = np.zeros_like(differences)
    for stake, bets in played:
        total += np.exp(np.minimum(np.cumsum(np.log1p(stake * bets), axis=0), LARGEST_LOG))
    return total / len(played)


def _first_of_three(differences: Array, others: Array) -> Array:
    """What a stake of 1 wins on being above both, who share the first place where they are equal: 2, or it is lost."""
    shares = 1.0 / (1 + (differences == 0) + (others == 0))
    won: Array = np.where((differences >= 0) & (others >= 0), 3 * shares, 0.0) - 1
    return won


@cache
def when_alike(number: int) -> float:
    """The largest e-value that so many differences can lead to: that of equal ones."""
    return last(e_values(np.ones(number)))


@cache
def _growth() -> tuple[Array, Array]:
    """Shifts of normal differences, in their standard deviations, and what a bet on the sure side makes of them.

    The latter is the logarithm of the factor by which the player grows who fares best, on average over each bet. From
    the last shift on all differences are on the sure side.
    """
    shifts = np.geomspace(1e-3, 4, 100)
    draws = np.array([NormalDist().inv_cdf((place + 0.5) / 4000) for place in range(4000)])[:, None] + shifts
    sizes = np.broadcast_to(np.median(np.abs(draws), axis=0), draws.shape)
    players = [np.log1p(stake * scores(draws, sizes, width)).mean(axis=0) for width in WIDTHS for stake in STAKES]
    growths = np.max(players, axis=0)
    rising = slice(int(np.argmax(growths)) + 1)
    return shifts[rising], growths[rising]


def growth(shift: float) -> float:
    """What a bet makes, as a logarithm on average, of normal differences so many standard deviations from 0; or 0."""
    shifts, growths = _growth()
    return max(0.0, float(np.interp(shift, shifts, growths)))


def shift_for(growth: float) -> float:
    """The shift that is needed for a bet to make so much: the other way round, and the last for more than it can."""
    shifts, growths = _growth()
    return float(np.interp(growth, growths, shifts))


def last(values: Array) -> float:
    """The e-value at the end of a path; 1, which is no evidence, for an empty one."""
    return float(values[-1]) if len(values) else 1.0


def against_beyond(differences: Array, margin: float) -> float:
    """The e-value against "apart by `margin` or more, in either direction", differences and margin on the log scale."""
    low, high = (last(e_values(margin + sign * differences, upwards_only=True)) for sign in (1, -1))
    return min(low, high)


def e_normal(differences: Array, spreads: Array, *, upwards_only: bool = False) -> float:
    """The e-value against "they lie about 0", where by how much each scatters is known: `spreads`, standard deviations.

    With `upwards_only` the hypothesis is that they lie about 0 or below. What lies further out than `FURTHEST` of its
    standard deviations counts as if it lay there, so that no single one decides. Few are enough where a bet on signs
    needs many, but only as good as the spreads are: both shapes (n,), on the log scale.

    Source: sub-Gaussian mixtures, Howard, Ramdas, McAuliffe and Sekhon, 2021, https://doi.org/10.1214/20-AOS1991.
    """
    clipped = np.clip(differences, -FURTHEST * spreads, FURTHEST * spreads)
    pull, weight = float(np.sum(clipped / spreads**2)), float(np.sum(spreads**-2))
    shifts = SHIFTS if upwards_only else np.concatenate([SHIFTS, -SHIFTS])
    return float(np.mean(np.exp(np.minimum(shifts * pull - shifts**2 * weight / 2, LARGEST_LOG))))


def normal_against_beyond(differences: Array, spreads: Array, margin: float) -> float:
    """The same as `against_beyond`, where spreads are known as in `e_normal`."""
    return min(e_normal(margin + sign * differences, spreads, upwards_only=True) for sign in (1, -1))


def e_student(differences: Array) -> float:
    """The e-value against "their mean is 0 or below" of differences (n,) that scatter normally, however widely.

    A few that lie close together and away from 0 are enough, where a bet on signs needs a dozen. It is the likelihood
    ratio of the shape of the sample, which no unit changes: of means so many standard deviations above 0 to a mean of
    0, both averaged over all standard deviations (right Haar prior).

    Source: Perez-Ortiz, Lardy, de Heide and Grunwald, E-statistics, group invariance and anytime-valid testing, 2024,
    https://doi.org/10.1214/24-AOS2394.
    """
    number, length = len(differences), float(np.sqrt(np.sum(np.square(differences))))
    if not length > 0:
        return 1.0
    cosine = float(np.sum(differences)) / length

    def log_integral(pull: float) -> float:  # of w^(number - 1) exp(pull * w - w^2 / 2), around its peak
        peak = (pull + math.sqrt(pull**2 + 4 * (number - 1))) / 2
        w = np.linspace(max(peak - REACH, 0.0), peak + REACH, NUM_STEPS)
        logs = (number - 1) * np.log(np.maximum(w, 1e-300)) + pull * w - w**2 / 2
        return float(logs.max() + np.log(np.trapezoid(np.exp(logs - logs.max()), w)))

    alike = log_integral(0.0)
    logs = [log_integral(apart * cosine) - alike - number * apart**2 / 2 for apart in APART]
    return float(np.mean(np.exp(np.minimum(logs, LARGEST_LOG))))


def student_against_beyond(differences: Array, margin: float) -> float:
    """The same as `against_beyond`, where differences scatter normally."""
    return min(e_student(margin + sign * differences) for sign in (1, -1))


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
    """The e-value that the next hypothesis needs to be rejected in addition to `num_rejected` others."""
    return num_hypotheses / ((num_rejected + 1) * false_share)
