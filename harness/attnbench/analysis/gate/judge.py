"""Two runs judged: are they valid, which cells are which, what is certain, what time says, and one decision."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from attnbench.analysis.gate import cells, certain, times
from attnbench.analysis.gate.belief import believed
from attnbench.analysis.gate.cells import Couple, Key
from attnbench.analysis.gate.rulings import EVERY, LATENCY, STATUS, Decision, Kind, Outcome, Ruling, Side
from attnbench.analysis.gate.thresholds import ALLOWED, Thresholds
from attnbench.analysis.results import Results
from attnbench.plugins import name_of
from attnbench.statistics.intervals import median_estimate
from attnbench.storage.records import Record, Status


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What of two runs' times may be compared."""

    obstacle: str  # why none may; empty: they may
    is_elsewhere: bool  # another machine or other versions: only ratios to the reference


def judge(base: Results, candidate: Results, thresholds: Thresholds | None = None) -> Decision:
    """Compare two stored runs.

    Raises:
        ValueError: one of them compared two sides.
    """
    _require_one_state(base, candidate)
    asked = thresholds or Thresholds()
    coupled = cells.couples(base, candidate)
    terms = _terms(base, candidate)
    reasons = [*ailments(base, asked, "the base"), *ailments(candidate, asked, "the candidate")]
    rulings = [ruling for couple in coupled for ruling in certain.rulings(couple, asked)]
    timed, whole = _times(base, candidate, coupled, asked, terms)
    if reasons:
        timed, whole = [voided(ruling) for ruling in timed], voided(whole)
    return conclude(
        (side(base), side(candidate)),
        (*rulings, *timed),
        whole,
        asked,
        notes=tuple(_notes(base, candidate, coupled, asked, terms)),
        invalid=tuple(reasons),
        is_cut_short=candidate.elapsed_s is None or base.elapsed_s is None,
    )


def _require_one_state(*runs: Results) -> None:
    """Raises ValueError where a run holds two states of the code: its times are of both, side by side."""
    for results in runs:
        if results.plan.sides is not None:
            told = f"{results.run} compared two sides, and is judged by itself and against no other run"
            raise ValueError(f"{told}: give it alone, as in attnbench gate {results.run}")


def conclude(  # noqa: PLR0913 - a decision and what may stand beside it
    sides: tuple[Side, Side],
    rulings: Sequence[Ruling],
    suite: Ruling,
    thresholds: Thresholds,
    *,
    notes: Sequence[str] = (),
    invalid: Sequence[str] = (),
    is_cut_short: bool = False,
) -> Decision:
    """One decision of many rulings.

    What is certain stays certain in a session whose times are worth nothing, so that a finding comes first; only in a
    run that was cut short is a lost cell no finding.
    """
    outcome, words = _outcome(rulings, suite, thresholds, invalid, is_cut_short=is_cut_short)
    return Decision(
        base=sides[0],
        candidate=sides[1],
        outcome=outcome,
        words=words,
        suite=suite,
        rulings=tuple(rulings),
        notes=tuple(notes),
        invalid=tuple(invalid),
    )


def _outcome(
    rulings: Sequence[Ruling], suite: Ruling, thresholds: Thresholds, invalid: Sequence[str], *, is_cut_short: bool
) -> tuple[Outcome, str]:
    findings = _counted([*rulings, suite])
    if invalid and (is_cut_short or not findings):
        return Outcome.invalid, "; ".join(invalid)
    if findings:
        return Outcome.finding, findings
    return _without_findings(rulings, suite, thresholds)


def _without_findings(rulings: Sequence[Ruling], suite: Ruling, thresholds: Thresholds) -> tuple[Outcome, str]:
    if not any(map(_is_compared, rulings)):
        return Outcome.inconclusive, "nothing could be compared: no cell is ok on both sides"
    refused = sum(ruling.kind is Kind.refused for ruling in (*rulings, suite))
    timed = [ruling for ruling in rulings if ruling.metric == LATENCY and ruling.kind is not Kind.reference]
    num_judged = sum(ruling.outcome is not Outcome.inconclusive for ruling in timed)
    told = f"{num_judged} of {len(timed)} times could be judged"
    if refused:
        return Outcome.inconclusive, f"{refused} of the thresholds asked for cannot be judged; {told}"
    if num_judged < thresholds.judged_share * len(timed):
        return Outcome.inconclusive, f"{told}, fewer than {100 * thresholds.judged_share:g} %"
    if any(ruling.outcome is Outcome.improved for ruling in (*rulings, suite)):
        return Outcome.improved, f"nothing got worse, something got better; {told}"
    return Outcome.passed, f"nothing got worse; {told}"


