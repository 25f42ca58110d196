"""The decision of a gate on two runs, or on two sides of one session: validity, rulings, and one outcome.

Noise-free rulings come from certain.py. Times have noise: this module builds the effects, between two separate runs or
between the two sides, `statistics.verdict.judge` adds intervals, and this module words the judgements.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from attnbench.analysis.comparisons import by_side, doubts, num_processes, session_effects
from attnbench.analysis.gate import certain, machine
from attnbench.analysis.gate.certain import Match, key_of, tried
from attnbench.analysis.gate.rulings import (
    ALLOWED,
    EVERY,
    OUTCOMES,
    STATUS,
    Decision,
    Key,
    Kind,
    Outcome,
    Ruling,
    Side,
    Thresholds,
    ruling,
)
from attnbench.analysis.results import LOST, Results
from attnbench.plugins import name_of
from attnbench.statistics import verdict
from attnbench.statistics.effects import WHOLE
from attnbench.statistics.interference import MANY
from attnbench.statistics.intervals import median_estimate
from attnbench.statistics.verdict import FEWEST_PROCESSES, Effect, Judgement, Reason, mean_between_runs
from attnbench.storage.records import FALSE_SHARE, LATENCY, Record, Status
from attnbench.units import percent

EVERYTHING = (EVERY, EVERY)
FARTHEST = 9.0
"""Larger relative differences are not shown as percents."""
LARGEST_MARGIN = 1e6
"""Stands for infinity: any growth is allowed."""
WHOLE_CHECK = ("normal", "needles", "large", "equal")
"""Probes of a whole check (checking/probes.py). A workload on which one of them shows nothing is checked with fewer."""


def judge(base: Results, candidate: Results, thresholds: Thresholds | None = None) -> Decision:
    """Compare two stored runs.

    Raises:
        ValueError: one of the runs compared two sides.
    """
    for results in (base, candidate):
        if results.plan.sides is not None:
            words = f"{results.run} compared two sides, and is judged by itself and against no other run"
            raise ValueError(f"{words}: give it alone, as in attnbench gate {results.run}")
    asked = thresholds or Thresholds()
    has_same_inputs = base.plan.seed == candidate.plan.seed
    matches = certain.match_records(base.records, candidate.records, has_same_inputs=has_same_inputs)
    rulings, suite = between_runs(base, candidate, matches, asked)
    if list(base.environments) == list(candidate.environments):  # across machines the thresholds are wider anyway
        change = machine.between(base, candidate)
        rulings, suite = [machine.explained(each, change) for each in rulings], machine.explained(suite, change)
    return conclude(
        (side(base), side(candidate)),
        matches,
        (rulings, suite),
        asked,
        notes=list(_notes(base, candidate, asked)),
        invalid=[*invalid_reasons(base, "the base"), *invalid_reasons(candidate, "the candidate")],
        doubtful=[*(f"base: {line}" for line in doubts(base)), *(f"candidate: {line}" for line in doubts(candidate))],
        is_cut_short=candidate.elapsed_s is None or base.elapsed_s is None,
    )


def judge_sides(results: Results, thresholds: Thresholds) -> Decision:
    """Decide on a run that compared two states of the code (`attnbench compare rev:main rev:HEAD`).

    Pairs inside blocks detect smaller differences than two separate runs.
    """
    sides = results.plan.sides
    assert sides is not None
    matches = certain.match_records(*by_side(results))
    timed, judged = side_by_side(results, matches, thresholds)
    invalid = list(invalid_reasons(results, "the session"))
    if sides.is_apart:  # the user chose two environments
        invalid = [reason for reason in invalid if "environments" not in reason]
    own = side(results)
    base, candidate = (
        msgspec.structs.replace(own, run=each.given, commit=each.commit) for each in (sides.base, sides.candidate)
    )
    return conclude(
        (base, candidate),
        matches,
        (timed, judged),
        thresholds,
        notes=[measured(results), *(f"{name} is gone: {reason}" for name, reason in sides.lost.items())],
        invalid=invalid,
        doubtful=doubts(results),
        is_cut_short=results.elapsed_s is None,
    )


def conclude(  # noqa: PLR0913 - the parts of a decision
    sides: tuple[Side, Side],
    matches: Sequence[Match],
    timed: tuple[Sequence[Ruling], Ruling],
    thresholds: Thresholds,
    *,
    notes: Sequence[str] = (),
    invalid: Sequence[str] = (),
    doubtful: Sequence[str] = (),
    is_cut_short: bool = False,
) -> Decision:
    """Combine noise-free rulings and rulings on time into one decision; the ruling on the suite is last.

    Noise-free findings count even if the times of the session are invalid or doubtful. A lost cell is no finding only
    in a run that was cut short.
    """
    rulings, suite = timed
    if invalid or doubtful:  # keep rulings on missing times and on the reference
        why = "the session is not valid" if invalid else "its times are doubtful"
        unjudged = {"kind": Kind.undecided, "outcome": OUTCOMES[Kind.undecided]}
        *rulings, suite = (
            msgspec.structs.replace(each, **unjudged, words=f"not judged, since {why}; seen: {each.words}")
            if each.effect is not None
            else each
            for each in (*rulings, suite)
        )
    rulings = [*(ruling for each in matches for ruling in certain.rulings(each, thresholds)), *rulings]
    found = [ruling for ruling in (*rulings, suite) if ruling.outcome is Outcome.finding]
    kinds = Counter(str(ruling.kind) for ruling in found if ruling.workload != EVERY)
    findings = [f"{number} {kind}" for kind, number in kinds.items()]
    if len(found) > kinds.total():
        findings.append("the suite as a whole")
    if invalid and (is_cut_short or not findings):
        outcome, words = Outcome.invalid, "; ".join(invalid)
    elif findings:
        outcome, words = Outcome.finding, ", ".join(findings)
    elif doubtful:
        outcome, words = Outcome.inconclusive, doubtful[0]
    else:
        outcome, words = _without_findings(rulings, suite, thresholds)
    records = [record for each in matches for record in (each.base, each.candidate) if record is not None]
    metrics = {each.metric for record in records for each in record.measurements if not each.metric.startswith(LATENCY)}
    return Decision(
        base=sides[0],
        candidate=sides[1],
        outcome=outcome,
        words=words,
        suite=suite,
        rulings=tuple(rulings),
        notes=(*doubtful, *notes, *thresholds.notes([each.key for each in matches], metrics)),
        invalid=tuple(invalid),
    )


def _without_findings(rulings: Sequence[Ruling], suite: Ruling, thresholds: Thresholds) -> tuple[Outcome, str]:
    if not any(ruling.metric == STATUS and ruling.base == ruling.candidate == Status.ok for ruling in rulings):
        return Outcome.inconclusive, "nothing could be compared: no cell is ok on both sides"
    timed = [
        ruling
        for ruling in rulings
        if ruling.metric == LATENCY and (ruling.effect is not None or ruling.kind is not Kind.same)
    ]
    num_judged = sum(ruling.outcome is not Outcome.inconclusive for ruling in timed)
    words = f"{num_judged} of {len(timed)} times could be judged"
    refused = sum(ruling.reason is Reason.threshold for ruling in (*rulings, suite))
    explained = [ruling for ruling in (*rulings, suite) if ruling.reason is Reason.machine_state]
    if slower := sum(ruling.effect is not None and ruling.effect > 1 for ruling in explained):
        return Outcome.inconclusive, f"{slower} slower by no more than the state of the machine explains; {words}"
    if refused:
        return Outcome.inconclusive, f"{refused} of the thresholds asked for cannot be judged; {words}"
    if left_out := sum(ruling.metric == STATUS and ruling.kind is Kind.undecided for ruling in rulings):
        return Outcome.inconclusive, f"{left_out} of the cells that were ok were not tried, by a prediction; {words}"
    if num_judged < thresholds.judged_share * len(timed):
        return Outcome.inconclusive, f"{words}, fewer than {100 * thresholds.judged_share:g} %"
    if any(ruling.outcome is Outcome.improved for ruling in (*rulings, suite)):
        return Outcome.improved, f"nothing got worse, something got better; {words}"
    return Outcome.passed, f"nothing got worse; {words}"


def side(results: Results) -> Side:
    """Identify a run by name, commit, time and environment."""
    return Side(
        run=results.run,
        commit=results.started.commit,
        time=results.started.time,
        fingerprint="+".join(results.environments),
    )


def invalid_reasons(results: Results, name: str) -> Iterator[str]:
    """Reasons why the times of a run are not valid."""
    if results.elapsed_s is None:
        yield f"{name} did not come to its end: go on with {results.plan.resume_command(results.run)}"
    if results.num_lost:
        yield f"{name} is what is left of a damaged one, in {LOST.format(results.num_lost)}"
    if len(results.environments) > 1:
        yield f"{name} saw {len(results.environments)} environments: the machine changed during the run"
    if results.num_discarded > MANY * results.num_blocks:
        share = f"{results.num_discarded} of {results.num_blocks} blocks"
        yield f"in {name} {share} are discarded because of interference: other work disturbed the machine"


def measured(results: Results) -> str:
    """Describe the measurement: processes, margin (unless a rule allows more) and allocator."""
    plan, number = results.plan, num_processes(results)
    return f"times of {processes(number)}, margin {percent(plan.smallest_effect)}, allocator {plan.allocator}"


def _notes(base: Results, candidate: Results, thresholds: Thresholds) -> Iterator[str]:
    """Notes that readers need besides the rulings."""
    reference = candidate.plan.baseline
    yield measured(candidate)
    if base.run == candidate.run:
        yield "both are the same run"
    change = machine.between(base, candidate)
    if list(base.environments) == list(candidate.environments) and change.words:
        yield f"the machine was in another state: {change.words}"
    if list(base.environments) != list(candidate.environments):
        both = " and ".join("+".join(results.environments) or "none" for results in (base, candidate))
        yield (
            f"the runs come from different machines or versions (fingerprints {both}): besides what is certain, only "
            f"ratios to {reference} are compared, and growth of up to {100 * thresholds.elsewhere:g} % is put down to "
            "the machine"
        )
    elif moved := moved_cells(base, candidate):
        named = ", ".join(f"{old or 'no host'} and {new or 'no host'}" for old, new in dict.fromkeys(moved))
        yield (
            f"{len(moved)} cells were measured on other hosts than before ({named}): growth of up to "
            f"{100 * thresholds.elsewhere:g} % is put down to the machine"
        )
    before, after = (
        {name_of(spec): digest for spec, digest in results.plan.digests.items()} for results in (base, candidate)
    )
    if before.get(base.plan.baseline, "") != after.get(reference, ""):
        yield f"the source of the reference {reference} has changed: every ratio to it may move with it"


def moved_cells(base: Results, candidate: Results) -> list[tuple[str, str]]:
    """Pairs of hosts of the cells that moved to another host between the runs."""
    before = {key_of(record): record.host for record in base.records}
    both = ((before.get(key_of(record), record.host), record.host) for record in candidate.records)
    return [(old, new) for old, new in both if old != new]


def between_runs(
    base: Results, candidate: Results, matches: Sequence[Match], thresholds: Thresholds
) -> tuple[list[Ruling], Ruling]:
    """Rulings on the times of two separate runs, and one on all of them together.

    Other machines or versions get wider limits. Runs with different settings have no comparable times.
    """
    is_elsewhere = list(base.environments) != list(candidate.environments) or bool(moved_cells(base, candidate))
    differ = [
        f"{name} ({getattr(base.plan, name)} and {getattr(candidate.plan, name)})"
        for name in ("baseline", "cache", "launch", "pace", "allocator")
        if getattr(base.plan, name) != getattr(candidate.plan, name)
    ]
    obstacle = f"the runs differ in {', '.join(differ)}" if differ else ""
    before, after = (
        {(workload, arm.implementation): effect for (workload, arm), effect in session_effects(results).items()}
        for results in (base, candidate)
    )
    least = thresholds.elsewhere if is_elsewhere else 0.0
    cells: dict[Key, Timed] = {}
    others: list[Ruling] = []
    by_workload: dict[str, list[Effect]] = {}
    for match in matches:
        old, new = match.base, match.candidate
        if old is None or new is None or not (old.status is new.status is Status.ok) or not old.measurement(LATENCY):
            continue
        earlier, later = before.get(key_of(old)), after.get(match.key)
        values = {"unit": "s"} if is_elsewhere else _medians(match)
        if obstacle or earlier is None or later is None:
            others.append(_not_compared(new, values, candidate.plan.baseline, obstacle))
            continue
        if is_elsewhere:
            values = {"base": earlier.ratio, "candidate": later.ratio, "unit": "x"}
        cells[match.key] = Timed(
            match=match,
            effect=verdict.between_runs(earlier, later, thresholds.between_runs),
            allowed=max(thresholds.allowed(*match.key, LATENCY), least),
            is_asked=thresholds.asked(*match.key, LATENCY) is not None and not is_elsewhere,
            least=least,
            values=values,
        )
        if cells[match.key].effect.error is not None:
            by_workload.setdefault(match.key[0], []).append(verdict.between_runs(earlier, later, 0.0))
    see = max(thresholds.see, 2 * least)
    rulings = [*judge_times(cells, thresholds, see), *others]
    if not by_workload:
        return rulings, ruling(EVERYTHING, LATENCY, Kind.undecided, "no time could be judged")
    asked_of_all = thresholds.asked_of_all([*cells], LATENCY)
    lead = f"geometric mean over {sum(map(len, by_workload.values()))} times: "
    whole = Timed(
        effect=mean_between_runs([*by_workload.values()], thresholds.between_runs),
        allowed=max(ALLOWED[LATENCY] if asked_of_all is None else asked_of_all, least),
        least=least,
        lead=lead,
    )
    (suite,) = judge_times({EVERYTHING: whole}, thresholds, thresholds.see)
    return rulings, suite


def _not_compared(record: Record, values: Mapping[str, Any], reference: str, obstacle: str) -> Ruling:
    """Ruling on a time without a ratio in both runs."""
    kind = Kind.undecided
    if record.measurement(LATENCY) is None:
        kind, words = Kind.lost, "its time is no longer measured"
    elif obstacle:
        words = f"times cannot be compared: {obstacle}"
    elif record.implementation == reference:
        kind, words = Kind.same, "the reference: other times are judged relative to it, and its own is only printed"
    else:
        words = f"there is no reference for it: {reference} was not measured on this workload in both runs"
    return ruling(key_of(record), LATENCY, kind, words, **values)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The measured effect and the allowed growth of one cell, or of all cells together."""

    effect: Effect
    allowed: float  # relative growth
    is_asked: bool = False  # allowed by a rule of the file, not by a default
    least: float = 0.0  # relative difference that two machines explain
    match: Match | None = None  # the cell
    lead: str = ""
    values: dict[str, Any] = field(default_factory=dict)  # of base and candidate, with their unit


