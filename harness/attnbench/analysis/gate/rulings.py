"""Data of a gate: a ruling for each metric of each cell, one for the suite, and the decision that follows from all."""

import enum
from typing import Any

import msgspec

from attnbench.statistics.verdicts import Reason

Key = tuple[str, str]
"""Workload id and implementation of a cell."""
STATUS = "status"
LATENCY = "latency"
ERROR_RATIO = "error_ratio"
BACKEND = "backend"
NUM_OPERATORS = "num_operators"
EXECUTED_FLOPS = "executed_flops"
EVERY = "*"
"""In place of a workload or an implementation: the ruling is about all of them."""


class Outcome(enum.StrEnum):
    """What a ruling, or a whole gate, comes to."""

    passed = "pass"
    improved = "improvement"
    finding = "finding"
    inconclusive = "inconclusive"
    invalid = "invalid"  # of a whole gate only: its times cannot be judged


class Kind(enum.StrEnum):
    """What happened to a metric of a cell."""

    same = "same"  # times that are equivalent or no slower included
    faster = "faster"
    slower = "slower"
    undecided = "undecided"
    suspicious = "suspicious"  # so much faster that it may compute less
    grown = "grown"
    shrunk = "shrunk"
    failed = "failed"  # a pass where it failed in the same way before
    lost = "lost"  # a cell, a metric or a part of a check
    changed = "changed"  # name, backend or failure; an improvement where a failure is gone
    new = "new"


OUTCOMES = dict.fromkeys(Kind, Outcome.finding) | {
    Kind.same: Outcome.passed,
    Kind.new: Outcome.passed,
    Kind.faster: Outcome.improved,
    Kind.shrunk: Outcome.improved,
    Kind.undecided: Outcome.inconclusive,
}
"""What each kind comes to where nothing else is said."""


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one cell, judged. `effect` is candidate / base; its interval and `smallest` are of time alone."""

    workload: str
    implementation: str
    metric: str
    kind: Kind
    outcome: Outcome
    words: str
    reason: Reason | None = None  # why a time is undecided
    base: float | str | None = None
    candidate: float | str | None = None
    unit: str = ""
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    smallest: float | None = None  # the relative slowdown that would have been found four times in five

    @property
    def cell(self) -> str:
        """Implementation and workload, for a heading."""
        return f"{self.implementation} on {self.workload}"


def ruling(key: Key, metric: str, kind: Kind, words: str, **fields: Any) -> Ruling:  # noqa: ANN401 - as Ruling has them
    """A ruling on one metric of a cell, with the usual outcome of its kind if `fields` have no other."""
    given = {"outcome": OUTCOMES[kind], **fields}
    return Ruling(workload=key[0], implementation=key[1], metric=metric, kind=kind, words=words, **given)


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two runs."""

    run: str
    commit: str
    time: str
    fingerprint: str  # empty: the run has no worker; several, joined by +, where the environment changed


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a gate."""

    base: Side
    candidate: Side
    outcome: Outcome
    words: str
    suite: Ruling
    rulings: tuple[Ruling, ...]
    notes: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()  # why the session, or one of the runs, is not valid

    def of(self, *outcomes: Outcome) -> list[Ruling]:
        """The rulings, the suite's among them, that came to one of these."""
        return [ruling for ruling in (*self.rulings, self.suite) if ruling.outcome in outcomes]