def _is_compared(ruling: Ruling) -> bool:
    """Whether it says that a cell is ok on both sides: of no other is there anything to compare."""
    return ruling.metric == STATUS and ruling.base == ruling.candidate == Status.ok


def _counted(rulings: Sequence[Ruling]) -> str:
    """The findings by kind, or nothing."""
    kinds = Counter(
        "the suite as a whole" if ruling.workload == EVERY else f"{ruling.kind}"
        for ruling in rulings
        if ruling.outcome is Outcome.finding
    )
    return ", ".join(name if name.startswith("the") else f"{number} {name}" for name, number in kinds.items())


def side(results: Results) -> Side:
    """Who a run is."""
    return Side(
        run=results.run,
        commit=results.started.commit,
        time=results.started.time,
        fingerprint="+".join(fingerprints(results)),
    )


def fingerprints(results: Results) -> list[str]:
    """The environments that a run saw, in order; one, if all is well."""
    found = (record.environment.fingerprint for record in results.records if record.environment is not None)
    return list(dict.fromkeys(found))


def ailments(results: Results, thresholds: Thresholds, name: str) -> Iterator[str]:
    """Why the times of a run are worth nothing."""
    if results.elapsed_s is None:
        sides = results.plan.sides
        how = f"run --resume {results.run}" if sides is None else f"compare --resume {results.run}{sides.build_option}"
        yield f"{name} did not come to its end: go on with attnbench {how}"
    if len(fingerprints(results)) > 1:
        yield f"{name} saw {len(fingerprints(results))} environments: the machine changed during the run"
    if results.num_discarded > thresholds.void_share * results.num_blocks:
        seen = f"{results.num_discarded} of {results.num_blocks} blocks"
        yield f"in {name} {seen} are discarded because of interference: other work disturbed the machine"


def _terms(base: Results, candidate: Results) -> Terms:
    differ = [
        f"{name} ({getattr(base.plan, name)} and {getattr(candidate.plan, name)})"
        for name in ("baseline", "cache", "allocator")
        if getattr(base.plan, name) != getattr(candidate.plan, name)
    ]
    obstacle = f"the runs differ in {', '.join(differ)}" if differ else ""
    return Terms(obstacle=obstacle, is_elsewhere=fingerprints(base) != fingerprints(candidate))


def _times(
    base: Results, candidate: Results, coupled: Sequence[Couple], thresholds: Thresholds, terms: Terms
) -> tuple[list[Ruling], Ruling]:
    """The rulings on time, and the suite's."""
    before, after = times.relatives(base), times.relatives(candidate)
    apart = thresholds.elsewhere if terms.is_elsewhere else 0.0
    effects: list[times.Effect] = []
    bare: list[times.Effect] = []
    others: list[Ruling] = []
    for old, new in cells.alive(coupled):
        if old.measurement(LATENCY) is None or old.status is not Status.ok or new.status is not Status.ok:
            continue
        keys = (old.workload.id, old.implementation), (new.workload.id, new.implementation)
        if terms.obstacle or keys[0] not in before or keys[1] not in after:
            others.append(_unjudged(old, new, candidate.plan.baseline, terms))
            continue
        pair = before[keys[0]], after[keys[1]]
        effects.append(times.effect(keys[1], *pair, thresholds.between_runs, apart))
        bare.append(times.effect(keys[1], *pair, 0.0))
    asked = {(each.workload, each.implementation): _asked(each, thresholds, terms) for each in effects}
    made = times.rulings(effects, asked, _shown(coupled, before, after, terms))
    agreements = {couple.key: couple for couple in coupled}
    made = [believed(ruling, agreements[ruling.workload, ruling.implementation], thresholds) for ruling in made]
    by_rules = thresholds.asked_of_all(asked, LATENCY)
    limit = max(ALLOWED[LATENCY] if by_rules is None else by_rules, apart)
    return [*made, *others], times.suite(bare, thresholds, thresholds.between_runs, limit, apart)


