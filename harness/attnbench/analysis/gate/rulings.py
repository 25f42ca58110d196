"""Data of the gate: limits on growth, a ruling for each metric of each cell, and the decision.

The limits come from the table [gate] of attnbench.toml, or else from the defaults in ALLOWED.
"""

import enum
from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import msgspec

from attnbench.analysis.conclusion import Conclusion, Ending
from attnbench.statistics.verdict import Reason
from attnbench.storage.records import LATENCY

Key = tuple[str, str]  # workload id and implementation of a cell
EVERY = "*"  # stands for all workloads or all implementations
EVERYTHING = (EVERY, EVERY)  # key for all cells together
STATUS, CHECK, ERROR_RATIO, BACKEND = "status", "check", "error_ratio", "backend"
NUM_OPERATORS, EXECUTED_FLOPS = "num_operators", "executed_flops"
TOOL_FILE = "attnbench.toml"
SAMPLED = {"energy": 0.1, "outside_time": 1.0}
ALLOWED = {LATENCY: 0.05, "peak_memory": 0.02, ERROR_RATIO: 0.1, NUM_OPERATORS: 0.0} | SAMPLED
"""Default limits on growth, as a fraction of the base; for error_ratio, of the tolerance. Metrics that are not listed
may not grow. SAMPLED has the metrics, besides the latency, that differ between two runs of the same code."""
Share = Annotated[float, msgspec.Meta(ge=0.0)]  # a fraction: 0.05 is 5 %


class Kind(enum.StrEnum):
    """The kind of change in one metric of a cell."""

    same = "same"  # includes times that are equivalent or no slower, and cells that fail as before
    faster = "faster"
    slower = "slower"
    undecided = "undecided"
    grown = "grown"
    shrunk = "shrunk"
    failed = "failed"
    fixed = "fixed"  # it failed before
    lost = "lost"  # a cell, a metric or a part of a check
    changed = "changed"  # another backend, or another failure
    new = "new"


BETTER = (Kind.faster, Kind.shrunk, Kind.fixed)
ENDINGS = dict.fromkeys(Kind, Ending.finding) | dict.fromkeys((Kind.same, Kind.new, *BETTER), Ending.passed)
ENDINGS[Kind.undecided] = Ending.inconclusive
"""The ending that each kind of change causes."""


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """The judgement on a metric of a cell. `effect` is candidate / base; only times have an interval and `smallest`."""

    workload: str
    implementation: str
    metric: str
    kind: Kind
    words: str
    reason: Reason | None = None  # why a time is undecided
    base: float | str | None = None
    candidate: float | str | None = None
    unit: str = ""
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    smallest: float | None = None  # the relative slowdown detected with 80 % power

    @property
    def ending(self) -> Ending:
        """The ending that this ruling causes."""
        return ENDINGS[self.kind]


def ruling(key: Key, metric: str, kind: Kind, words: str, **fields: Any) -> Ruling:  # noqa: ANN401 - fields of Ruling
    """Build a ruling on one metric of a cell."""
    return Ruling(workload=key[0], implementation=key[1], metric=metric, kind=kind, words=words, **fields)


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two compared states of the code."""

    run: str  # name of the run or, in a session with two sides, the side as the user wrote it
    commit: str  # "" if unknown


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a gate: its ending with the reason in words, and the rulings from which it follows."""

    base: Side
    candidate: Side
    ending: Ending
    words: str
    suite: Ruling | None  # all cells together; None for two runs
    rulings: tuple[Ruling, ...]
    notes: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()  # why the session, or one of the runs, is not valid

    @property
    def conclusion(self) -> Conclusion:
        """The conclusion of the command."""
        return Conclusion(ending=self.ending, words=self.words)


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A limit on the growth of a metric for a group of cells; names may contain * and ?."""

    allowed: Share
    workload: str = EVERY
    implementation: str = EVERY
    metric: str = EVERY

    def covers(self, key: Key, metric: str) -> bool:
        """Return whether the patterns of the rule match this metric of this cell."""
        names = ((key[0], self.workload), (key[1], self.implementation), (metric, self.metric))
        return all(fnmatchcase(name, pattern) for name, pattern in names)


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table [gate] of attnbench.toml. If several rules match a metric of a cell, the last of them counts."""

    rule: tuple[Rule, ...] = ()

    def allowed(self, key: Key, metric: str) -> float:
        """Return the allowed growth of a metric of a cell, as a fraction: 0.05 is 5 %."""
        limit = self.limit([key], metric)
        return ALLOWED.get(metric, 0.0) if limit is None else limit

    def limit(self, cells: Iterable[Key], metric: str) -> float | None:
        """Return the strictest limit that the rules set on a metric of these cells; None if some cell has no rule."""
        limits = []
        for cell in cells:
            covering = [rule for rule in self.rule if rule.covers(cell, metric)]
            if not covering:
                return None
            limits.append(covering[-1].allowed)
        return min(limits, default=None)

    def notes(self, cells: Collection[Key], metrics: Iterable[str]) -> Iterator[str]:
        """Yield a note on each rule that matches no metric of any cell."""
        known = sorted({*ALLOWED, EXECUTED_FLOPS, *metrics})
        for number, rule in enumerate(self.rule, start=1):
            if not any(rule.covers(cell, metric) for cell in cells for metric in known):
                names = f"rule {number} ({rule.workload}, {rule.implementation}, {rule.metric})"
                yield f"{names} covers no cell or metric: check its names; metrics are {', '.join(known)}"


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of attnbench.toml."""

    gate: Thresholds = msgspec.field(default_factory=Thresholds)


def load(path: Path | None) -> Thresholds:
    """Read the thresholds in `path`; without it, those in attnbench.toml in the working folder, or the defaults.

    Raises:
        ValueError: the file cannot be read, or has an unknown key or a bad value; the message lists the allowed keys.
    """
    if path is None and not Path(TOOL_FILE).exists():
        return Thresholds()
    path = path or Path(TOOL_FILE)
    keys, of_rules = (", ".join(struct.__struct_fields__) for struct in (Thresholds, Rule))
    advice = f"give a TOML file with a table [gate] ({keys}) and rules ({of_rules}), as in docs/ci.md"
    try:
        return msgspec.toml.decode(path.read_bytes(), type=_File).gate
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; {advice}") from None
    except ValueError as error:  # msgspec raises ValueErrors, and bad encodings are ValueErrors too
        raise ValueError(f"{path}: {error}; {advice}") from None
