"""Match the cells of two runs, and judge noise-free facts: status, check, backend, FLOPs and memory."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from attnbench.analysis.breakdown import num_operators
from attnbench.analysis.gate.rulings import (
    BACKEND,
    ERROR_RATIO,
    EXECUTED_FLOPS,
    NUM_OPERATORS,
    OUTCOMES,
    STATUS,
    Key,
    Kind,
    Outcome,
    Ruling,
    Thresholds,
    ruling,
)
from attnbench.statistics.intervals import median
from attnbench.storage.records import LATENCY, Agreement, Record, Status
from attnbench.storage.samples import Samples
from attnbench.units import show, significant

CHECK = "check"
OTHER_INPUTS = 5.0
"""Factor by which the largest error / tolerance may change by chance on other inputs (docs/method.md)."""
MOST_MISSING = 3


@dataclass(frozen=True, kw_only=True)
class Match:
    """A cell in both runs; it may be missing in one."""

    key: Key  # workload id and implementation
    base: Record | None
    candidate: Record | None
    has_same_inputs: bool = True  # both were checked with the same inputs


def match_records(base: Iterable[Record], candidate: Iterable[Record], *, has_same_inputs: bool = True) -> list[Match]:
    """Match the cells of both sides by workload and implementation, the base's first; the side is ignored."""
    before, after = (
        {(record.workload.id, record.implementation): record for record in records} for records in (base, candidate)
    )
    return [
        Match(key=key, base=before.get(key), candidate=after.get(key), has_same_inputs=has_same_inputs)
        for key in {**before, **after}
    ]


def rulings(match: Match, thresholds: Thresholds) -> Iterator[Ruling]:
    """All noise-free rulings on one cell."""
    base, candidate = match.base, match.candidate
    if candidate is None:
        assert base is not None
        yield ruling(match.key, STATUS, Kind.lost, f"the cell is gone; it was {base.status}", base=str(base.status))
        return
    yield _status(match.key, base, candidate)
    if base is not None and base.status is candidate.status is Status.ok:
        yield from _check(match.key, base, candidate, thresholds, has_same_inputs=match.has_same_inputs)
        yield from _numbers(match.key, base, candidate, thresholds)


def _status(key: Key, base: Record | None, candidate: Record) -> Ruling:
    """Compare how the cell ended in both runs."""
    before, after = None if base is None else base.status, candidate.status
    now = f"now {after}: {candidate.message}" if candidate.message else f"now {after}"
    outcome = None  # use the default outcome of the kind
    if base is None and candidate.is_finding:
        kind, words = Kind.failed, f"new, and it failed; {now}"
    elif base is None:
        kind, words = Kind.new, f"new: {after}, and nothing to compare it with"
    elif candidate.is_finding and not base.is_finding:
        kind, words = Kind.failed, f"was {before}; {now}"
    elif candidate.is_finding and before is after and _reason(base) == _reason(candidate):
        kind, outcome, words = Kind.failed, Outcome.passed, f"failed as before: {_described(candidate)}"
    elif candidate.is_finding:
        kind, words = Kind.changed, f"failed in another way: {_described(candidate)}; before it was {_described(base)}"
    elif before is after:
        kind, words = Kind.same, f"{after} as before"
    elif after is Status.ok and base.is_finding:
        kind, outcome, words = Kind.changed, Outcome.improved, f"was {before}, is ok"
    elif after is Status.ok:
        kind, words = Kind.new, f"was {before}, is ok"
    elif candidate.is_predicted:  # a prediction is no evidence
        kind, words = Kind.undecided, f"was {before}, and was not tried; {now}"
    elif before is Status.ok or base.is_finding:
        kind, words = Kind.lost, f"was {before}; {now}"
    else:
        kind, words = Kind.same, f"was {before}, not tried either; {now}"
    statuses = {"base": None if before is None else str(before), "candidate": str(after)}
    return ruling(key, STATUS, kind, words, outcome=outcome or OUTCOMES[kind], **statuses)


def _described(record: Record) -> str:
    return f"{record.status} ({record.message})" if record.message else str(record.status)


def _reason(record: Record) -> tuple[str, ...]:
    """The mistakes and rules that the check named; if it named none, the exception or the whole message."""
    agreement = record.agreement
    if agreement is None or agreement.agrees:
        return (record.message.partition(":")[0],)
    return (*agreement.mistakes, agreement.step, *(rule.rule for rule in agreement.broken_rules))


def tried(agreement: Agreement | None) -> set[str]:
    """Names of the tensors that a check compared and of the rules that it tried."""
    if agreement is None:
        return set()
    compared = {f"{tensor.tensor} on {probe}" for probe, tensor in agreement.tensors()}
    return compared | {f"the rule {rule.rule}" for rule in agreement.rules}


def _check(
    key: Key, base: Record, candidate: Record, thresholds: Thresholds, *, has_same_inputs: bool
) -> Iterator[Ruling]:
    """Compare the checks: completeness, errors and backend.

    Errors on other inputs differ by more than a threshold allows, so there only errors that are several times larger
    count.
    """
    if missing := sorted(tried(base.agreement) - tried(candidate.agreement)):
        more = " and more" if len(missing) > MOST_MISSING else ""
        yield ruling(key, CHECK, Kind.lost, f"the check no longer tries {', '.join(missing[:MOST_MISSING])}{more}")
    before, after = (None if record.agreement is None else record.agreement.error_ratio for record in (base, candidate))
    if before is not None and after is not None:
        kind, limit = Kind.same, before + thresholds.allowed(*key, ERROR_RATIO)
        words = f"the largest error / tolerance is {significant(after, 2)}, before {significant(before, 2)}"
        if not has_same_inputs:
            limit = max(limit, OTHER_INPUTS * before)
            words = f"{words} on other inputs (give both runs the same --seed to judge it closely)"
        if after > limit:
            kind, words = Kind.grown, f"{words}; it may grow to {significant(limit, 2)}"
        yield ruling(key, ERROR_RATIO, kind, words, base=before, candidate=after)
    if base.operators is None:
        return
    ran = base.operators.observed or "none"
    if candidate.operators is None:
        yield ruling(key, BACKEND, Kind.lost, "the operators that run are no longer observed", base=ran)
        return
    runs = candidate.operators.observed or "none"
    kind = Kind.same if ran == runs else Kind.changed
    words = f"{runs} as before" if ran == runs else f"another backend ran: {runs}, before {ran}"
    yield ruling(key, BACKEND, kind, words, base=ran, candidate=runs)


def _numbers_of(record: Record) -> dict[str, tuple[float, str]]:
    """Noise-free numbers of a record with their units; new metrics are included automatically."""
    known: dict[str, tuple[float, str]] = {}
    if record.operators is not None:
        known[NUM_OPERATORS] = num_operators(record.operators), ""
    if record.executed_flops is not None:
        known[EXECUTED_FLOPS] = record.executed_flops, "flops"
    for measurement in record.measurements:
        if measurement.samples and not measurement.metric.startswith(LATENCY):
            known[measurement.metric] = median(Samples.of(measurement.samples).value), measurement.unit
    return known


def _numbers(key: Key, base: Record, candidate: Record, thresholds: Thresholds) -> Iterator[Ruling]:
    """Compare noise-free numbers: none may disappear or grow by more than its threshold."""
    now = _numbers_of(candidate)
    for metric, (before, unit) in _numbers_of(base).items():
        if metric not in now:
            if metric != NUM_OPERATORS:  # the ruling on the backend reports lost operators
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
