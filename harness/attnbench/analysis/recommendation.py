"""Recommend one implementation for each workload of a run; give its lead over the others, and reasons for exclusions.

A search for the fastest implementation runs in stages (processes/execution.py); this module reads the answer from its
journal. If several implementations are equal to the fastest within the margin, the baseline (PyTorch's own choice) is
preferred. If the baseline is not among them, the one that needs the least memory is preferred.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from attnbench.analysis.comparisons import has_doubt, paired_times, samples_of
from attnbench.analysis.first_calls import first_s
from attnbench.analysis.results import Results
from attnbench.plugins import catalogue, is_dense, variant
from attnbench.statistics.break_even import BreakEven, break_even
from attnbench.statistics.choice import Standing, standing
from attnbench.statistics.crossover import Point, point
from attnbench.statistics.effects import numbers
from attnbench.statistics.intervals import by_process
from attnbench.statistics.verdict import doubted
from attnbench.storage.events import Ladder
from attnbench.storage.records import LATENCY, REPEATABLE, Arm, Key, Record, Status, Verdict
from attnbench.units import show
from attnbench.workloads.workload import Workload

PEAK_MEMORY = "peak_memory"
EXCLUDED = {
    Status.disagrees: "wrong",
    Status.unsupported: "not supported",
    Status.fallback: "ran another backend",
    Status.timeout: "timed out",
    Status.out_of_memory: "needs too much memory",
}
"""Short reasons for an exclusion, by status. For any other status, the status itself is the reason."""
LONG_FIRST = 10
"""A first call is mentioned if it takes at least as long as this number of later calls."""
OVER = "needs more memory than is allowed"
GATHERED = "keys are gathered from their pages before the call, outside of its time"
NOT_TIMED = "not timed before the run ended"
TOO_LONG = "not tried, predicted to take too long"
"""Reason for cells that were predicted to be slower than others, or to exceed the time limit of a call."""


@dataclass(frozen=True)
class Exclusion:
    """The reason for excluding an implementation: a short kind, by which exclusions are grouped, and a detail."""

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


class Change(msgspec.Struct, frozen=True):
    """A crossover on an axis: `before` is faster below the value `at`, and `after` is faster from there on."""

    axis: str
    at: float  # estimated value of the axis, between `low` and `high`
    low: float
    high: float
    before: str
    after: str


class Lead(msgspec.Struct, frozen=True, kw_only=True):
    """The ratio of another implementation's time to that of the choice, with its interval and verdict."""

    ratio: float  # the other implementation's time divided by the choice's
    low: float | None = None  # interval of the ratio; None if the choice is not the fastest, or processes are too few
    high: float | None = None
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The recommended implementation for one workload, with the measurements behind it."""

    workload: Workload
    choice: str  # "" if nothing can be recommended
    standing: Standing | None
    reference: str  # PyTorch's own choice
    seconds: dict[str, float]  # per call, by implementation, fastest first; `paired_latency_s` in the table of cells
    peaks: dict[str, float]  # peak bytes of a call beyond its inputs, by implementation, if measured
    excluded: dict[str, Exclusion]  # by implementation
    first_s: dict[str, float] = field(default_factory=dict)  # seconds of the first call, by implementation
    compiles: bool = False  # whether the choice compiles code for each size

    @property
    def break_even(self) -> BreakEven | None:
        """The number of calls after which the choice has made up for a first call that is longer than the baseline's.

        None if the choice is the baseline, if the baseline is excluded, or if a first or later call was not timed.
        """
        lead = self.lead(self.reference) if self.reference in self.seconds else None
        if lead is None or not {self.choice, self.reference} <= self.first_s.keys():
            return None
        own_s, base_first_s = self.first_s[self.choice], self.first_s[self.reference]
        low, high = (None if end is None else 1 / end for end in (lead.high, lead.low))
        verdict = Verdict.faster if lead.verdict is Verdict.slower else lead.verdict
        base_s = self.seconds[self.reference]
        return break_even(own_s, base_first_s, base_s, ratio=1 / lead.ratio, low=low, high=high, verdict=verdict)

    @property
    def has_long_first_call(self) -> bool:
        """Whether the choice compiles, or its first call takes at least as long as LONG_FIRST later calls."""
        first_s = self.first_s.get(self.choice, 0.0)
        return self.compiles or first_s >= LONG_FIRST * self.seconds.get(self.choice, math.inf)

    @property
    def equals(self) -> list[str]:
        """Implementations that are not slower than the choice: equal within the margin, or undecided."""
        return [name for name in self.seconds if name != self.choice and self.verdict(name) is not Verdict.slower]

    @property
    def runner_up(self) -> str:
        """The fastest implementation besides the choice; "" if there is none."""
        return next((name for name in self.seconds if name != self.choice), "")

    @property
    def is_clear(self) -> bool:
        """Whether there is a choice, and all others are slower."""
        return bool(self.choice) and not self.equals

    def lead(self, other: str) -> Lead | None:
        """Compare the time of another implementation with the choice's; None if it is the choice, or without a leader.

        If the choice is the leader (the fastest implementation) and was compared with the other, the interval and the
        verdict are from this comparison. Otherwise there is no interval, and the verdict is relative to the leader.
        """
        stands = self.standing
        if stands is None or other == self.choice:
            return None
        judged = stands.others.get(other)
        if self.choice == stands.leader and judged is not None:
            return Lead(ratio=judged.ratio, low=judged.low, high=judged.high, verdict=judged.verdict)
        return Lead(ratio=self.seconds[other] / self.seconds[self.choice], verdict=self.verdict(other))

    def verdict(self, name: str) -> Verdict:
        """Return the verdict on an implementation relative to the leader; undecided if the two were not compared."""
        judged = None if self.standing is None else self.standing.others.get(name)
        return Verdict.undecided if judged is None else judged.verdict

    def facts(self) -> dict[str, Any]:
        """Return the fields of `reports.verdict.Choice` for this recommendation, without `answer`, by name."""
        leads = {name: self.lead(name) for name in self.seconds}
        return {
            "workload": self.workload.id,
            "axes": self.workload.axes(),
            "choice": self.choice or None,
            "is_clear": self.is_clear,
            "equals": tuple(self.equals),
            "runner_up": self.runner_up or None,
            "reference": self.reference,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peaks,
            "slower_by": {name: lead for name, lead in leads.items() if lead is not None},
            "excluded": {name: str(why) for name, why in self.excluded.items()},
            "first_call_seconds": self.first_s,
            "break_even": self.break_even,
        }


def recommend(results: Results, *, memory_bytes: int = 0, is_deterministic: bool = False) -> list[Recommendation]:
    """Recommend an implementation for each requested workload, in the order of the plan.

    `memory_bytes` limits the memory of a call beyond its inputs (0: no limit). `is_deterministic` excludes
    implementations whose answers vary between calls.
    """
    specs = results.plan.specs
    reasons = {
        record.key: why
        for record in results.records
        if (why := _exclusion(record, specs[record.arm], memory_bytes, is_deterministic=is_deterministic))
    }
    return [_recommended(results, workload, reasons) for workload in results.plan.asked]


def _recommended(results: Results, workload: Workload, reasons: Mapping[Key, Exclusion]) -> Recommendation:
    reference = results.plan.baseline
    records = {record.implementation: record for record in results.records if record.workload == workload}
    excluded = {name: reasons[record.key] for name, record in records.items() if record.key in reasons}
    fit = {name: record for name, record in records.items() if name not in excluded}
    taken = samples_of(results).get(workload.id, {})
    stands = standing(results.plan, taken, results.plan.specs, candidates=set(fit))
    if stands is not None:
        leader = workload.id, Arm(implementation=stands.leader)
        keys = {name: {leader, (workload.id, Arm(implementation=name))} for name in stands.others}
        distrusted = {name: judged for name, judged in stands.others.items() if has_doubt(results, keys[name])}
        stands = replace(stands, others=stands.others | doubted(distrusted))
    times_s = paired_times(results)
    seconds = {name: times_s[record.key] for name, record in fit.items()}
    order = sorted(seconds, key=seconds.__getitem__)
    peaks = {name: peak for name, record in records.items() if (peak := peak_bytes(record)) is not None}
    choice = next(iter(order), "")
    if stands is not None:  # among those equal to the leader: the reference, or else the one that needs least memory
        equal = [name for name, judged in stands.others.items() if judged.verdict is Verdict.equivalent]
        alike = [stands.leader, *equal]
        choice = reference if reference in alike else min(alike, key=lambda name: peaks.get(name, float("inf")))
    return Recommendation(
        workload=workload,
        choice=choice,
        standing=stands,
        reference=reference,
        seconds={name: seconds[name] for name in order},
        peaks={name: peaks[name] for name in [*order, *peaks] if name in peaks},
        excluded=excluded,
        first_s={name: call_s for name, each in fit.items() if (call_s := first_s(each)) is not None},
        compiles=choice in records and compiles(results.plan.specs[records[choice].arm]),
    )


def _exclusion(record: Record, spec: str, memory_bytes: int, *, is_deterministic: bool) -> Exclusion | None:
    """Return why the implementation of a record is not a candidate; None if it is a candidate."""
    if record.status is not Status.ok:
        head = EXCLUDED.get(record.status, str(record.status).replace("_", " "))
        if record.status is Status.timeout and record.is_predicted:
            head = TOO_LONG
        return Exclusion(head, record.message)
    if record.workload.page_size and is_dense(spec):
        return Exclusion(GATHERED)
    peak = peak_bytes(record)
    if memory_bytes and peak is not None and peak > memory_bytes:
        return Exclusion(OVER, f"{show(peak, 'bytes')}, more than the {show(memory_bytes, 'bytes')} allowed")
    if is_deterministic and record.agreement is not None:
        broken = [rule.found for rule in record.agreement.notes if rule.rule == REPEATABLE]
        if broken:
            return Exclusion("not deterministic", broken[0])
    return None if record.samples(LATENCY) else Exclusion(NOT_TIMED)


def compiles(spec: str) -> bool:
    """Return whether a spec compiles code for each size: it has an option (fused+compile), or the catalogue says so."""
    base, option = variant(spec)
    return bool(option) or bool(catalogue()["facts"].get(base, {}).get("compiles"))


def peak_bytes(record: Record) -> float | None:
    """Return the peak memory of a call beyond its inputs, in bytes; None if it was not measured."""
    samples = record.samples(PEAK_MEMORY)
    return samples[0].value if samples else None


def points(results: Results, ladder: Ladder, one: str, other: str) -> dict[int, Point]:
    """Compare two implementations at each size of a search where they were timed in the same blocks.

    The keys of the result are these sizes: values of the axis that the search varies (`ladder.axis`), such as a length.
    If either time is doubtful, the point is undecided (its sign is 0).
    """
    seen, arms = {}, (Arm(implementation=one), Arm(implementation=other))
    for value, workload in ladder.by_value.items():
        taken = samples_of(results).get(workload, {})
        logs = by_process(numbers(taken, arms[0], arms[1]))
        if logs:
            decided = point([*logs.values()], results.plan.num_searches)
            is_doubtful = has_doubt(results, {(workload, arm) for arm in arms})
            seen[value] = msgspec.structs.replace(decided, sign=0) if is_doubtful else decided
    return seen
