"""Rulings on a cell's noise-free facts in two states of the code: status, check, backend, error, FLOPs, memory."""

import math
from collections.abc import Iterator

from attnbench.analysis.breakdown import num_operators
from attnbench.analysis.gate.rulings import (
    BACKEND,
    CHECK,
    ERROR_RATIO,
    EXECUTED_FLOPS,
    NUM_OPERATORS,
    STATUS,
    Kind,
    Ruling,
    Thresholds,
    ruling,
)
from attnbench.analysis.results import Results
from attnbench.analysis.sides import Match, by_side, matched
from attnbench.statistics.intervals import median
from attnbench.storage.records import FIRST_CALL, LATENCY, Agreement, Record, Status
from attnbench.storage.samples import Samples
from attnbench.units import sanitize_line, show

MOST_MISSING = 3  # largest number of missing tensors and rules that a ruling names
Numbers = dict[str, tuple[float, str]]  # numbers with their units, by metric


def rulings(match: Match, thresholds: Thresholds, *, has_same_inputs: bool = True) -> Iterator[Ruling]:
    """Yield the rulings on noise-free facts of a cell; errors are compared only if both sides had the same inputs."""
    base, candidate = match.base, match.candidate
    now, before = (None if record is None else str(record.status) for record in (candidate, base))
    words = f"{_described(candidate)}; before: {_described(base)}"
    yield ruling(match.key, STATUS, _change_of_status(base, candidate), words, base=before, candidate=now)
    if match.is_ok:
        assert base is not None
        assert candidate is not None
        yield from _facts(match, base, candidate)
        before_numbers = _numbers_of(base)
        if not has_same_inputs:
            before_numbers.pop(ERROR_RATIO, None)
        yield from _numbers(match, before_numbers, _numbers_of(candidate), thresholds)


def changed(results: Results) -> list[str]:
    """List the cells whose results differ between the two sides of a session, one line each; times are not compared.

    Both sides get the same inputs, so a different error means a different answer. Predicted results are left out, and
    so are facts that are unknown on one side, such as the memory of a wrong answer.
    """
    lines = []
    for match in matched(*by_side(results)):
        both = [] if any(record.is_predicted for record in match.records) else rulings(match, Thresholds())
        known = [one for one in both if one.base != one.candidate and None not in {one.base, one.candidate}]
        parts = ["{} {}, now {}".format(one.metric, *_both(one.base, one.candidate, one.unit)) for one in known]
        if parts:
            lines.append(sanitize_line(f"{match}: {'; '.join(parts)}"))
    return lines


def _both(base: float | str | None, candidate: float | str | None, unit: str) -> tuple[str, str]:
    """Format two values of a fact; numbers get four digits, or more if they would look equal."""
    if isinstance(base, str) or isinstance(candidate, str):
        return str(base), str(candidate)
    pairs = [(_shown(base, unit, digits), _shown(candidate, unit, digits)) for digits in (4, 6, 9, 17)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])


def _shown(value: float | None, unit: str, digits: int) -> str:
    return show(value, unit, digits=digits) if unit else f"{value:,.{digits}g}"


def _change_of_status(base: Record | None, candidate: Record | None) -> Kind:
    """Return the kind of change of a cell's status; a side without a record does not have the cell."""
    if candidate is None:
        return Kind.lost
    if base is None:
        return Kind.failed if candidate.is_finding else Kind.new
    if candidate.is_finding:
        if not base.is_finding:
            return Kind.failed
        return Kind.same if base.status is candidate.status and _reason(base) == _reason(candidate) else Kind.changed
    if base.status is candidate.status:
        return Kind.same
    if candidate.status is Status.ok:
        return Kind.fixed if base.is_finding else Kind.new
    if candidate.is_predicted:  # a prediction is no evidence
        return Kind.undecided
    return Kind.lost if base.status is Status.ok or base.is_finding else Kind.same


def _described(record: Record | None) -> str:
    if record is None:
        return "not in the run"
    return f"{record.status} ({record.message})" if record.message else str(record.status)


def _reason(record: Record) -> tuple[str, ...]:
    """Return what identifies a failure, to compare failures of two runs.

    It is a failed check's mistakes, step and broken rules; for other failures, the message up to its first colon.
    """
    agreement = record.agreement
    if agreement is None or agreement.agrees:
        return (record.message.partition(":")[0],)
    return (*agreement.mistakes, agreement.step, *(rule.rule for rule in agreement.broken_rules))


def _tried(agreement: Agreement | None) -> set[str]:
    """Return the names of the tensors that a check compared, and of the rules that it tried."""
    if agreement is None:
        return set()
    compared = {f"{tensor.tensor} on {probe}" for probe, tensor in agreement.tensors()}
    return compared | {f"the rule {rule.rule}" for rule in agreement.rules}


def _facts(match: Match, base: Record, candidate: Record) -> Iterator[Ruling]:
    """Yield rulings on parts of the check that are no longer tried, and on the backend that ran."""
    if missing := sorted(_tried(base.agreement) - _tried(candidate.agreement)):
        more = " and more" if len(missing) > MOST_MISSING else ""
        words = f"the check no longer tries {', '.join(missing[:MOST_MISSING])}{more}"
        yield ruling(match.key, CHECK, Kind.lost, words)
    if base.operators is None:
        return
    before = base.operators.observed or "none"
    if candidate.operators is None:
        yield ruling(match.key, BACKEND, Kind.lost, "the operators that run are no longer observed", base=before)
        return
    now = candidate.operators.observed or "none"
    kind = Kind.same if before == now else Kind.changed
    yield ruling(match.key, BACKEND, kind, f"{now} ran, before {before}", base=before, candidate=now)


def _numbers_of(record: Record) -> Numbers:
    """Return the noise-free numbers of a record with their units, by metric; new metrics are included automatically."""
    known = Numbers()
    if record.agreement is not None and record.agreement.error_ratio is not None:
        known[ERROR_RATIO] = record.agreement.error_ratio, ""
    if record.operators is not None:
        known[NUM_OPERATORS] = num_operators(record.operators), ""
    if record.executed_flops is not None:
        known[EXECUTED_FLOPS] = record.executed_flops, "flops"
    for measurement in record.measurements:
        if measurement.samples and not measurement.metric.startswith((LATENCY, FIRST_CALL)):
            known[measurement.metric] = median(Samples.of(measurement.samples).value), measurement.unit
    return known


def _numbers(match: Match, base: Numbers, candidate: Numbers, thresholds: Thresholds) -> Iterator[Ruling]:
    """Yield rulings on noise-free numbers: none may disappear, or grow by more than its threshold."""
    for metric, (before, unit) in base.items():
        if metric not in candidate:
            if metric not in {NUM_OPERATORS, ERROR_RATIO}:  # the rulings on backend and check report these
                yield ruling(match.key, metric, Kind.lost, f"{metric} is no longer known", base=before, unit=unit)
            continue
        after, allowed = candidate[metric][0], thresholds.allowed(match.key, metric)
        low, high = before * (1 - allowed), before * (1 + allowed)
        words = f"{show(after, unit)}, before {show(before, unit)}"
        if metric == ERROR_RATIO:
            low, high = 0.0, before + allowed
        kind = Kind.same
        if after > high:
            kind, words = Kind.grown, f"{words}; at most {show(high, unit)} is allowed"
        elif after < low:
            kind = Kind.shrunk
        effect = after / before if before else 1.0 if after == before else math.inf
        known = effect if math.isfinite(effect) else None
        values = {"base": float(before), "candidate": float(after)}
        yield ruling(match.key, metric, kind, words, **values, unit=unit, effect=known)