def _asked(each: times.Effect, thresholds: Thresholds, terms: Terms) -> times.Asked:
    by_rule = thresholds.asked(each.workload, each.implementation, LATENCY)
    allowed = thresholds.allowed(each.workload, each.implementation, LATENCY)
    return times.Asked(
        allowed=max(allowed, thresholds.elsewhere) if terms.is_elsewhere else allowed,
        is_by_rule=by_rule is not None and not terms.is_elsewhere,
        see=max(thresholds.see, 2 * thresholds.elsewhere) if terms.is_elsewhere else thresholds.see,
        fewest_epochs=thresholds.fewest_epochs,
    )


def _shown(
    coupled: Sequence[Couple], before: dict[Key, times.Relative], after: dict[Key, times.Relative], terms: Terms
) -> dict[Key, tuple[float, float, str]]:
    """What to print of each cell: seconds of a call or, of two machines, ratios to their references."""
    found: dict[Key, tuple[float, float, str]] = {}
    for old, new in cells.alive(coupled):
        keys = (old.workload.id, old.implementation), (new.workload.id, new.implementation)
        if terms.is_elsewhere and keys[0] in before and keys[1] in after:
            found[keys[1]] = before[keys[0]].ratio.point, after[keys[1]].ratio.point, "x"
        elif not terms.is_elsewhere and (both := _medians(old, new)) is not None:
            found[keys[1]] = (*both, "s")
    return found


def _medians(old: Record, new: Record) -> tuple[float, float] | None:
    measured = old.measurement(LATENCY), new.measurement(LATENCY)
    if measured[0] is None or measured[1] is None or not (measured[0].samples and measured[1].samples):
        return None
    return median_estimate(measured[0].samples).point, median_estimate(measured[1].samples).point


def _unjudged(old: Record, new: Record, reference: str, terms: Terms) -> Ruling:
    """A time that no ratio exists of."""
    kind, outcome = Kind.undecided, Outcome.inconclusive
    if new.measurement(LATENCY) is None:
        kind, outcome, words = Kind.lost, Outcome.finding, "its time is no longer measured"
    elif terms.obstacle:
        words = f"times cannot be compared: {terms.obstacle}"
    elif new.implementation == reference:
        kind, outcome = Kind.reference, Outcome.passed
        words = "the reference: other times are judged relative to it, and its own is only printed"
    else:
        words = f"there is no reference beside it: {reference} was not measured on this workload in both runs"
    both = None if terms.is_elsewhere else _medians(old, new)
    return Ruling(
        workload=new.workload.id,
        implementation=new.implementation,
        metric=LATENCY,
        kind=kind,
        outcome=outcome,
        words=words,
        base=both[0] if both else None,
        candidate=both[1] if both else None,
        unit="s",
    )


def voided(ruling: Ruling) -> Ruling:
    """A ruling on time, in a session that is not valid."""
    if ruling.kind in {Kind.reference, Kind.lost}:
        return ruling
    words = f"not judged, since the session is not valid; seen: {ruling.words}"
    return msgspec.structs.replace(ruling, kind=Kind.undecided, outcome=Outcome.inconclusive, words=words)


def _notes(
    base: Results, candidate: Results, coupled: Sequence[Couple], thresholds: Thresholds, terms: Terms
) -> Iterator[str]:
    """What a reader has to know beside the rulings."""
    if base.run == candidate.run:
        yield "both are the same run"
    if terms.is_elsewhere:
        both = f"{'+'.join(fingerprints(base)) or 'none'} and {'+'.join(fingerprints(candidate)) or 'none'}"
        yield (
            f"the runs come from different machines or versions (fingerprints {both}): besides what is certain, only "
            f"ratios to {candidate.plan.baseline} are compared, and one that grew by up to "
            f"{100 * thresholds.elsewhere:g} % is taken for the machine's"
        )
    if _source(base) != _source(candidate):
        yield f"the source of the reference {candidate.plan.baseline} has changed: every ratio to it may move with it"
    yield from thresholds.idle([couple.key for couple in coupled], cells.metrics(coupled))


def _source(results: Results) -> str:
    sources = {name_of(spec): digest for spec, digest in results.plan.digests.items()}
    return sources.get(results.plan.baseline, "")
