"""What has no noise and needs no statistics: status, check, errors, backend, operators, FLOPs and memory."""

import math
import re
from collections.abc import Iterator
from functools import partial

from attnbench.analysis.gate.cells import Match
from attnbench.analysis.gate.rulings import (
    BACKEND,
    ERROR_RATIO,
    EXECUTED_FLOPS,
    LATENCY,
    NUM_OPERATORS,
    OUTCOMES,
    STATUS,
    Kind,
    Outcome,
    Ruling,
    ruling,
)
from attnbench.analysis.gate.thresholds import Thresholds
from attnbench.statistics.intervals import median
from attnbench.storage.records import Agreement, Record, Status
from attnbench.units import SCALES, show, significant

CHECK = "check"
_UNITS = "|".join(re.escape(symbol) for scales in SCALES.values() for _, symbol in scales)
_FOLDERS = r"(?<![\w/])(?:[.~]?/[^\s'\"()]*/|[\w.-]+(?:/[\w.-]+)*/(?=[\w-]+\.\w))"
_VARIES = re.compile(
    rf"{_FOLDERS}|\b0x[0-9a-f]+|(?<!\w)\d+(\.\d+)?(e[-+]?\d+)?( ({_UNITS})\b)?",
    re.IGNORECASE,
)
"""The parts of a message that differ where the reason does not: folders, addresses, and numbers with their units."""
_BEGINNING = 160
"""Two messages have the same reason if so many letters of what is left agree; long messages are cut among numbers."""
_MOST_MISSING = 3


def rulings(match: Match, thresholds: Thresholds) -> Iterator[Ruling]:
    """Everything certain about one cell."""
    base, candidate = match.base, match.candidate
    if candidate is None:
        assert base is not None
        yield ruling(match.key, STATUS, Kind.lost, f"the cell is gone; it was {base.status}", base=str(base.status))
        return
    if match.renamed_from:
        words = f"was {match.renamed_from} before; judged as the same cell"
        yield ruling(match.key, "name", Kind.changed, words)
    kind, outcome, words = _status(base, candidate)
    before, after = None if base is None else str(base.status), str(candidate.status)
    yield ruling(match.key, STATUS, kind, words, outcome=outcome or OUTCOMES[kind], base=before, candidate=after)
    if base is not None and base.status is candidate.status is Status.ok:
        yield from _check(base, candidate, thresholds)
        yield from _numbers(base, candidate, thresholds)


def _status(base: Record | None, candidate: Record) -> tuple[Kind, Outcome | None, str]:
    """How the cell ended, then and now; with an outcome where it is not the usual one of the kind."""
    after, message = candidate.status, f": {candidate.message}" if candidate.message else ""
    if base is None:
        if candidate.is_finding:
            return Kind.failed, None, f"new, and it failed; now {after}{message}"
        return Kind.new, None, f"new: {after}, and nothing to compare it with"
    before = base.status
    kind, outcome, words = Kind.same, None, f"{after} as before"
    if candidate.is_finding and not base.is_finding:
        kind, words = Kind.failed, f"was {before}; now {after}{message}"
    elif candidate.is_finding and before is after and _reason(base) == _reason(candidate):
        kind, outcome, words = Kind.failed, Outcome.passed, f"failed as before: {_described(candidate)}"
    elif candidate.is_finding:
        kind, words = Kind.changed, f"failed in another way: {_described(candidate)}; before it was {_described(base)}"
    elif before is not after is Status.ok:
        kind, outcome = (Kind.changed, Outcome.improved) if base.is_finding else (Kind.new, None)
        words = f"was {before}, is ok"
    elif before is Status.ok and after is Status.unsupported:
        kind, words = Kind.lost, f"was ok; now {after}{message}"
    elif before is not after and (before is Status.ok or base.is_finding):  # foreseen to be out of reach, or refused
        kind, words = Kind.lost, f"was {before} and is no longer tried; now {after}{message}"
    elif before is not after:
        words = f"was {before}, not tried either; now {after}{message}"
    return kind, outcome, words


def _described(record: Record) -> str:
    return f"{record.status} ({record.message})" if record.message else str(record.status)


