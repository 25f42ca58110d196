"""The decision of a gate on two runs, or on two sides of one session: validity, rulings, and one outcome."""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from attnbench.analysis.comparisons import effects, noise_floors, policy
from attnbench.analysis.gate import certain, times
from attnbench.analysis.gate.cells import Match, key_of, match, match_runs
from attnbench.analysis.gate.rulings import EVERY, LATENCY, OUTCOMES, STATUS, Decision, Kind, Outcome, Ruling, Side
from attnbench.analysis.gate.thresholds import Thresholds
from attnbench.analysis.overall import by_side, whole_effect
from attnbench.analysis.results import Results
from attnbench.plugins import name_of
from attnbench.statistics.verdicts import Reason
from attnbench.storage.records import Status

REFUSED = (Reason.noise_floor, Reason.smallest_effect)
"""Reasons for which a threshold that a rule asks for cannot be judged."""


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
    is_elsewhere = fingerprints(base) != fingerprints(candidate)
    differ = [
        f"{name} ({getattr(base.plan, name)} and {getattr(candidate.plan, name)})"
        for name in ("baseline", "cache", "allocator")
        if getattr(base.plan, name) != getattr(candidate.plan, name)
    ]
    obstacle = f"the runs differ in {', '.join(differ)}" if differ else ""
    timed, suite = times.between_runs(base, candidate, matches, asked, obstacle=obstacle, is_elsewhere=is_elsewhere)
    return conclude(
        (side(base), side(candidate)),
        matches,
        (timed, suite),
        asked,
        notes=list(_notes(base, candidate, asked, is_elsewhere=is_elsewhere)),
        invalid=[*invalid_reasons(base, asked, "the base"), *invalid_reasons(candidate, asked, "the candidate")],
        is_cut_short=candidate.elapsed_s is None or base.elapsed_s is None,
    )


def judge_sides(results: Results, thresholds: Thresholds) -> Decision:
    """The decision on a run that compared two states of the code (`attnbench compare rev:main rev:HEAD`).

    Pairs inside blocks show more than two separate runs can.
    """
    sides = results.plan.sides
    assert sides is not None
    matches, cells = match(*by_side(results)), effects(results)
    timed = times.side_by_side(
        cells, matches, thresholds, policy(results), noise_floors(results), is_apart=sides.is_apart
    )
    whole = times.whole(whole_effect(results), thresholds, [key_of(record) for record, _ in cells])
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
        (timed, whole),
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
    if refused:
        return Outcome.inconclusive, f"{refused} of the thresholds asked for cannot be judged; {words}"
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
        fingerprint="+".join(fingerprints(results)),
    )


def fingerprints(results: Results) -> list[str]:
    """The environments that a run saw, in order; normally one."""
    found = (record.environment.fingerprint for record in results.records if record.environment is not None)
    return list(dict.fromkeys(found))


def invalid_reasons(results: Results, thresholds: Thresholds, name: str) -> Iterator[str]:
    """Why the times of a run are not valid."""
    if results.elapsed_s is None:
        sides = results.plan.sides
        how = f"run --resume {results.run}" if sides is None else f"compare --resume {results.run}{sides.build_option}"
        yield f"{name} did not come to its end: go on with attnbench {how}"
    if len(fingerprints(results)) > 1:
        yield f"{name} saw {len(fingerprints(results))} environments: the machine changed during the run"
    if results.num_discarded > thresholds.discarded_share * results.num_blocks:
        share = f"{results.num_discarded} of {results.num_blocks} blocks"
        yield f"in {name} {share} are discarded because of interference: other work disturbed the machine"


def _notes(base: Results, candidate: Results, thresholds: Thresholds, *, is_elsewhere: bool) -> Iterator[str]:
    """What a reader has to know in addition to the rulings."""
    reference = candidate.plan.baseline
    if base.run == candidate.run:
        yield "both are the same run"
    if is_elsewhere:
        both = " and ".join("+".join(fingerprints(results)) or "none" for results in (base, candidate))
        yield (
            f"the runs come from different machines or versions (fingerprints {both}): besides what is certain, only "
            f"ratios to {reference} are compared, and growth of up to {100 * thresholds.elsewhere:g} % is put down to "
            "the machine"
        )
    before, after = (
        {name_of(spec): digest for spec, digest in results.plan.digests.items()} for results in (base, candidate)
    )
    if before.get(base.plan.baseline, "") != after.get(reference, ""):
        yield f"the source of the reference {reference} has changed: every ratio to it may move with it"
