"""Faster, slower, equivalent or undecided: what the pairs of one comparison, or of a whole session, allow to be said.

Faster and slower need three things: an e-value against "the same code" that holds among all comparisons of the session,
an interval that excludes a ratio of 1, and a ratio beyond the margin, for nobody should choose code by less. Equivalent
needs an e-value against "apart by the margin or more". Why: docs/adr/0011. Knows nothing of what was measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnbench.statistics import evidence
from attnbench.statistics.intervals import FEWEST_CLUSTERS, NORMAL_MAD, Estimate, Pairs, paired_ratio
from attnbench.storage.records import LARGEST_EQUIVALENCE, SMALLEST_EFFECT, Verdict

FALSE_SHARE = 0.05
"""Of what a session calls faster or slower, the expected share that is false is at most this; of what it calls
equivalent, too."""
WHOLE_SHARE = FALSE_SHARE / 2
"""The part of it that goes to the verdict on the whole, where a session has one; the cells' is the rest."""
FEWEST_EPOCHS = 3
"""With fewer processes than this nothing is said of a session as a whole."""
LARGEST_LOG = 100.0
"""Noise beyond all numbers, which still is one."""
POWER = 0.80
NORMAL_POWER = 0.8416
"""The quantile of the normal distribution at `POWER`."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the pairs of one comparison say; whether it is enough depends on the whole session."""

    ratio: Estimate
    margin: float  # relative: nothing below it matters
    e_same: float  # against "the same code"
    e_apart: float  # against "apart by the margin or more"
    spread: float  # a standard deviation of the pairs, robust, on the log scale
    smallest: float = SMALLEST_EFFECT  # relative, too: what the margin would be without any noise

    @property
    def log(self) -> float:
        """The logarithm of the ratio."""
        return math.log(self.ratio.point)

    @property
    def is_floor(self) -> bool:
        """Whether the margin is a noise floor, which falls with more visits, and which others will find elsewhere."""
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
        return half is not None and abs(self.log) + half <= alike(self.margin)


def margin(floor: Estimate | None, smallest: float = SMALLEST_EFFECT) -> float:
    """The relative difference below which nothing is called faster or slower: `smallest` or the cell's A/A floor."""
    largest = None if floor is None else floor.largest_log
    return max(smallest, 0.0 if largest is None else math.expm1(min(largest, LARGEST_LOG)))


def alike(margin: float) -> float:
    """How far apart, on the log scale, two times may be that are called equivalent."""
    return min(math.log1p(margin), math.log1p(LARGEST_EQUIVALENCE))


def share_of_cells(*, has_whole: bool) -> float:
    """The expected share of false verdicts among those on cells, beside which there may be one on the whole."""
    return FALSE_SHARE - WHOLE_SHARE if has_whole else FALSE_SHARE


def judge(pairs: Pairs, floor: Estimate | None, smallest: float = SMALLEST_EFFECT) -> Judgement | None:
    """What these pairs say, where the baseline to itself is `floor`; None without any."""
    ratio, limit = paired_ratio(pairs), margin(floor, smallest)
    if ratio is None:
        return None
    medians = np.array(list(pairs.medians.values()))
    halfway = pairs.halfway
    return Judgement(
        ratio=ratio,
        margin=limit,
        smallest=smallest,
        e_same=evidence.last(evidence.e_values(pairs.logs, pairs.controls)),
        e_apart=evidence.against_beyond(medians, alike(limit)),
        spread=NORMAL_MAD * float(np.median(np.abs(halfway - np.median(halfway)))),
    )


def decide(judgements: Sequence[Judgement], false_share: float = FALSE_SHARE) -> list[Verdict]:
    """The verdicts of a session's comparisons, together: e-BH over all of them, for each kind of verdict.

    An e-value counts only where margin and interval allow the verdict, and is 0 else, which leaves it an e-value. So
    whatever is rejected is told; a part of what is rejected, chosen afterwards, could be false more often.
    """
    differ = evidence.discoveries(np.array([each.e_same * each.is_beyond for each in judgements]), false_share)
    agree = evidence.discoveries(np.array([each.e_apart * each.is_within for each in judgements]), false_share)
    return [
        _verdict(each, differs=bool(differs), is_alike=bool(is_alike))
        for each, differs, is_alike in zip(judgements, differ, agree, strict=True)
    ]


