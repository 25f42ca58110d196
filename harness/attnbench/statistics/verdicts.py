"""Verdicts: faster, slower, equivalent or undecided. One function, `judge`, decides for runs, comparisons and gates.

Faster and slower need three things: evidence against "the same code" that holds among all effects of the family, an
interval that excludes a ratio of 1, and a ratio beyond the margin: less is no reason to choose code. Equivalent
needs evidence against "apart by the margin or more", or, in a gate, that all growth that may be is allowed or would
have shown. Why: docs/adr/0011 and docs/adr/0019.

Sources: Wang and Ramdas, False discovery rate control with e-values, 2022, https://doi.org/10.1111/rssb.12489;
Benjamini and Yekutieli, 2001, https://doi.org/10.1214/aos/1013699998.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnbench.statistics import evidence
from attnbench.statistics.effects import Effect
from attnbench.statistics.intervals import FEWEST_CLUSTERS
from attnbench.storage.records import Verdict

FALSE_SHARE = 0.05
"""Of what a session calls faster or slower, the expected share that is false is at most this; of what it calls
equivalent, too."""
WHOLE_SHARE = FALSE_SHARE / 2
"""The part of it that goes to the verdict on the whole, where a session has one; the cells' is the rest."""
POWER = 0.80
NORMAL_POWER = 0.8416
"""The quantile of the normal distribution at `POWER`."""
LARGEST_EXPONENT = 700.0
"""Floating point numbers end soon after e^700."""


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


def share_of_cells(*, has_whole: bool) -> float:
    """The expected share of false verdicts among those on cells; a verdict on the whole has a share of its own."""
    return FALSE_SHARE - WHOLE_SHARE if has_whole else FALSE_SHARE


ALONE = Policy()
"""For comparisons without a verdict on the whole."""


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
