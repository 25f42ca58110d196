"""The decision of a gate on two runs, or on two sides of one session: validity, rulings, and one outcome.

What is certain comes from certain.py next to it. Times have noise: effects are built here, between two separate runs or
between the two sides, and `statistics.verdicts.judge` decides. The words of a judgement are made here, too.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from attnbench.analysis.comparisons import by_side, compared, noise_floors, whole_effect
from attnbench.analysis.gate import certain, machine
from attnbench.analysis.gate.certain import Match, key_of, match_records, match_runs, tried
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
from attnbench.statistics import verdicts
from attnbench.statistics.intervals import Estimate, median_estimate
from attnbench.statistics.verdicts import (
    CELLS,
    WHOLE,
    Effect,
    Judgement,
    Policy,
    Reason,
    effect_between_runs,
    margin,
    mean_between_runs,
)
from attnbench.storage.records import FALSE_SHARE, LATENCY, Record, Status, Verdict
from attnbench.units import percent

REFUSED = (Reason.noise_floor, Reason.smallest_effect)
"""Reasons for which a threshold that a rule asks for cannot be judged."""
Cell = tuple[Match, Effect, dict[str, Any]]
"""A cell, what its times show, and what a ruling shows of base and candidate, with its unit."""
EVERYTHING = (EVERY, EVERY)
FARTHEST = 9.0
"""Larger differences are not shown as percents."""
WHOLE_CHECK = ("normal", "needles", "large", "equal")
"""The probes of a whole check (checking/probes.py); a workload on which one says nothing tries fewer."""


def judge(base: Results, candidate: Results, thresholds: Thresholds | None = None) -> Decision:
    """Compare two stored runs.

    Raises:
        ValueError: one of them compared two sides.
    """
    for results in (base, candidate):
        if results.plan.sides is not None:
            words = f"{results.run} compared two sides, and is judged by itself and against no other run"
            raise ValueError(f"{words}: give it alone, as in attnbench gate {results.run}")
    asked = thresholds or Thresholds()
    matches = match_runs(base, candidate)
    rulings, suite = between_runs(base, candidate, matches, asked)
    if list(base.environments) == list(candidate.environments):  # between machines, more is allowed anyway
        change = machine.between(base, candidate)
        rulings, suite = [machine.explained(each, change) for each in rulings], machine.explained(suite, change)
    return conclude(
        (side(base), side(candidate)),
        matches,
        (rulings, suite),
        asked,
        notes=list(_notes(base, candidate, asked)),
        invalid=[*invalid_reasons(base, asked, "the base"), *invalid_reasons(candidate, asked, "the candidate")],
        is_cut_short=candidate.elapsed_s is None or base.elapsed_s is None,
    )


def judge_sides(results: Results, thresholds: Thresholds) -> Decision:
    """The decision on a run that compared two states of the code (`attnbench compare rev:main rev:HEAD`).

    Pairs inside blocks show more than two separate runs can.
    """
    sides = results.plan.sides
    assert sides is not None
    matches, cells = match_records(*by_side(results)), [(cell.record, cell.effect) for cell in compared(results)]
    policy = verdicts.within(CELLS, results.plan.false_share)
    timed = side_by_side(cells, matches, thresholds, policy, noise_floors(results), is_apart=sides.is_apart)
    judged = whole(whole_effect(results), thresholds, [key_of(record) for record, _ in cells], results.plan.false_share)
    invalid = list(invalid_reasons(results, thresholds, "the session"))
    if sides.is_apart:  # two environments are what was asked for
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
        notes=[f"{name} is gone: {reason}" for name, reason in sides.lost.items()],
        invalid=invalid,
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
    is_cut_short: bool = False,
) -> Decision:
    """One decision of what is certain about the cells and the rulings on time, that on the suite last.

    What is certain stays certain in a session whose times are not valid, so that a finding comes first; only in a run
    that was cut short is a lost cell no finding.
    """
    rulings, suite = timed
    if invalid:  # that a time is missing, or the reference's, stays
        unjudged = {"kind": Kind.undecided, "outcome": OUTCOMES[Kind.undecided]}
        *rulings, suite = (
            msgspec.structs.replace(
                each, **unjudged, words=f"not judged, since the session is not valid; seen: {each.words}"
            )
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
        notes=(*notes, *thresholds.notes([each.key for each in matches], metrics)),
        invalid=tuple(invalid),
    )


def _without_findings(rulings: Sequence[Ruling], suite: Ruling, thresholds: Thresholds) -> tuple[Outcome, str]:
    if not any(ruling.metric == STATUS and ruling.base == ruling.candidate == Status.ok for ruling in rulings):
        return Outcome.inconclusive, "nothing could be compared: no cell is ok on both sides"
    timed = [
        ruling
        for ruling in rulings
        if ruling.metric == LATENCY and (ruling.effect is not None or ruling.kind is not Kind.same)  # not the reference
    ]
    num_judged = sum(ruling.outcome is not Outcome.inconclusive for ruling in timed)
    words = f"{num_judged} of {len(timed)} times could be judged"
    refused = sum(ruling.reason in REFUSED for ruling in (*rulings, suite))
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
    """Which run this is."""
    return Side(
        run=results.run,
        commit=results.started.commit,
        time=results.started.time,
        fingerprint="+".join(results.environments),
    )


def invalid_reasons(results: Results, thresholds: Thresholds, name: str) -> Iterator[str]:
    """Why the times of a run are not valid."""
    if results.elapsed_s is None:
        yield f"{name} did not come to its end: go on with {results.plan.resume_command(results.run)}"
    if results.num_lost:
        yield f"{name} is what is left of a damaged one, in {LOST.format(results.num_lost)}"
    if len(results.environments) > 1:
        yield f"{name} saw {len(results.environments)} environments: the machine changed during the run"
    if results.num_discarded > thresholds.discarded_share * results.num_blocks:
        share = f"{results.num_discarded} of {results.num_blocks} blocks"
        yield f"in {name} {share} are discarded because of interference: other work disturbed the machine"


def _notes(base: Results, candidate: Results, thresholds: Thresholds) -> Iterator[str]:
    """What a reader has to know in addition to the rulings."""
    reference = candidate.plan.baseline
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
        yield from machine.differences(base, candidate)
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
    """The two hosts of each cell that was not measured on the same one in both runs."""
    before = {key_of(record): record.host for record in base.records}
    both = ((before.get(key_of(record), record.host), record.host) for record in candidate.records)
    return [(old, new) for old, new in both if old != new]


def between_runs(
    base: Results, candidate: Results, matches: Sequence[Match], thresholds: Thresholds
) -> tuple[list[Ruling], Ruling]:
    """The rulings on the times of two separate runs, and the one on all of them together.

    On different machines or with different versions, ratios differ by more. Runs that were asked for other things have
    no times to compare.
    """
    is_elsewhere = list(base.environments) != list(candidate.environments) or bool(moved_cells(base, candidate))
    differ = [
        f"{name} ({getattr(base.plan, name)} and {getattr(candidate.plan, name)})"
        for name in ("baseline", "cache", "launch", "pace", "allocator")
        if getattr(base.plan, name) != getattr(candidate.plan, name)
    ]
    obstacle = f"the runs differ in {', '.join(differ)}" if differ else ""
    before, after = ({key_of(cell.record): cell for cell in compared(results)} for results in (base, candidate))
    least_floor = thresholds.elsewhere if is_elsewhere else 0.0
    cells: list[Cell] = []
    others: list[Ruling] = []
    by_workload: dict[str, list[Estimate]] = {}
    for match in matches:
        old, new = match.base, match.candidate
        if old is None or new is None or not (old.status is new.status is Status.ok) or not old.measurement(LATENCY):
            continue
        earlier, later = before.get(key_of(old)), after.get(match.key)
        values = {"unit": "s"} if is_elsewhere else _medians(match)
        if obstacle or earlier is None or later is None:
            others.append(_not_compared(new, values, candidate.plan.baseline, obstacle))
            continue
        effect = effect_between_runs(earlier, later, thresholds.between_runs, least_floor)
        allowed = max(thresholds.allowed(*match.key, LATENCY), least_floor)
        is_asked = thresholds.asked(*match.key, LATENCY) is not None and not is_elsewhere
        effect = replace(effect, allowed=allowed, lowest=effect.margin if is_asked else 0.0)
        if is_elsewhere:
            values = {"base": earlier.ratio.point, "candidate": later.ratio.point, "unit": "x"}
        cells.append((match, effect, values))
        if effect.ratio.standard_error is not None and effect.num_processes >= thresholds.fewest_epochs:
            by_workload.setdefault(match.key[0], []).append(effect_between_runs(earlier, later, 0.0).ratio)
    policy = Policy(
        is_paired=False,
        fewest_processes=thresholds.fewest_epochs,
        detectable=max(thresholds.see, 2 * least_floor),
    )
    rulings = [*_judged(cells, policy, thresholds), *others]
    if not by_workload:
        return rulings, ruling(EVERYTHING, LATENCY, Kind.undecided, "no time could be judged")
    asked_of_all = thresholds.asked_of_all([match.key for match, _, _ in cells], LATENCY)
    allowed = max(ALLOWED[LATENCY] if asked_of_all is None else asked_of_all, least_floor)
    mean = replace(mean_between_runs(by_workload.values(), thresholds.between_runs, least_floor), allowed=allowed)
    lead = f"geometric mean over {sum(map(len, by_workload.values()))} times: "
    (judged,) = verdicts.judge([mean], replace(policy, fewest_processes=0, detectable=thresholds.see))
    return rulings, _ruling(EVERYTHING, judged, lead=lead)


def _not_compared(record: Record, values: Mapping[str, Any], reference: str, obstacle: str) -> Ruling:
    """The ruling on a time of which there is no ratio in both runs."""
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


def side_by_side(  # noqa: PLR0913 - the effects, and what bounds them
    cells: Sequence[tuple[Record, Effect]],
    matches: Iterable[Match],
    thresholds: Thresholds,
    policy: Policy,
    floors: Mapping[str, Estimate],
    *,
    is_apart: bool = False,
) -> list[Ruling]:
    """The rulings on the times of a session with two sides.

    `cells` are the candidate's records with their effects, `policy` is the session's, `floors` are by workload id
    (comparisons.noise_floors), and `is_apart` says that each side had processes of its own.

    The lowest threshold that can be judged is how far from 1 the ratio of identical code may seem. The base's A/A
    control shows it. Where sides are apart, the control lies in the base's own process, and shows nothing of what
    processes differ by; the interval of the cell itself, which counts processes, does.
    """
    of_key = {match.key: match for match in matches}
    found: list[Cell] = []
    for record, effect in cells:
        match, asked = of_key[key_of(record)], thresholds.asked(*key_of(record), LATENCY)
        lowest, half = margin(floors.get(record.workload.id), 0.0), effect.ratio.half_width
        if is_apart and half is not None:
            lowest = max(lowest, math.expm1(half))
        found.append((match, replace(effect, allowed=asked, lowest=lowest), _medians(match)))
    return _judged(found, replace(policy, detectable=thresholds.see), thresholds)


def _judged(cells: Sequence[Cell], policy: Policy, thresholds: Thresholds) -> list[Ruling]:
    judged = verdicts.judge([effect for _, effect, _ in cells], policy)
    return [
        suspected(_ruling(match.key, each, **values), match, thresholds)
        for (match, _, values), each in zip(cells, judged, strict=True)
    ]


def whole(
    effect: Effect | None, thresholds: Thresholds, cells: Collection[Key], false_share: float = FALSE_SHARE
) -> Ruling:
    """The ruling on a whole session with two sides; what rules allow to each of its cells is allowed to it."""
    if effect is None:
        return ruling(EVERYTHING, LATENCY, Kind.undecided, "nothing can be said of the whole")
    policy = verdicts.within(WHOLE, false_share)
    (judged,) = verdicts.judge([replace(effect, allowed=thresholds.asked_of_all(cells, LATENCY))], policy)
    return _ruling(EVERYTHING, judged, lead="geometric mean: ")


def suspected(made: Ruling, match: Match, thresholds: Thresholds) -> Ruling:
    """The same, or a finding where it is too good to be taken over: code that computes less is faster, too."""
    if made.kind is not Kind.faster or made.effect is None or made.effect >= 1 - thresholds.suspicious:
        return made
    assert match.candidate is not None
    agreement = match.candidate.agreement
    if agreement is not None and agreement.agrees:
        probes = {probe.probe for probe in agreement.probes}
        before = tried(match.base.agreement if match.base else None)
        if set(WHOLE_CHECK) <= probes or (before and before <= tried(agreement) and len(probes) > 1):  # as the base was
            words = f"{made.words}; more than {100 * thresholds.suspicious:g} %, and its check in this run was whole"
            return msgspec.structs.replace(made, words=words)
    words = f"{made.words}: too good to be accepted without a check of its own; run it with its check"
    return msgspec.structs.replace(made, kind=Kind.suspicious, outcome=Outcome.finding, words=words)


def _medians(match: Match) -> dict[str, Any]:
    """Seconds of a call on both sides."""
    sides = {"base": match.base, "candidate": match.candidate}
    samples = {name: () if record is None else record.samples(LATENCY) for name, record in sides.items()}
    return {"unit": "s"} | {name: median_estimate(taken).point for name, taken in samples.items() if taken}


def _ruling(key: Key, judged: Judgement, lead: str = "", **values: Any) -> Ruling:  # noqa: ANN401 - as Ruling has them
    ratio = judged.effect.ratio
    return ruling(
        key,
        LATENCY,
        Kind.same if judged.verdict is Verdict.equivalent else Kind(judged.verdict),
        lead + words(judged),
        reason=judged.reason,
        effect=ratio.point,
        low=ratio.low,
        high=ratio.high,
        smallest=judged.detectable,
        **values,
    )


def words(judged: Judgement) -> str:
    """A judgement in words, with the reason, and what to do where there is no verdict."""
    effect, change, allowed = judged.effect, _change(judged.effect.ratio), judged.effect.allowed
    if judged.verdict is Verdict.undecided:
        return _undecided(judged)
    if judged.verdict is Verdict.faster:
        return f"faster: {change}"
    if judged.verdict is Verdict.slower:
        return f"slower: {change}" + ("" if allowed is None else f"; allowed is {percent(max(allowed, effect.margin))}")
    if effect.is_within and effect.e_apart >= judged.needed.agree and allowed != math.inf:
        return f"equivalent: {change}"
    if allowed is not None and (allowed == math.inf or not judged.would_show):
        return f"{change}; {'any growth is allowed' if allowed == math.inf else f'allowed is {percent(allowed)}'}"
    return f"{'not clearly slower' if effect.seems_slower else 'no slower'}: {change}"


def _undecided(judged: Judgement) -> str:
    effect, policy = judged.effect, judged.policy
    if judged.reason is Reason.few_processes:
        measured = f"measured in {processes(effect.num_processes)}"
        more = "raise num_epochs in the sweep file, and --rounds to as many or more"
        return f"{measured}; a gate judges from {policy.fewest_processes} in each run on: {more}"
    asked = effect.allowed or 0.0
    if judged.reason is Reason.noise_floor:
        where = "in this session" if policy.is_paired else "between two separate runs"
        why = f"identical code may seem {percent(effect.lowest)} apart {where}; raise it, or measure longer"
        return f"a threshold of {percent(asked)} cannot be judged: {why}"
    if judged.reason is Reason.smallest_effect:
        why = f"differences below {percent(effect.smallest)} count as none in this session"
        return f"a threshold of {percent(asked)} cannot be judged: {why}; " + (
            f"compare with --smallest-effect {asked:g}" if asked else "raise it"
        )
    show = "too few measurements to show any difference"
    if judged.detectable is not None:
        show = f"differences above {reach(judged.detectable)} would show"
    return f"undecided: {_change(effect.ratio)}; {show}" + ("" if policy.is_paired else "; run with more --rounds")


def reach(smallest: float) -> str:
    """The smallest slowdown that would have been found, in words."""
    return percent(smallest) if smallest < FARTHEST else f"{FARTHEST + 1:g} times the time"


def _change(ratio: Estimate) -> str:
    """A ratio as a change with its interval: "+5.2 % (+3.0 to +7.5)"."""
    point, low, high = (
        None if end is None else f"{100 * (end - 1):+.1f}" for end in (ratio.point, ratio.low, ratio.high)
    )
    return f"{point} %" + ("" if low is None else f" ({low} to {high})")


def processes(number: int) -> str:
    """How many processes, in words."""
    return "1 process" if number == 1 else f"{number} processes"