def side_by_side(results: Results, matches: Iterable[Match], thresholds: Thresholds) -> tuple[list[Ruling], Ruling]:
    """Rulings on the times of a session with two sides, and one on all of them together.

    The default limit is the session's margin. The limit of the whole is the smallest limit of the rules for its cells.
    """
    plan, found = results.plan, session_effects(results)
    by_key, timed = {match.key: match for match in matches}, dict[Key, Timed]()
    for key, effect in found.items():
        if key == WHOLE:
            continue
        match = by_key[key[0], key[1].implementation]
        asked = thresholds.asked(*match.key, LATENCY)
        timed[match.key] = Timed(
            match=match,
            effect=effect,
            allowed=plan.smallest_effect if asked is None else asked,
            is_asked=asked is not None,
            values=_medians(match),
        )
    if WHOLE not in found:
        none = ruling(EVERYTHING, LATENCY, Kind.undecided, "nothing can be said of the whole")
        return judge_times(timed, thresholds, None, plan.false_share), none
    asked = thresholds.asked_of_all([*timed], LATENCY)
    timed[EVERYTHING] = Timed(
        effect=found[WHOLE],
        allowed=plan.smallest_effect if asked is None else asked,
        is_asked=asked is not None,
        lead="geometric mean: ",
    )
    *rulings, suite = judge_times(timed, thresholds, None, plan.false_share)
    return rulings, suite


