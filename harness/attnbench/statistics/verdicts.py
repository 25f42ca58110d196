"""Effects, and the verdicts on them: faster, slower, equivalent or undecided.

An effect is how many times longer one thing takes than another, with the evidence for and against a difference. There
are three sources: pairs in blocks (`paired_effect`), two runs that share no moment of the machine
(`effect_between_runs`), and many of either taken together (`mean_over_cells`, `mean_between_runs`).

One function, `judge`, decides for runs, comparisons and gates. Faster and slower need three things: evidence against
"the same code" that holds among all effects of the family, an interval that excludes a ratio of 1, and a ratio beyond
the margin: less is no reason to choose code. Equivalent needs evidence against "apart by the margin or more", or, in a
gate, that all growth that may be is allowed or would have shown. Why: docs/adr/0011 and docs/adr/0019.

Sources: Wang and Ramdas, False discovery rate control with e-values, 2022, https://doi.org/10.1111/rssb.12489;
Benjamini and Yekutieli, 2001, https://doi.org/10.1214/aos/1013699998.
"""

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnbench.statistics import evidence
from attnbench.statistics.intervals import (
    CONFIDENCE,
    FEWEST_CLUSTERS,
    KNOWN,
    MEDIAN_FACTOR,
    NORMAL_MAD,
    Array,
    Estimate,
    Pairs,
    grouped,
    mean_of,
    paired_ratio,
    t_quantile,
    total_error,
)
from attnbench.storage.records import FALSE_SHARE, LARGEST_EQUIVALENCE, Arm, Comparison, Verdict
from attnbench.workloads.sweep import SMALLEST_EFFECT
from attnbench.workloads.workload import Workload

WHOLE_SHARE = FALSE_SHARE / 2
"""The part of it that goes to the verdict on the whole, where a session has one; the cells' is the rest."""
POWER = 0.80
NORMAL_POWER = 0.8416
"""The quantile of the normal distribution at `POWER`."""
LARGEST_EXPONENT = 700.0
"""Floating point numbers end soon after e^700."""
PROCESS_SPREAD = 0.025
"""By how much two processes that run the same code differ, at most: a standard deviation on the log scale. Of what
was measured the largest is 0.019."""
FEWEST_EPOCHS = 3
"""With fewer processes than this nothing is said of a session as a whole."""
LARGEST_LOG = 100.0
"""Noise floors are cut off here: a number larger than any real one, and still finite."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A ratio of times, how far apart identical code would seem, and the evidence for and against a difference."""

    ratio: Estimate
    margin: float
    """Relative. No smaller difference is called one: the smallest effect that matters, or the noise floor above it."""
    smallest: float = SMALLEST_EFFECT
    """Relative. What the margin would be without any noise."""
    e_same: float
    """The e-value against "the same code". Between two runs 1 / p-value, which the correction accounts for."""
    e_apart: float = 0.0
    """The e-value against "apart by the margin or more"; infinity where the interval alone decides."""
    spread: float = 0.0
    """A robust standard deviation of the pairs, on the log scale."""
    num_processes: int = 0
    """In how many it was measured, of two runs in the one with fewer; 0 where a policy does not ask."""
    num_cells: int = 1
    """Of how many cells it is the mean."""
    allowed: float | None = None
    """Relative. By how much a rule allows the time to grow; None: no rule does."""
    lowest: float = 0.0
    """The lowest `allowed` that can be judged here; 0: any."""

    @property
    def log(self) -> float:
        """The logarithm of the ratio."""
        return math.log(self.ratio.point)

    @property
    def is_floor(self) -> bool:
        """Whether the margin is a noise floor, which falls with more visits and differs between repetitions."""
        return self.margin > self.smallest

    @property
    def sameness(self) -> float:
        """By what share two times may differ that are called equivalent."""
        return min(self.margin, LARGEST_EQUIVALENCE)

    @property
    def is_beyond(self) -> bool:
        """Whether the ratio is further from 1 than the margin, and than the half width of its interval."""
        half = self.ratio.half_width
        return half is not None and abs(self.log) > max(half, math.log1p(self.margin))

    @property
    def is_within(self) -> bool:
        """Whether the interval lies inside what may be called equivalent."""
        half = self.ratio.half_width
        return half is not None and abs(self.log) + half <= math.log1p(self.sameness)

    @property
    def seems_slower(self) -> bool:
        """Whether the interval lies above 1."""
        return self.ratio.low is not None and self.ratio.low > 1


