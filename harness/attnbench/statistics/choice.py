"""Who is the fastest of several that were sampled in the same blocks, how sure that is, and by how much.

The fastest so far is chosen by every second visit, and by how much it leads is read from the others: the winner of many
owes some of its lead to luck, and only to luck in the visits that chose it. Verdicts are those of
statistics/verdicts.py on pairs with the fastest so far; as it could have been any of them, each may be false with that
much less probability.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from attnbench.statistics.intervals import FEWEST_CLUSTERS, Block, Estimate, Pairs, paired_ratio, pairs
from attnbench.statistics.verdicts import ALONE, PROCESS_SPREAD, Judgement, judge, paired_effect, within
from attnbench.storage.records import FALSE_SHARE, Sample, Verdict
from attnbench.workloads.sweep import SMALLEST_EFFECT

FEWEST_VISITS = 2 * FEWEST_CLUSTERS
"""With fewer visits than this, all of them choose and all of them measure."""
BETWEEN_PROCESSES = 3 * PROCESS_SPREAD
"""Relative. Less is no difference where one of two has a process of its own: both processes may differ by as much."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Who leads, and of all others by how many times longer they take, with the verdict on each."""

    leader: str
    others: dict[str, Judgement]  # the fastest first; without those that share no block with the leader
    leads: dict[str, Estimate]  # the same ratios, from visits that did not choose the leader
    floor: Estimate | None  # the reference's A/A control relative to it

    def verdict(self, name: str) -> Verdict:
        """On another one relative to the leader; equivalent, too, where the interval lies within the smallest effect.

        That is less than the evidence that a verdict of `judge` needs, and enough to choose either of the two.
        """
        judged = self.others.get(name)
        if judged is None:
            return Verdict.undecided
        half = judged.effect.ratio.half_width
        is_within = half is not None and abs(judged.effect.log) + half <= math.log1p(judged.effect.smallest)
        is_alike = judged.verdict is Verdict.undecided and is_within
        return Verdict.equivalent if is_alike else judged.verdict

    @property
    def open(self) -> list[str]:
        """Those of whom more visits would show more."""
        return [name for name in self.others if self.verdict(name) is Verdict.undecided]

    @property
    def equals(self) -> list[str]:
        """Those who are not shown to be slower."""
        return [name for name in self.others if self.verdict(name) is not Verdict.slower]


def standing(  # noqa: PLR0913 - all but the first two have defaults that serve
    samples: Mapping[str, Sequence[Sample]],
    reference: str,
    *,
    control: Sequence[Sample] = (),
    discarded: Collection[Block] = (),
    smallest: float = SMALLEST_EFFECT,
    candidates: Collection[str] | None = None,
    alone: Collection[str] = (),
) -> Standing | None:
    """Who leads among those with samples; None where the reference, with whom all share blocks, has none.

    With `candidates`, only they can lead, and others are not compared. Those in `alone` have processes of their own.
    """
    if not samples.get(reference):
        return None
    to_reference = {
        name: pairs(own, samples[reference], discarded) for name, own in samples.items() if own and name != reference
    }
    logs = {name: _log(_choosing(each)) for name, each in to_reference.items() if len(each.logs)} | {reference: 0.0}
    if candidates is not None:
        logs = {name: log for name, log in logs.items() if name in candidates}
    if not logs:
        return None
    leader = min(logs, key=lambda name: (logs[name], name != reference))
    floor = paired_ratio(pairs(control, samples[reference], discarded)) if control else None
    compared = {
        name: pairs(samples[name], samples[leader], discarded, control if leader == reference else ())
        for name in sorted(logs, key=lambda name: logs[name])
        if name != leader
    }
    apart = max(smallest, BETWEEN_PROCESSES)
    effects = {
        name: paired_effect(each, floor, smallest if {name, leader}.isdisjoint(alone) else apart)
        for name, each in compared.items()
    }
    known = {name: effect for name, effect in effects.items() if effect is not None}
    judged = judge([*known.values()], within(ALONE, FALSE_SHARE / max(1, len(logs))))
    leads = {name: paired_ratio(_measuring(compared[name])) for name in known}
    return Standing(
        leader=leader,
        others=dict(zip(known, judged, strict=True)),
        leads={name: ratio for name, ratio in leads.items() if ratio is not None},
        floor=floor,
    )


def _choosing(paired: Pairs) -> Pairs:
    return paired if len(paired.medians) < FEWEST_VISITS else paired.of_visits(0)


def _measuring(paired: Pairs) -> Pairs:
    return paired if len(paired.medians) < FEWEST_VISITS else paired.of_visits(1)


def _log(paired: Pairs) -> float:
    ratio = paired_ratio(paired)
    return math.inf if ratio is None else math.log(ratio.point)