def judge_times(
    cells: Mapping[Key, Timed], thresholds: Thresholds, see: float | None, error: float = FALSE_SHARE
) -> list[Ruling]:
    """Judge cells together. `see` is set for two runs, which cannot show equality."""
    margins = {key: min(each.allowed, LARGEST_MARGIN) for key, each in cells.items()}
    judged = verdict.judge({key: each.effect for key, each in cells.items()}, margins, error)
    found = []
    for key, cell in cells.items():
        own = _ruling(key, judged[key], cell, see)
        found.append(own if cell.match is None else suspected(own, cell.match, thresholds))
    return found


def _ruling(key: Key, judged: Judgement, cell: Timed, see: float | None) -> Ruling:
    kind, reason, words = _decided(judged, cell, see)
    return ruling(
        key,
        LATENCY,
        kind,
        cell.lead + words,
        reason=reason,
        effect=judged.ratio,
        low=judged.low,
        high=judged.high,
        smallest=judged.detectable,
        **cell.values,
    )


def _decided(judged: Judgement, cell: Timed, see: float | None) -> tuple[Kind, Reason | None, str]:
    """The kind of change of a time, the reason if it is undecided, and both in words."""
    change, low, high, allowed = _change(judged), judged.low, judged.high, cell.allowed
    if low is None or high is None:
        if allowed == math.inf:
            return Kind.same, None, f"{change}; any growth is allowed"
        return Kind.undecided, Reason.few_processes, _too_few(judged.effect, see)
    usual = max(cell.least, min(allowed, ALLOWED[LATENCY]))  # rules that allow growth must not hide improvements
    if high < 1 and judged.ratio < 1 / (1 + usual):
        return Kind.faster, None, f"faster: {change}"
    if allowed == math.inf:
        return Kind.same, None, f"{change}; any growth is allowed"
    if low > 1 and judged.ratio > 1 + allowed:
        return Kind.slower, None, f"slower: {change}; allowed is {percent(allowed)}"
    if high <= 1 + allowed:
        is_equal = low >= 1 / (1 + allowed) and not cell.is_asked
        return Kind.same, None, f"equal within {percent(allowed)}: {change}" if is_equal else f"no slower: {change}"
    if cell.is_asked:
        why = f"a growth of up to {100 * (high - 1):.1f} % cannot be ruled out; measure longer, or raise it"
        return Kind.undecided, Reason.threshold, f"{change}: a threshold of {percent(allowed)} cannot be judged: {why}"
    show = f"differences above {reach(judged.detectable or math.inf)} would show"
    if see is not None and low <= 1 and judged.detectable is not None and judged.detectable <= see:
        return Kind.same, None, f"no slower: {change}; {show}"
    more = "" if see is None else "; run with more --rounds"
    return Kind.undecided, Reason.imprecise, f"undecided: {change}; {show}{more}"