def margin(floor: Estimate | None, smallest: float = SMALLEST_EFFECT) -> float:
    """The relative difference below which nothing is called faster or slower: `smallest` or the cell's A/A floor."""
    largest = None if floor is None else floor.largest_log
    return max(smallest, 0.0 if largest is None else math.expm1(min(largest, LARGEST_LOG)))


def paired_effect(
    pairs: Pairs, floor: Estimate | None, smallest: float = SMALLEST_EFFECT, *, within: Pairs | None = None
) -> Effect | None:
    """The effect that pairs in blocks show, where the baseline to itself is `floor`; None without any pair.

    Where each pair stands for two processes, `within` are the blocks that they were made of. As is known how far two
    processes lie apart, few are enough for a large difference, or for none.
    """
    ratio, limit = paired_ratio(pairs), margin(floor, smallest)
    if ratio is None:
        return None
    medians = np.array(list(pairs.medians.values()))
    sameness = math.log1p(min(limit, LARGEST_EQUIVALENCE))
    e_same = evidence.last(evidence.e_values(pairs.logs, pairs.controls))
    beyond = [evidence.against_beyond(medians, sameness), evidence.student_against_beyond(medians, sameness)]
    if within is not None:
        spreads = process_spreads(medians, within)
        e_same = (e_same + evidence.e_normal(medians, spreads)) / 2
        beyond.append(evidence.normal_against_beyond(medians, spreads, sameness))
    return Effect(
        ratio=ratio,
        margin=limit,
        smallest=smallest,
        e_same=e_same,
        e_apart=sum(beyond) / len(beyond),  # the mean of e-values is one
        spread=robust_spread(pairs.halfway),
    )


def process_spreads(logs: Array, within: Pairs) -> Array:
    """By how much the log ratio of each process scatters (n,): by `PROCESS_SPREAD`, or as seen where that is more.

    What its blocks `within` leave open comes on top.
    """
    between = max(PROCESS_SPREAD, float(np.std(logs, ddof=1)) if len(logs) >= FEWEST_EPOCHS else 0.0)
    blocks = [(epoch, log) for (epoch, _), log in zip(within.visits, within.logs.tolist(), strict=True)]
    errors = grouped(blocks, lambda own: MEDIAN_FACTOR * robust_spread(np.array(own)) / math.sqrt(len(own)))
    spreads: Array = np.hypot(between, np.array(list(errors.values())))
    return spreads


def robust_spread(logs: Array) -> float:
    """The standard deviation of normal noise with the same median absolute deviation."""
    return NORMAL_MAD * float(np.median(np.abs(logs - np.median(logs))))


def mean_over_cells(cells: Sequence[Pairs]) -> Estimate | None:
    """The geometric mean of the cells' ratios; its interval counts processes, which all cells of a moment share.

    None without cells, or with fewer than three processes. Where cells seem to agree better than visits of their own
    do, the latter count.

    Source: a mean of clustered values, Liang and Zeger, 1986, https://doi.org/10.1093/biomet/73.1.13.
    """
    ratios = [ratio for pairs in cells if (ratio := paired_ratio(pairs)) is not None]
    epochs = sorted({epoch for pairs in cells for epoch, _ in pairs.visits})
    if len(epochs) < FEWEST_EPOCHS or any(ratio.standard_error is None for ratio in ratios):
        return None
    pulls = dict.fromkeys(epochs, 0.0)  # of each process on the mean
    for pairs, ratio in zip(cells, ratios, strict=True):
        visits = pairs.centres
        for (epoch, _), log in visits.items():
            pulls[epoch] += (log - math.log(ratio.point)) / (len(visits) * len(cells))
    number = len(epochs)
    error = math.sqrt(number / (number - 1) * sum(pull**2 for pull in pulls.values()))
    alone = mean_of(ratios)
    if error <= (alone.standard_error or 0.0):
        return alone
    return replace(alone, standard_error=error, num_clusters=number, degrees=number - 1.0)


def midmeans(cells: Sequence[Pairs]) -> Array:
    """For each process, the mean of the middle half of all blocks of all cells (n,); outliers do not count.

    Its sign turns where the sides change places, so that a bet on it is as fair as on a single block, and it scatters
    less than a median. Of up to four values the middle half is the median.
    """
    logs = sorted(
        (epoch, log) for pairs in cells for (epoch, _), log in zip(pairs.visits, pairs.logs.tolist(), strict=True)
    )

    def midmean(values: list[float]) -> float:
        cut = (len(values) + 1) // 4
        return float(np.mean(values[cut : len(values) - cut]))

    return np.array(list(grouped(logs, midmean).values()))


