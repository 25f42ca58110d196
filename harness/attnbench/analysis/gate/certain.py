"""Hard gates: what has no noise, and so needs no statistics.

Status, check, errors, memory, FLOPs, operators and backend.
"""

import math
import re
from collections.abc import Iterator

from attnbench.analysis.gate.cells import Couple
from attnbench.analysis.gate.rulings import (
    BACKEND,
    ERROR_RATIO,
    EXECUTED_FLOPS,
    LATENCY,
    NUM_OPERATORS,
    STATUS,
    Kind,
    Outcome,
    Ruling,
)
from attnbench.analysis.gate.thresholds import Thresholds
from attnbench.statistics.intervals import median
from attnbench.storage.records import Agreement, Operators, Record, Status
from attnbench.units import SCALES, show, significant

_UNITS = "|".join(re.escape(symbol) for scales in SCALES.values() for _, symbol in scales)
_FOLDERS = r"(?<![\w/])(?:[.~]?/[^\s'\"()]*/|[\w.-]+(?:/[\w.-]+)*/(?=[\w-]+\.\w))"
_VARIES = re.compile(
    rf"{_FOLDERS}|\b0x[0-9a-f]+|(?<!\w)\d+(\.\d+)?(e[-+]?\d+)?( ({_UNITS})\b)?",
    re.IGNORECASE,
)
"""What of a message differs where the reason does not: folders, addresses, and numbers with their units."""
_BEGINNING = 160
"""So many letters of what is left tell a reason; a long message was cut, somewhere among its numbers."""


def rulings(couple: Couple, thresholds: Thresholds) -> Iterator[Ruling]:
    """Everything certain about one cell."""
    base, candidate = couple.base, couple.candidate
    if candidate is None:
        assert base is not None
        yield _gone(base)
        return
    if couple.renamed_from:
        words = f"was {couple.renamed_from} before; judged as the same cell"
        yield _ruling(candidate, "name", Kind.renamed, Outcome.finding, words)
    if base is None:
        yield _newcomer(candidate)
        return
    yield _status(base, candidate)
    if base.status is candidate.status is Status.ok:
        yield from _checks(base, candidate, thresholds)
        yield from _operators(base, candidate, thresholds)
        yield from _flops(base, candidate, thresholds)
        yield from _measured(base, candidate, thresholds)


def _gone(base: Record) -> Ruling:
    words = f"the cell is gone; it was {base.status}"
    return Ruling(
        workload=base.workload.id,
        implementation=base.implementation,
        metric=STATUS,
        kind=Kind.lost,
        outcome=Outcome.finding,
        words=words,
        base=str(base.status),
    )


def _newcomer(candidate: Record) -> Ruling:
    if candidate.is_finding:
        words = _told("new, and it went wrong", candidate)
        return _ruling(candidate, STATUS, Kind.failed, Outcome.finding, words, after=str(candidate.status))
    words = f"new: {candidate.status}, and nothing to compare it with"
    return _ruling(candidate, STATUS, Kind.new, Outcome.passed, words, after=str(candidate.status))


def _status(base: Record, candidate: Record) -> Ruling:
    """How the cell ended, then and now."""
    kind, outcome, words = _ended(base, candidate)
    return _ruling(candidate, STATUS, kind, outcome, words, str(base.status), str(candidate.status))


def _ended(base: Record, candidate: Record) -> tuple[Kind, Outcome, str]:
    before, after = base.status, candidate.status
    if candidate.is_finding:
        return _went_wrong(base, candidate)
    if before is after:
        return Kind.same, Outcome.passed, f"{after} as before"
    if after is Status.ok:
        fixed = (Kind.fixed, Outcome.improved) if base.is_finding else (Kind.new, Outcome.passed)
        return *fixed, f"was {before}, is ok"
    if before is Status.ok and after is Status.unsupported:
        return Kind.unsupported, Outcome.finding, _told("was ok", candidate)
    if before is Status.ok or base.is_finding:  # foreseen to be out of reach, or refused
        return Kind.lost, Outcome.finding, _told(f"was {before} and is no longer tried", candidate)
    return Kind.same, Outcome.passed, _told(f"was {before}, not tried either", candidate)


def _went_wrong(base: Record, candidate: Record) -> tuple[Kind, Outcome, str]:
    if not base.is_finding:
        return Kind.failed, Outcome.finding, _told(f"was {base.status}", candidate)
    if base.status is candidate.status and _reason(base) == _reason(candidate):
        return Kind.known, Outcome.passed, f"still wrong: {_say(candidate)}"
    return Kind.changed, Outcome.finding, f"wrong in another way: {_say(candidate)}; before it was {_say(base)}"


def _told(lead: str, record: Record) -> str:
    reason = f": {record.message}" if record.message else ""
    return f"{lead}; now {record.status}{reason}"


def _say(record: Record) -> str:
    return f"{record.status} ({record.message})" if record.message else str(record.status)


def _reason(record: Record) -> tuple[str, ...]:
    """The mistake that a check named, or else the message without what varies."""
    found = record.agreement
    if found is None or found.agrees or not (found.mistakes or found.step):
        return (_VARIES.sub("", record.message)[:_BEGINNING],)
    return *found.mistakes, found.step


