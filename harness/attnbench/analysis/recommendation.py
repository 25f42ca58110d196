"""One recommendation for each workload of a run: which implementation, by how much, how sure, and what was excluded.

A run that looks for the fastest has stages of its own (processes/choosing.py); their answer follows from its journal
alone, and is read here. Where two are equal within the margin, PyTorch's own choice, the baseline, is preferred, then
the one that needs less memory.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from attnbench.analysis.comparisons import doubts, samples_of
from attnbench.analysis.results import Results
from attnbench.statistics.choice import Standing, standing
from attnbench.statistics.crossover import Place, Point, located, point
from attnbench.statistics.effects import numbers
from attnbench.statistics.intervals import by_process, median_estimate
from attnbench.statistics.verdict import doubted
from attnbench.storage.events import Ladder
from attnbench.storage.records import LATENCY, REPEATABLE, Arm, Record, Status, Verdict
from attnbench.units import show
from attnbench.workloads.workload import Workload

PEAK_MEMORY = "peak_memory"
EXCLUDED = {
    Status.disagrees: "wrong",
    Status.approximate: "approximate",
    Status.unsupported: "not supported",
    Status.fallback: "not what it says",
    Status.timeout: "timed out",
    Status.out_of_memory: "needs too much memory",
}
"""Why an implementation is no candidate, in a word or two; other statuses are their own word."""
OVER = "needs more memory than is allowed"
NOT_TIMED = "not timed before the run ended"
SLOWER, TOO_LONG = "not tried, predicted to be slower", "not tried, predicted to take too long"
"""Likewise where nothing timed out, but a prediction left it out: next to others, or over the limit of a call."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an implementation must keep to be recommended."""

    memory_bytes: int = 0  # the most that a call may need beyond its inputs; 0: any
    is_deterministic: bool = False  # the same input gives the same answer
    without: Mapping[str, "Exclusion"] = field(default_factory=dict)  # excluded for a reason that was found elsewhere


@dataclass(frozen=True)
class Exclusion:
    """Why an implementation is no candidate: in a word or two that others may share, and what is its own."""

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        """Both, as JSON has them."""
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


@dataclass(frozen=True, kw_only=True)
class Change:
    """Where the answer changes along one axis: `before` is faster below `place`, `after` from there on."""

    axis: str
    place: Place
    before: str
    after: str

    def facts(self) -> dict[str, Any]:
        """It, as JSON has it."""
        place = {"at": self.place.at, "low": self.place.low, "high": self.place.high}
        return {"axis": self.axis, **place, "before": self.before, "after": self.after}


