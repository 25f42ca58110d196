"""Verdicts on comparisons: faster, slower, equal or undecided, from one log ratio of times for each process.

The memory layout of a process shifts its ratios of times by about a percent for as long as the process lives. So the
process is the unit: a comparison has one log ratio from each process, and a t interval over these numbers.

A comparison is judged at its looks: when it has 4, 8, 16, 32 and 64 numbers. Each look uses the numbers up to it, and a
fifth of the error level. Watching a session is harmless, because no verdict changes between two looks.

Several comparisons share the error level by a multiple testing procedure, which ends at one level for all of them.
Every interval of a session has this level, so that it excludes a ratio of 1 exactly if the procedure rejects "the same
time". A comparison of two states of the code expects no difference, so it uses Holm's procedure, which bounds the
probability of any false alarm. A table of many implementations has many true differences. It uses the procedure of
Benjamini and Yekutieli, which bounds the expected share of false ones among the reported differences under any
dependence, and finds far more true differences.

The user chooses a margin, the smallest relative difference that matters. Slower means that the interval lies above 1
and the ratio above 1 + margin. Equal means that the interval lies inside the margin. Noise can only make a verdict
undecided.

Sources: S. Holm, 1979, https://www.jstor.org/stable/4615733; Y. Benjamini and D. Yekutieli, 2001,
https://doi.org/10.1214/aos/1013699998, theorem 1.3; equal spending over looks, O. J. Dunn, 1961,
https://doi.org/10.1080/01621459.1961.10482090; the process as the unit, Kalibera and Jones, 2013,
https://doi.org/10.1145/2464157.2464160. Why: docs/adr/0046.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnbench.storage.records import FALSE_SHARE, Verdict
from attnbench.workloads.sweep import SMALLEST_EFFECT

Array = NDArray[np.float64]
Name = TypeVar("Name")

LOOKS = (4, 8, 16, 32, 64)  # numbers of processes at which a comparison is judged
FEWEST_PROCESSES = LOOKS[0]
POWER = 0.80  # probability with which a session finds a difference that is called detectable
LAYOUT_SPREAD = 0.03
"""Relative difference that two processes with the same code rarely exceed: twice the largest measured standard
deviation. A single process cannot decide a smaller difference."""
LAYOUT_LOG = math.log1p(LAYOUT_SPREAD)  # LAYOUT_SPREAD on the log scale
KNOWN = 1e6  # degrees of freedom of an exactly known error
LARGEST_LOG = 100.0  # upper limit of half-widths on the log scale, larger than any real one


class Reason(enum.StrEnum):
    """The reason why a comparison is undecided."""

    few_processes = "too few processes"
    one_process = "one process decides nothing below 3 %, by which processes differ"
    imprecise = "interval too wide"
    threshold = "threshold below what would show"
    doubtful = "other work disturbed the machine"


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The log of a ratio of times, with its standard error."""

    log: float
    error: float | None
    """The standard error of the log; None with too few processes."""
    degrees: float
    """Degrees of freedom of the standard error."""
    num_processes: int
    """Number of processes that count: those up to the last look reached, or all before the first look."""
    num_measured: int = 0
    """Number of all processes, including those that do not count yet."""
    bias: float = 0.0
    """Extra half-width on the log scale for the error that all measurements in a single process share."""
    num_looks: int = len(LOOKS)
    """Number of looks that share the error level."""

    @property
    def ratio(self) -> float:
        """Time of the first implementation divided by that of the second: below 1 the first is faster."""
        return math.exp(self.log)

    @property
    def p_value(self) -> float:
        """Probability of a difference at least this large between identical code; 1 without a standard error."""
        if self.error is None:
            return 1.0
        return float(p_values(max(0.0, abs(self.log) - self.bias), self.error, self.degrees))

    def half_width(self, level: float) -> float | None:
        """Return the half-width on the log scale at the two-sided error `level`; None without a standard error."""
        if self.error is None:
            return None
        return min(float(half_widths(self.error, self.degrees, level)) + self.bias, LARGEST_LOG)


