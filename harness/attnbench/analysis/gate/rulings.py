"""What a gate says, as data: a ruling for each metric of each cell, one for the suite, and the decision of them all."""

import enum
from collections import Counter

import msgspec

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
    invalid = "invalid"  # of a whole gate only: the session says nothing


class Kind(enum.StrEnum):
    """What was seen."""

    same = "same"
    reference = "reference"  # what times are taken relative to: its own is shown and not judged
    slower = "slower"
    faster = "faster"
    suspicious = "suspicious"  # too much faster to be taken over without another check
    undecided = "undecided"
    refused = "refused"  # a threshold that cannot be judged here
    lost = "lost"
    renamed = "renamed"
    unsupported = "unsupported"
    failed = "failed"
    fixed = "fixed"
    known = "known"  # went wrong before, and still does
    new = "new"
    unchecked = "unchecked"
    grown = "grown"
    shrunk = "shrunk"
    changed = "changed"


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one cell, judged. `effect` is candidate / base; its interval and `smallest` are of time alone."""

    workload: str
    implementation: str
    metric: str
    kind: Kind
    outcome: Outcome
    words: str
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


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two runs."""

    run: str
    commit: str
    time: str
    fingerprint: str  # empty: the run has no worker; several, joined by +, where the environment changed


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """All that a gate says."""

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

    @property
    def counts(self) -> dict[str, int]:
        """How many rulings came to what."""
        return dict(Counter(str(ruling.outcome) for ruling in self.rulings))