@dataclass(frozen=True, kw_only=True)
class Relative:
    """A cell's time in one run, relative to that run's reference."""

    ratio: Estimate
    floor: Estimate | None  # the reference's A/A control relative to it, in the same blocks
    num_epochs: int


def effect_between_runs(base: Relative, candidate: Relative, between_runs: float, least_floor: float = 0.0) -> Effect:
    """How many times longer a cell takes than in another run, each relative to the reference of its own run.

    Two runs share no block, so that no pair can be made between them, and the state of a machine differs by tens of
    percent from run to run. The ratio to the reference differs less: by `between_runs`, a standard deviation. The noise
    floor is at least `least_floor`, by which two machines may differ. Why: docs/adr/0019.

    Source: B. L. Welch, 1947, https://doi.org/10.1093/biomet/34.1-2.28 (two means, unequal errors).
    """
    both = base.ratio, candidate.ratio
    parts = [(each.standard_error**2, each.freedom) for each in both if each.standard_error is not None]
    error, degrees = total_error([*parts, (2 * between_runs**2, KNOWN)])
    ratio = Estimate(
        point=candidate.ratio.point / base.ratio.point,
        standard_error=error if len(parts) == len(both) else None,
        num_clusters=sum(each.num_clusters for each in both),
        num_samples=sum(each.num_samples for each in both),
        degrees=degrees,
    )
    floors = [each.floor.largest_log for each in (base, candidate) if each.floor is not None]
    logs = [log for log in floors if log is not None]
    if len(logs) == len(both):  # how far from 1 a ratio of ratios of identical code may lie, by the A/A of both runs
        drift = t_quantile((1 + CONFIDENCE) / 2, KNOWN) * math.sqrt(2) * between_runs
        least_floor = max(math.expm1(math.hypot(drift, *logs)), least_floor)
    return _between_runs(ratio, least_floor, min(base.num_epochs, candidate.num_epochs))


def _between_runs(ratio: Estimate, floor: float, num_processes: int = 0) -> Effect:
    p = p_value(ratio)
    e_same = 1 / p if p else math.inf
    return Effect(ratio=ratio, margin=floor, smallest=0.0, e_same=e_same, num_processes=num_processes)


def p_value(ratio: Estimate) -> float:
    """How often identical code would seem as far apart or further; 1 where there is no standard error."""
    if ratio.standard_error is None:
        return 1.0
    log = abs(math.log(ratio.point))
    if ratio.standard_error == 0.0:
        return float(log == 0.0)
    from scipy.special import stdtr  # here, because it takes longer to import than --help may take

    return 2 * float(stdtr(ratio.freedom, -log / ratio.standard_error))