def _verdict(judgement: Judgement, *, differs: bool, is_alike: bool) -> Verdict:
    if is_alike:
        return Verdict.equivalent
    if differs:
        return Verdict.slower if judgement.log > 0 else Verdict.faster
    return Verdict.undecided


def is_settled(judgement: Judgement, verdict: Verdict) -> bool:
    """Whether more visits are for nothing: within a noise floor two are equivalent only until it has fallen."""
    return verdict in {Verdict.faster, Verdict.slower} or (verdict is Verdict.equivalent and not judgement.is_floor)


@dataclass(frozen=True, kw_only=True)
class Needed:
    """The e-values that the next verdicts of a session need beside those that it has."""

    differ: float  # to be faster or slower
    agree: float  # to be equivalent


def needed(verdicts: Sequence[Verdict], false_share: float = FALSE_SHARE) -> Needed:
    """What the next verdict among these takes: the fewer of its kind there are, the more."""
    number = max(1, len(verdicts))
    agreed, open_ones = verdicts.count(Verdict.equivalent), verdicts.count(Verdict.undecided)
    differed = len(verdicts) - agreed - open_ones
    differ, agree = (evidence.needed(number, min(found, number - 1), false_share) for found in (differed, agreed))
    return Needed(differ=differ, agree=agree)


def visits_to_go(judgement: Judgement, needed: Needed) -> float:
    """About how many visits more would decide it, if what was seen so far is the truth; infinity where none would."""
    ratio, shift = judgement.ratio, abs(judgement.log)
    number, half, error = ratio.num_clusters, ratio.half_width, ratio.standard_error
    if half is None or error is None:
        return float(max(1, FEWEST_CLUSTERS - number))
    beyond, within = math.log1p(judgement.margin), alike(judgement.margin)
    ways = []
    if shift > beyond:
        bets = _bets_to_go(needed.differ, judgement.e_same, shift, judgement.spread) * number / ratio.num_samples
        ways.append(max(bets, number * ((half / shift) ** 2 - 1)))
    elif shift > within:  # the noise floor hides it: more visits lower the floor
        ways.append(number * ((beyond / shift) ** 2 - 1))
    if shift < within:
        room = within - shift
        bets = _bets_to_go(needed.agree, judgement.e_apart, room, error * math.sqrt(number))
        ways.append(max(bets, number * ((half / room) ** 2 - 1)))
    return max(1.0, min(ways, default=math.inf))


def _bets_to_go(needed: float, value: float, shift: float, spread: float) -> float:
    """How many bets on differences of this mean and spread bring an e-value from `value` to `needed`."""
    if value >= needed:
        return 0.0
    growth = evidence.growth(shift / max(spread, 1e-9))
    return math.log(needed / value) / growth if growth else math.inf


def detectable(judgement: Judgement, needed: float = 1 / FALSE_SHARE) -> float | None:
    """The relative slowdown that pairs as many and as noisy as these would find in 80 % of repetitions.

    Found means: slower, with `needed` as the e-value to reach. None without an interval, or where so few pairs could
    not reach it whatever the slowdown.

    Source of the shape: Bloom, Minimum Detectable Effects, 1995, https://doi.org/10.1177/0193841X9501900504; beside the
    interval, the bets on normal differences have to make enough.
    """
    ratio = judgement.ratio
    if ratio.standard_error is None or ratio.half_width is None or evidence.when_alike(ratio.num_samples) < needed:
        return None
    half, beyond = ratio.half_width, math.log1p(judgement.margin)
    luck = ratio.quantile(POWER) * ratio.standard_error
    by_interval = max(half + math.hypot(half * ratio.unsteadiness(POWER), luck), beyond + luck)
    if judgement.is_floor:  # other repetitions will see another
        by_interval = max(by_interval, beyond + math.hypot(beyond * ratio.unsteadiness(POWER), luck))
    growth = math.log(needed * evidence.NUM_PLAYERS) / ratio.num_samples  # of a single player, for each pair
    by_bets = evidence.shift_for(growth) * judgement.spread
    return math.expm1(max(by_interval, by_bets + NORMAL_POWER * ratio.standard_error))