def _too_few(effect: Effect, see: float | None) -> str:
    seen = f"measured in {processes(effect.num_measured)}; a gate judges from {FEWEST_PROCESSES}"
    return f"{seen}{'' if see is None else ' in each run'} on: give --rounds {FEWEST_PROCESSES}"


def suspected(made: Ruling, match: Match, thresholds: Thresholds) -> Ruling:
    """Turn an implausible speedup into a finding: code that computes less is faster too."""
    if made.kind is not Kind.faster or made.effect is None or made.effect >= 1 - thresholds.suspicious:
        return made
    assert match.candidate is not None
    agreement = match.candidate.agreement
    if agreement is not None and agreement.agrees:
        probes = {probe.probe for probe in agreement.probes}
        before = tried(match.base.agreement if match.base else None)
        if set(WHOLE_CHECK) <= probes or (before and before <= tried(agreement) and len(probes) > 1):  # like the base's
            words = f"{made.words}; more than {100 * thresholds.suspicious:g} %, and its check in this run was whole"
            return msgspec.structs.replace(made, words=words)
    words = f"{made.words}: too good to be accepted without a check of its own; run it with its check"
    return msgspec.structs.replace(made, kind=Kind.suspicious, outcome=Outcome.finding, words=words)


def _medians(match: Match) -> dict[str, Any]:
    """Median seconds of a call on both sides."""
    sides = {"base": match.base, "candidate": match.candidate}
    samples = {name: () if record is None else record.samples(LATENCY) for name, record in sides.items()}
    return {"unit": "s"} | {name: median_estimate(taken).point for name, taken in samples.items() if taken}


def reach(smallest: float) -> str:
    """The smallest detectable slowdown, in words."""
    return percent(smallest) if smallest < FARTHEST else f"{FARTHEST + 1:g} times the time"


def _change(judged: Judgement) -> str:
    """A ratio as a change with its interval: "+5.2 % (+3.0 to +7.5)"."""
    point, low, high = (
        None if end is None else f"{100 * (end - 1):+.1f}" for end in (judged.ratio, judged.low, judged.high)
    )
    return f"{point} %" + ("" if low is None else f" ({low} to {high})")


def processes(number: int) -> str:
    """A number of processes, in words."""
    return "1 process" if number == 1 else f"{number} processes"