def _reason(record: Record) -> tuple[str, ...]:
    """The mistake that a check named, or else the message without what varies."""
    agreement = record.agreement
    if agreement is None or agreement.agrees or not (agreement.mistakes or agreement.step):
        return (_VARIES.sub("", record.message)[:_BEGINNING],)
    return *agreement.mistakes, agreement.step


def tried(agreement: Agreement | None) -> set[str]:
    """What a check compared and which rules it tried, by name."""
    if agreement is None:
        return set()
    compared = {f"{tensor.tensor} on {probe}" for probe, tensor in agreement.tensors()}
    return compared | {f"the rule {rule.rule}" for rule in agreement.rules}


def _check(base: Record, candidate: Record, thresholds: Thresholds) -> Iterator[Ruling]:
    """Whether the check is as complete as it was, whether errors have grown, and which backend ran."""
    rule = partial(ruling, (candidate.workload.id, candidate.implementation))
    was, now = base.agreement, candidate.agreement
    missing = sorted(tried(was) - tried(now))
    if missing:
        more = " and more" if len(missing) > _MOST_MISSING else ""
        yield rule(CHECK, Kind.lost, f"the check no longer tries {', '.join(missing[:_MOST_MISSING])}{more}")
    before, after = (None if each is None else each.error_ratio for each in (was, now))
    if before is not None and after is not None:
        allowed = thresholds.allowed(candidate.workload.id, candidate.implementation, ERROR_RATIO)
        kind, words = (
            Kind.same,
            f"the largest error / tolerance is {significant(after, 2)}, before {significant(before, 2)}",
        )
        if after > before + allowed:
            kind, words = Kind.grown, f"{words}; it may grow by {significant(allowed, 2)}"
        yield rule(ERROR_RATIO, kind, words, base=before, candidate=after)
    if base.operators is None:
        return
    ran = base.operators.observed or "none"
    if candidate.operators is None:
        yield rule(BACKEND, Kind.lost, "the operators that run are no longer observed", base=ran)
        return
    runs = candidate.operators.observed or "none"
    kind, words = Kind.same, f"{runs} as before"
    if ran != runs:
        kind, words = Kind.changed, f"another backend ran: {runs}, before {ran}"
    yield rule(BACKEND, kind, words, base=ran, candidate=runs)


def numbers(record: Record) -> dict[str, tuple[float, str]]:
    """Each number without noise that a record has, and its unit; a new metric appears here by itself."""
    found: dict[str, tuple[float, str]] = {}
    if record.operators is not None:
        found[NUM_OPERATORS] = sum(operator.num_calls for operator in record.operators.calls), ""
    if record.executed_flops is not None:
        found[EXECUTED_FLOPS] = record.executed_flops, "flops"
    for each in record.measurements:
        if each.samples and not each.metric.startswith(LATENCY):
            found[each.metric] = median(sample.value for sample in each.samples), each.unit
    return found


def _numbers(base: Record, candidate: Record, thresholds: Thresholds) -> Iterator[Ruling]:
    """Whether a number has grown that may not, or is no longer known."""
    key, now = (candidate.workload.id, candidate.implementation), numbers(candidate)
    for metric, (before, unit) in numbers(base).items():
        if metric not in now:
            if metric != NUM_OPERATORS:  # the ruling on the backend says that these are lost
                yield ruling(key, metric, Kind.lost, f"{metric} is no longer known", base=before, unit=unit)
            continue
        after, allowed = now[metric][0], thresholds.allowed(*key, metric)
        effect = after / before if before > 0 else (1.0 if after == before else math.inf)
        known = effect if math.isfinite(effect) else None
        kind, words = Kind.same, f"{show(after, unit)}, before {show(before, unit)}"
        if effect > 1 + allowed:
            by = "" if known is None else f" by {significant(100 * (effect - 1), 2)} %"
            kind, words = Kind.grown, f"grown{by} to {words}; allowed is {100 * allowed:g} %"
        elif effect < 1 - allowed:
            kind, words = Kind.shrunk, f"shrunk by {significant(100 * (1 - effect), 2)} % to {words}"
        values = {"base": float(before), "candidate": float(after)}
        yield ruling(key, metric, kind, words, **values, unit=unit, effect=known)