def effect(numbers: Sequence[float] | Array, *, bias: float = 0.0) -> Effect:
    """Compute the effect (mean with its error) of a comparison from one log ratio for each process, in time order.

    A comparison is judged at its looks, when the number of processes is in LOOKS. Numbers after the last look reached
    are ignored. `bias` is added to the interval's half-width, on the log scale.

    Raises:
        ValueError: `numbers` is empty.
    """
    if not len(numbers):
        raise ValueError("there is no number: an effect needs at least one process")
    counted = max((look for look in LOOKS if look <= len(numbers)), default=0)  # 0 before the first look
    kept = np.asarray(numbers[: counted or None], dtype=np.float64)
    error = float(np.std(kept, ddof=1)) / math.sqrt(counted) if counted else None
    return Effect(
        log=float(np.mean(kept)),
        error=error,
        degrees=counted - 1.0,
        num_processes=counted or len(kept),
        num_measured=len(numbers),
        bias=bias,
    )


def between_runs(base: Effect, candidate: Effect, drift: float) -> Effect:
    """Compute the effect of a change between two runs: the candidate's ratio to its reference, divided by the base's.

    The ratio of the same code to its reference varies between runs by `drift`, a standard deviation on the log scale.

    Source: B. L. Welch, 1947, https://doi.org/10.1093/biomet/34.1-2.28; degrees of freedom: F. E. Satterthwaite, 1946,
    https://doi.org/10.2307/3002019.
    """
    error: float | None = None
    degrees = KNOWN
    if base.error is not None and candidate.error is not None:
        parts = [(base.error**2, base.degrees), (candidate.error**2, candidate.degrees), (2 * drift**2, KNOWN)]
        total = sum(variance for variance, _ in parts)
        uncertainty = sum(variance**2 / freedom for variance, freedom in parts)
        error, degrees = math.sqrt(total), total**2 / uncertainty if uncertainty else KNOWN
    return Effect(
        log=candidate.log - base.log,
        bias=base.bias + candidate.bias,
        error=error,
        degrees=degrees,
        num_processes=min(base.num_processes, candidate.num_processes),
        num_measured=min(base.num_measured, candidate.num_measured),
        num_looks=1,
    )


def p_values(logs: ArrayLike, errors: ArrayLike, degrees: ArrayLike) -> Array:
    """Compute two-sided p-values (...) of "the same time" from log ratios, standard errors and degrees of freedom."""
    from scipy.special import stdtr  # here, because it imports too slowly for --help

    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = np.where(np.abs(logs) > 0, np.abs(logs) / np.asarray(errors, dtype=np.float64), 0.0)
    values: Array = 2 * stdtr(degrees, -statistic)
    return values


def half_widths(errors: ArrayLike, degrees: ArrayLike, levels: ArrayLike) -> Array:
    """Compute half-widths (...) of t intervals from standard errors, degrees of freedom and two-sided error levels.

    The arguments broadcast against each other.
    """
    from scipy.special import stdtrit  # here, because it imports too slowly for --help

    values: Array = np.asarray(errors) * -stdtrit(degrees, np.asarray(levels) / 2)
    return values