def _checks(base: Record, candidate: Record, thresholds: Thresholds) -> Iterator[Ruling]:
    """Whether the check is still the whole check, and whether errors have grown."""
    if base.agreement is None:
        return
    missing = sorted(tried(base.agreement) - tried(candidate.agreement))
    if missing:
        words = f"the check no longer tries {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}"  # noqa: PLR2004 - enough to see which
        yield _ruling(candidate, "check", Kind.unchecked, Outcome.finding, words)
    before = base.agreement.error_ratio
    after = None if candidate.agreement is None else candidate.agreement.error_ratio
    if before is None or after is None:
        return
    allowed = thresholds.allowed(candidate.workload.id, candidate.implementation, ERROR_RATIO)
    kind, outcome = Kind.same, Outcome.passed
    if after > before + allowed:
        kind, outcome = Kind.grown, Outcome.finding
    seen = f"the largest error is {significant(after, 2)} of what is allowed, before {significant(before, 2)}"
    words = f"{seen}; it may grow by {significant(allowed, 2)}" if outcome is Outcome.finding else seen
    yield _ruling(candidate, ERROR_RATIO, kind, outcome, words, before, after)


def tried(agreement: Agreement | None) -> set[str]:
    """What a check compared and which rules it tried, by name."""
    if agreement is None:
        return set()
    compared = {f"{tensor.tensor} on {probe}" for probe, tensor in agreement.tensors()}
    return compared | {f"the rule {rule.rule}" for rule in agreement.rules}


def _operators(base: Record, candidate: Record, thresholds: Thresholds) -> Iterator[Ruling]:
    """Which backend ran, and how many operators."""
    if base.operators is None:
        return
    if candidate.operators is None:
        words = "what really ran is no longer looked at"
        yield _ruling(candidate, BACKEND, Kind.lost, Outcome.finding, words, base.operators.observed or "none")
        return
    before, after = (each.observed or "none" for each in (base.operators, candidate.operators))
    if before != after:
        words = f"another backend ran: {after}, before {before}"
        yield _ruling(candidate, BACKEND, Kind.changed, Outcome.finding, words, before, after)
    else:
        yield _ruling(candidate, BACKEND, Kind.same, Outcome.passed, f"{after} as before", before, after)
    counts = count(base.operators), count(candidate.operators)
    allowed = thresholds.allowed(candidate.workload.id, candidate.implementation, NUM_OPERATORS)
    yield _growth(candidate, NUM_OPERATORS, "", counts, allowed)


def count(operators: Operators) -> int:
    """How many operators one call runs."""
    return sum(operator.num_calls for operator in operators.calls)


def _flops(base: Record, candidate: Record, thresholds: Thresholds) -> Iterator[Ruling]:
    """How many FLOPs one call executes, where the base's implementation said so."""
    if base.executed_flops is None:
        return
    if candidate.executed_flops is None:
        words = "how many FLOPs one call executes is no longer told"
        yield _ruling(candidate, EXECUTED_FLOPS, Kind.lost, Outcome.finding, words)
        return
    counts = base.executed_flops, candidate.executed_flops
    allowed = thresholds.allowed(candidate.workload.id, candidate.implementation, EXECUTED_FLOPS)
    yield _growth(candidate, EXECUTED_FLOPS, "flops", counts, allowed)


def _measured(base: Record, candidate: Record, thresholds: Thresholds) -> Iterator[Ruling]:
    """Each metric with a pass of its own, such as peak memory."""
    for before in base.measurements:
        if before.metric.startswith(LATENCY) or not before.samples:
            continue
        after = candidate.measurement(before.metric)
        if after is None or not after.samples:
            words = f"{before.metric} is no longer measured"
            yield _ruling(candidate, before.metric, Kind.lost, Outcome.finding, words)
            continue
        values = median(s.value for s in before.samples), median(s.value for s in after.samples)
        allowed = thresholds.allowed(candidate.workload.id, candidate.implementation, before.metric)
        yield _growth(candidate, before.metric, before.unit, values, allowed)


def _growth(record: Record, metric: str, unit: str, values: tuple[float, float], allowed: float) -> Ruling:
    before, after = values
    effect = after / before if before > 0 else (1.0 if after == before else math.inf)
    told = f"{show(after, unit)}, before {show(before, unit)}"
    kind, outcome, words = Kind.same, Outcome.passed, told
    if effect > 1 + allowed:
        kind, outcome = Kind.grown, Outcome.finding
        words = f"grown by {significant(100 * (effect - 1), 2)} % to {told}; allowed is {100 * allowed:g} %"
        if math.isinf(effect):
            words = f"grown to {told}; allowed is {100 * allowed:g} %"
    elif effect < 1 - allowed:
        kind, outcome, words = (
            Kind.shrunk,
            Outcome.improved,
            f"shrunk by {significant(100 * (1 - effect), 2)} % to {told}",
        )
    finite = None if math.isinf(effect) else effect
    return Ruling(
        workload=record.workload.id,
        implementation=record.implementation,
        metric=metric,
        kind=kind,
        outcome=outcome,
        words=words,
        base=float(before),
        candidate=float(after),
        unit=unit,
        effect=finite,
    )


def _ruling(  # noqa: PLR0913, PLR0917 - the fields of a ruling, in their order
    record: Record,
    metric: str,
    kind: Kind,
    outcome: Outcome,
    words: str,
    before: float | str | None = None,
    after: float | str | None = None,
) -> Ruling:
    return Ruling(
        workload=record.workload.id,
        implementation=record.implementation,
        metric=metric,
        kind=kind,
        outcome=outcome,
        words=words,
        base=before,
        candidate=after,
    )