def mean_between_runs(workloads: Iterable[Sequence[Estimate]], between_runs: float, least_floor: float = 0.0) -> Effect:
    """The geometric mean of ratios between two runs, by workload, to whose errors `between_runs` is still to be added.

    The cells of a workload share a reference: their errors are taken as one and the same.
    """
    means = [
        Estimate(
            point=math.exp(sum(math.log(ratio.point) for ratio in ratios) / len(ratios)),
            standard_error=sum(ratio.standard_error or 0.0 for ratio in ratios) / len(ratios),
            num_clusters=min(ratio.num_clusters for ratio in ratios),
            num_samples=sum(ratio.num_samples for ratio in ratios),
            degrees=min(ratio.freedom for ratio in ratios),
        )
        for ratios in workloads
    ]
    mean = mean_of(means)
    error, degrees = total_error([((mean.standard_error or 0.0) ** 2, mean.freedom), (2 * between_runs**2, KNOWN)])
    ratio = replace(mean, standard_error=error, num_clusters=len(means), degrees=degrees)
    return _between_runs(ratio, least_floor)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a verdict requires, apart from the effect itself."""

    false_share: float = FALSE_SHARE
    """The expected share of false verdicts among those faster or slower, and among those equivalent."""
    is_paired: bool = True
    """Whether effects are of pairs in blocks, which show by how much two differ; separate runs drift."""
    fewest_processes: int = 0
    """With fewer there is no verdict, except that an unlimited growth is allowed."""
    detectable: float | None = None
    """Relative. Where a slowdown of this size would have shown and none did, no slower is as good as equivalent."""


class Reason(enum.StrEnum):
    """Why there is no verdict."""

    few_processes = "too few processes"
    noise_floor = "threshold below the noise floor"
    smallest_effect = "threshold below the smallest effect"
    imprecise = "interval too wide or too little evidence"
    machine_state = "the machine was in another state"


@dataclass(frozen=True, kw_only=True)
class Needed:
    """The evidence that the next verdicts of a family need, in addition to those that it has."""

    differ: float  # to be faster or slower
    agree: float  # to be equivalent


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """An effect with its verdict."""

    effect: Effect
    verdict: Verdict
    reason: Reason | None  # where the verdict is undecided
    needed: Needed
    policy: Policy

    @property
    def detectable(self) -> float | None:
        """The relative slowdown that would be found in 80 % of repetitions; None: none would, or it is not known."""
        return detectable(self.effect, self.needed.differ, is_paired=self.policy.is_paired)

    @property
    def would_show(self) -> bool:
        """Whether a slowdown of the size that the policy asks for would have shown, and pairs do not point to one."""
        if self.policy.detectable is None or (self.policy.is_paired and self.effect.seems_slower):
            return False
        return self.detectable is not None and self.detectable <= self.policy.detectable

    @property
    def is_settled(self) -> bool:
        """Whether more visits are useless: within a noise floor two are equivalent only until it has fallen."""
        return self.verdict in {Verdict.faster, Verdict.slower} or (
            self.verdict is Verdict.equivalent and not self.effect.is_floor
        )

    def comparison(self, workload: Workload, arm: Arm, baseline: str, more_s: float | None = None) -> Comparison:
        """The same of `arm` on a workload, as those who ask for comparisons get it."""
        effect = self.effect
        return Comparison(
            workload=workload,
            implementation=arm.implementation,
            side=arm.side,
            baseline=baseline,
            ratio=effect.ratio.point,
            low=effect.ratio.low,
            high=effect.ratio.high,
            minimum_detectable_effect=self.detectable,
            verdict=self.verdict,
            sameness=effect.sameness,
            e_same=effect.e_same,
            e_apart=effect.e_apart,
            more_s=more_s,
        )


ALONE = Policy()
"""For comparisons without a verdict on the whole."""
CELLS = Policy(false_share=FALSE_SHARE - WHOLE_SHARE)
"""For those with one."""
WHOLE = Policy(false_share=WHOLE_SHARE)
"""For that verdict."""


def within(policy: Policy, false_share: float) -> Policy:
    """The policy for a session of whose verdicts that share may be false, in place of `FALSE_SHARE`."""
    return replace(policy, false_share=policy.false_share * false_share / FALSE_SHARE)


def judge(effects: Sequence[Effect], policy: Policy = ALONE) -> list[Judgement]:
    """The verdicts on effects that are judged together.

    E-values count only where margin and interval allow the verdict, and are 0 else, which leaves them e-values. So
    whatever is rejected is reported; a part of what is rejected, chosen afterwards, could be false more often. For
    p-values, margin and interval come afterwards: two runs differ by more than the noise inside each.
    """
    share = policy.false_share
    if effects and not policy.is_paired:  # Benjamini and Yekutieli: e-BH on 1 / p, with a smaller share
        share /= sum(1 / rank for rank in range(1, len(effects) + 1))
    beyond = np.array([each.is_beyond for each in effects], dtype=bool)
    counts = beyond | (not policy.is_paired)
    differ = evidence.discoveries(np.where(counts, [each.e_same for each in effects], 0.0), share)
    agree = evidence.discoveries(np.array([each.e_apart if each.is_within else 0.0 for each in effects]), share)
    needed = _needed(len(effects), int(differ.sum()), int(agree.sum()), share)
    return [
        _judgement(each, policy, needed, differs=bool(differs), agrees=bool(agrees))
        for each, differs, agrees in zip(effects, differ & beyond, agree, strict=True)
    ]


def _judgement(effect: Effect, policy: Policy, needed: Needed, *, differs: bool, agrees: bool) -> Judgement:
    """The verdict on one effect, of which the evidence of the family says whether it differs or agrees."""
    judged = Judgement(effect=effect, verdict=Verdict.undecided, reason=Reason.imprecise, needed=needed, policy=policy)
    allowed, high = effect.allowed, effect.ratio.high
    is_allowed = allowed is not None and high is not None and high <= 1 + allowed
    differs = differs and effect.num_processes >= policy.fewest_processes
    verdict, reason = Verdict.undecided, None
    if differs and effect.log < 0:
        verdict = Verdict.faster
    elif differs and effect.log > math.log1p(max(effect.margin, allowed or 0.0)):
        verdict = Verdict.slower
    elif allowed == math.inf:
        verdict = Verdict.equivalent
    elif effect.num_processes < policy.fewest_processes:
        reason = Reason.few_processes
    elif allowed is not None and allowed < effect.lowest:
        reason = Reason.noise_floor
    elif allowed is not None and allowed < effect.smallest and not is_allowed:
        reason = Reason.smallest_effect
    elif agrees or is_allowed or (differs and policy.is_paired) or judged.would_show:
        verdict = Verdict.equivalent
    else:
        reason = Reason.imprecise
    return replace(judged, verdict=verdict, reason=reason)


def needed(verdicts: Sequence[Verdict], false_share: float = FALSE_SHARE) -> Needed:
    """What the next verdict among these takes: the fewer of its kind there are, the more."""
    num_agreed, num_open = verdicts.count(Verdict.equivalent), verdicts.count(Verdict.undecided)
    return _needed(len(verdicts), len(verdicts) - num_agreed - num_open, num_agreed, false_share)


def _needed(number: int, num_differ: int, num_agree: int, share: float) -> Needed:
    number = max(1, number)
    differ, agree = (evidence.needed(number, min(num, number - 1), share) for num in (num_differ, num_agree))
    return Needed(differ=differ, agree=agree)


def visits_to_go(effect: Effect, needed: Needed) -> float:
    """About how many visits more would decide it, if what was seen so far is the truth; infinity where none would."""
    ratio, shift = effect.ratio, abs(effect.log)
    number, half, error = ratio.num_clusters, ratio.half_width, ratio.standard_error
    if half is None or error is None:
        return float(max(1, FEWEST_CLUSTERS - number))
    beyond, within = math.log1p(effect.margin), math.log1p(effect.sameness)
    ways = []
    if shift > beyond:
        bets = _bets_to_go(needed.differ, effect.e_same, shift, effect.spread) * number / ratio.num_samples
        ways.append(max(bets, number * ((half / shift) ** 2 - 1)))
    elif shift > within:  # the noise floor hides it: more visits lower the floor
        ways.append(number * ((beyond / shift) ** 2 - 1))
    if shift < within:
        room = within - shift
        bets = _bets_to_go(needed.agree, effect.e_apart, room, error * math.sqrt(number))
        ways.append(max(bets, number * ((half / room) ** 2 - 1)))
    return max(1.0, min(ways, default=math.inf))


def _bets_to_go(needed: float, value: float, shift: float, spread: float) -> float:
    """How many bets on differences of this mean and spread bring an e-value from `value` to `needed`."""
    if value >= needed:
        return 0.0
    growth = evidence.growth(shift / max(spread, 1e-9))
    return math.log(needed / value) / growth if growth else math.inf


def detectable(effect: Effect, needed: float = 1 / FALSE_SHARE, *, is_paired: bool = True) -> float | None:
    """The relative slowdown that measurements as many and as noisy as these would find in 80 % of repetitions.

    Found means: slower, with `needed` as the e-value or 1 / p-value to reach. None without an interval, where so few
    pairs could not reach it whatever the slowdown, and where two runs may differ by any growth.

    Source of the shape: Bloom, Minimum Detectable Effects, 1995, https://doi.org/10.1177/0193841X9501900504; in
    addition to the interval, the bets on normal differences have to make enough.
    """
    ratio, error, half = effect.ratio, effect.ratio.standard_error, effect.ratio.half_width
    if error is None or half is None:
        return None
    luck = ratio.quantile(POWER) * error
    if not is_paired:
        limit = max(effect.margin, effect.allowed or 0.0)
        least = max(ratio.quantile(1 - 1 / needed / 2) * error, math.log1p(limit))
        return None if math.isinf(limit) else math.expm1(min(least + luck, LARGEST_EXPONENT))
    if evidence.when_alike(ratio.num_samples) < needed:
        return None
    beyond = math.log1p(effect.margin)
    by_interval = max(half + math.hypot(half * ratio.unsteadiness(POWER), luck), beyond + luck)
    if effect.is_floor:  # other repetitions will see another
        by_interval = max(by_interval, beyond + math.hypot(beyond * ratio.unsteadiness(POWER), luck))
    growth = math.log(needed * evidence.NUM_PLAYERS) / ratio.num_samples  # of a single player, for each pair
    by_bets = evidence.shift_for(growth) * effect.spread
    return math.expm1(max(by_interval, by_bets + NORMAL_POWER * error))