@dataclass(frozen=True, kw_only=True)
class Lead:
    """The factor by which another implementation is slower than the choice, with its interval if it has one."""

    ratio: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The answer for one workload."""

    workload: Workload
    choice: str  # "" where there is nothing to recommend
    standing: Standing | None
    reference: str  # PyTorch's own choice
    seconds: dict[str, float]  # of a call, by implementation: medians
    peaks: dict[str, float]  # peak bytes of a call beyond its inputs, where they were measured
    changes: tuple[Change, ...]
    looked: tuple[int, int] | None  # the shortest and the longest length at which a change was looked for
    excluded: dict[str, Exclusion]  # by implementation

    @property
    def equals(self) -> list[str]:
        """Those that are equal to the choice within the margin, or of whom it is not known."""
        return [name for name in self.seconds if name != self.choice and self.verdict(name) is not Verdict.slower]

    @property
    def runner_up(self) -> str:
        """The next one; "" where there is none."""
        others = sorted((name for name in self.seconds if name != self.choice), key=lambda name: self.seconds[name])
        return others[0] if others else ""

    @property
    def is_clear(self) -> bool:
        """Whether every other one is slower than the choice."""
        return bool(self.choice) and not self.equals

    def lead(self, other: str) -> Lead | None:
        """The factor by which another one is slower than the choice; None: not known.

        The interval is the one that decided, where the choice is the leader.
        """
        stands = self.standing
        if stands is None or other == self.choice:
            return None
        if self.choice == stands.leader:
            judged = stands.others.get(other)
            return None if judged is None else Lead(ratio=judged.ratio, low=judged.low, high=judged.high)
        to_choice, to_other = stands.others.get(self.choice), stands.others.get(other)
        if to_choice is None or (to_other is None and other != stands.leader):
            return None
        return Lead(ratio=(1.0 if to_other is None else to_other.ratio) / to_choice.ratio)

    def verdict(self, name: str) -> Verdict:
        """On another one relative to the leader; undecided where it is not known."""
        return Verdict.undecided if self.standing is None else self.standing.verdict(name)

    def facts(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        leads = {name: self.lead(name) for name in self.seconds if name != self.choice}
        return {
            "workload": self.workload.id,
            "axes": self.workload.axes(),
            "choice": self.choice or None,
            "is_clear": self.is_clear,
            "equals": self.equals,
            "runner_up": self.runner_up or None,
            "reference": self.reference,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peaks,
            "slower_by": {
                name: {"ratio": lead.ratio, "low": lead.low, "high": lead.high, "verdict": str(self.verdict(name))}
                for name, lead in leads.items()
                if lead is not None
            },
            "changes": [each.facts() for each in self.changes],
            "looked_for_changes": self.looked,
            "excluded": {name: str(why) for name, why in self.excluded.items()},
        }


def recommend(results: Results, limits: Limits | None = None) -> list[Recommendation]:
    """The recommendation for each workload that was asked for, in the order of the plan."""
    limits = Limits() if limits is None else limits
    return [_recommended(results, workload, limits) for workload in results.plan.asked]


def _recommended(results: Results, workload: Workload, limits: Limits) -> Recommendation:
    plan = results.plan
    own = {record.implementation: record for record in results.records if record.workload == workload}
    excluded = {name: why for name, record in own.items() if (why := _exclusion(record, limits))}
    fit = {name: record for name, record in own.items() if name not in excluded}
    stands = _standing(results, workload.id, set(fit))
    seconds = {name: median_estimate(record.samples(LATENCY)).point for name, record in fit.items()}
    order = sorted(seconds, key=lambda name: _from_leader(stands, name, seconds))
    peaks = {name: record.samples(PEAK_MEMORY)[0].value for name, record in own.items() if record.samples(PEAK_MEMORY)}
    choice = _preferred(stands, plan.baseline if plan.baseline in fit else "", peaks)
    ladder = next((each for each in plan.ladders if each.base == workload.id), None)
    if doubts(results):  # nothing is known of any length
        ladder = None
    changes, looked = (changes_along(results, ladder), _looked(results, ladder)) if ladder else ((), None)
    return Recommendation(
        workload=workload,
        choice=choice or (order[0] if order else ""),
        standing=stands,
        reference=plan.baseline,
        seconds={name: seconds[name] for name in order},
        peaks={name: peaks[name] for name in [*order, *peaks] if name in peaks},
        changes=changes,
        looked=looked,
        excluded=excluded,
    )


def _exclusion(record: Record, limits: Limits) -> Exclusion | None:
    """Why an implementation is no candidate; None where it is one."""
    if record.status is not Status.ok:
        head = EXCLUDED.get(record.status, str(record.status).replace("_", " "))
        if record.status is Status.timeout and record.is_predicted:
            head = SLOWER if record.is_outpaced else TOO_LONG
        return Exclusion(head, record.message)
    if record.implementation in limits.without:
        return limits.without[record.implementation]
    peaks = record.samples(PEAK_MEMORY)
    if limits.memory_bytes and peaks and peaks[0].value > limits.memory_bytes:
        needed, allowed = show(peaks[0].value, "bytes"), show(limits.memory_bytes, "bytes")
        return Exclusion(OVER, f"{needed}, more than the {allowed} allowed")
    if limits.is_deterministic and record.agreement is not None:
        broken = [rule.found for rule in record.agreement.notes if rule.rule == REPEATABLE]
        if broken:
            return Exclusion("not deterministic", broken[0])
    return None if record.samples(LATENCY) else Exclusion(NOT_TIMED)


def _standing(results: Results, workload: str, candidates: Collection[str] | None = None) -> Standing | None:
    taken, discarded = samples_of(results).get(workload, {}), results.discarded.get(workload, frozenset())
    stands = standing(results.plan, taken, results.plan.specs, discarded, candidates)
    return replace(stands, others=doubted(stands.others)) if stands is not None and doubts(results) else stands


def _from_leader(stands: Standing | None, name: str, seconds: Mapping[str, float]) -> float:
    """For the order of names: the ratio to the leader by pairs where it is known, or by medians."""
    if stands is None:
        return seconds[name]
    if name == stands.leader:
        return 0.0
    judged = stands.others.get(name)
    return seconds[name] / seconds[stands.leader] if judged is None else judged.ratio


def _preferred(stands: Standing | None, reference: str, peaks: Mapping[str, float]) -> str:
    """The leader; or where others are equivalent to it the reference, or else the one that needs least memory."""
    if stands is None:
        return ""
    alike = [name for name in stands.others if stands.verdict(name) is Verdict.equivalent]
    if reference and reference in alike:
        return reference
    if not alike or stands.leader == reference:
        return stands.leader
    return min([stands.leader, *alike], key=lambda name: peaks.get(name, float("inf")))


def changes_along(results: Results, ladder: Ladder, only: tuple[str, str] | None = None) -> tuple[Change, ...]:
    """Where two implementations change places along a ladder, those that were searched for, in order.

    Without `only`, of every two that were sampled together and of whom one is the fastest at the base; not those around
    a narrower one, which were not searched for.
    """
    both = [only] if only else list(ladder.pairs) or _pairs_searched(results, ladder)
    found = []
    for one, other in both:
        for place in located(points(results, ladder, one, other)):
            before, after = (one, other) if place.sign > 0 else (other, one)
            found.append(Change(axis=ladder.axis, place=place, before=before, after=after))
    kept = [each for each in found if not any(_is_around(each.place, other.place) for other in found)]
    return tuple(sorted(kept, key=lambda each: each.place.at))


def _is_around(place: Place, other: Place) -> bool:
    """Whether another place lies inside, and leaves some of this one out."""
    return place.low <= other.low and other.high <= place.high and (place.low, place.high) != (other.low, other.high)


def points(results: Results, ladder: Ladder, one: str, other: str) -> dict[int, Point]:
    """What is known of two implementations at each value of a ladder where both were sampled.

    Nothing is decided where other work may have changed the times.
    """
    found, both = {}, (Arm(implementation=one), Arm(implementation=other))
    for value, workload in ladder.by_value.items():
        taken, discarded = samples_of(results).get(workload, {}), results.discarded.get(workload, frozenset())
        if own := by_process(numbers(taken, *both, discarded)):
            seen = point([*own.values()], results.plan.num_searches)
            found[value] = replace(seen, sign=0) if doubts(results) else seen
    return found


def _pairs_searched(results: Results, ladder: Ladder) -> list[tuple[str, str]]:
    """The leader where it was asked, with each other one that was sampled somewhere else on the ladder."""
    stands = _standing(results, ladder.base)
    if stands is None:
        return []
    elsewhere = {
        arm.implementation for workload in set(ladder.workloads) - {ladder.base} for arm in _timed(results, workload)
    }
    return [(stands.leader, name) for name in sorted(elsewhere - {stands.leader})]


def _timed(results: Results, workload: str) -> list[Arm]:
    """The arms that have times on a workload."""
    taken = samples_of(results).get(workload, {})
    return [arm for arm in results.plan.specs if len(taken.get(arm, ()))]


def _looked(results: Results, ladder: Ladder) -> tuple[int, int] | None:
    """The least and the greatest value at which at least two were sampled."""
    values = [value for value, workload in ladder.by_value.items() if len(_timed(results, workload)) > 1]
    return (min(values), max(values)) if values else None