def holm_level(values: ArrayLike, allowed: float) -> Array:
    """Compute the final level (...) of Holm's procedure for p-values (..., m), at the family-wise error rate `allowed`.

    The procedure rejects exactly the hypotheses with a p-value of at most this level.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=-1)
    number = ordered.shape[-1]
    passed = ordered <= allowed / (number - np.arange(number))
    num_rejected = np.cumprod(passed, axis=-1).sum(axis=-1)
    level: Array = allowed / (number - np.minimum(num_rejected, number - 1))
    return level


def yekutieli_level(values: ArrayLike, allowed: float) -> Array:
    """Compute the final level (...) of Benjamini and Yekutieli's procedure for p-values (..., m).

    The procedure rejects exactly the hypotheses with a p-value of at most this level. The expected share of false ones
    among the rejections is at most `allowed`, under any dependence.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=-1)
    ranks = np.arange(1, ordered.shape[-1] + 1)
    step = allowed / (len(ranks) * np.sum(1 / ranks))
    num_rejected = np.where(ordered <= step * ranks, ranks, 0).max(axis=-1)
    level: Array = step * np.maximum(num_rejected, 1)
    return level


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """An effect (log ratio of times) with its verdict, and the interval of the ratio that the verdict follows from."""

    effect: Effect
    margin: float
    """Smallest relative difference that matters."""
    level: float
    """Two-sided error probability of the interval, which is the same for all comparisons of a session."""
    is_doubtful: bool = False
    """Whether other work may have changed the times, so that there is no verdict."""

    @property
    def ratio(self) -> float:
        """Time of the first implementation divided by that of the second: below 1 the first is faster."""
        return self.effect.ratio

    @property
    def half_width(self) -> float | None:
        """Half-width of the interval on the log scale; None with too few processes."""
        return self.effect.half_width(self.level)

    @property
    def low(self) -> float | None:
        """Lower end of the interval of the ratio; None with too few processes."""
        return None if self.half_width is None else math.exp(self.effect.log - self.half_width)

    @property
    def high(self) -> float | None:
        """Upper end of the interval of the ratio; None with too few processes."""
        return None if self.half_width is None else math.exp(self.effect.log + self.half_width)

    @property
    def verdict(self) -> Verdict:
        """The verdict that follows from the interval and the margin."""
        half, log, beyond = self.half_width, self.effect.log, math.log1p(self.margin)
        if half is None or self.is_doubtful:
            return Verdict.undecided
        if abs(log) > max(half, beyond):
            return Verdict.faster if log < 0 else Verdict.slower
        return Verdict.equivalent if abs(log) + half <= beyond else Verdict.undecided

    @property
    def reason(self) -> Reason | None:
        """The reason why the comparison is undecided; None if it is decided."""
        if self.verdict is not Verdict.undecided:
            return None
        if self.is_doubtful:
            return Reason.doubtful
        if self.effect.error is None:
            return Reason.few_processes
        return Reason.one_process if self.effect.bias else Reason.imprecise

    @property
    def needs_more(self) -> bool:
        """Whether more processes may decide the comparison: it is undecided, and before the last look."""
        return self.verdict is Verdict.undecided and self.effect.num_measured < LOOKS[-1]

    @property
    def num_needed(self) -> int | None:
        """Number of processes at the first later look that would decide the comparison at its present ratio and spread.

        It ignores `is_doubtful`. Before the first look the spread is unknown, and the result is FEWEST_PROCESSES. None
        if the comparison is decided already, or if the last look would not decide it either.
        """
        seen = self.effect
        if seen.error is None:
            return FEWEST_PROCESSES
        if replace(self, is_doubtful=False).verdict is not Verdict.undecided:
            return None
        for look in (look for look in LOOKS if look > seen.num_measured):
            error = seen.error * math.sqrt(seen.num_processes / look)
            later = replace(seen, error=error, degrees=look - 1.0, num_processes=look)
            if replace(self, effect=later, is_doubtful=False).verdict is not Verdict.undecided:
                return look
        return None

    @property
    def detectable(self) -> float | None:
        """The smallest relative slowdown detected with a probability of 80 %; None with too few processes.

        Source: Bloom, Minimum Detectable Effects, 1995, https://doi.org/10.1177/0193841X9501900504.
        """
        half, error = self.half_width, self.effect.error
        if half is None or error is None:
            return None
        luck = float(half_widths(error, self.effect.degrees, 2 * (1 - POWER)))
        return math.expm1(min(max(half, math.log1p(self.margin)) + luck, LARGEST_LOG))


def doubted(judgements: Mapping[Name, Judgement]) -> dict[Name, Judgement]:
    """Make all verdicts undecided, because other work may have changed the times."""
    return {name: replace(each, is_doubtful=True) for name, each in judgements.items()}


def judge(
    effects: Mapping[Name, Effect],
    margin: float = SMALLEST_EFFECT,
    error: float = FALSE_SHARE,
    *,
    expects_differences: bool = False,
) -> dict[Name, Judgement]:
    """Judge the comparisons of a session together, by name; `margin` is the smallest relative difference that matters.

    In a session without any true difference, the probability that any interval excludes 1 at any look is at most
    `error`. If `expects_differences` is set, as in a table of implementations, `error` bounds the expected share of
    false ones among the reported differences.
    """
    if not effects:
        return {}
    # One session never mixes numbers of looks; if it did, the largest number would still be safe.
    shared = error / max(each.num_looks for each in effects.values())
    level_of = yekutieli_level if expects_differences else holm_level
    level = float(level_of([each.p_value for each in effects.values()], shared))
    return {name: Judgement(effect=each, margin=margin, level=level) for name, each in effects.items()}
