"""The decision of a gate: two states of the code, an effect for each time, a ruling for each metric, and one outcome.

The states come from two separate runs, or from the two sides of one session, whose pairs inside blocks detect smaller
differences. Noise-free rulings come from certain.py; `statistics.verdict.judge` judges all times together, and times.py
turns the judgements into rulings.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnbench.analysis.comparisons import by_side, doubts, is_doubtful, num_processes, session_effects
from attnbench.analysis.gate import certain
from attnbench.analysis.gate.certain import Match
from attnbench.analysis.gate.rulings import (
    ALLOWED,
    EVERY,
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
from attnbench.analysis.gate.times import (
    Limit,
    decided,
    explained,
    processes,
    state_change,
    suspected,
    undecided,
)
from attnbench.analysis.results import LOST, Results
from attnbench.plugins import name_of
from attnbench.statistics import verdict
from attnbench.statistics.effects import WHOLE
from attnbench.statistics.intervals import median_estimate
from attnbench.statistics.verdict import Effect, Reason, mean_between_runs
from attnbench.storage.records import FALSE_SHARE, LATENCY, Arm, Status
from attnbench.units import percent

EVERYTHING = (EVERY, EVERY)
"""Key for all cells together."""
LARGEST_MARGIN = 1e6
"""Stands for infinity: any growth is allowed."""
JUDGED_SHARE = 0.5
"""The gate is inconclusive if a smaller share of the times could be judged."""
MUST_MATCH = ("baseline", "cache", "launch", "pace", "allocator")
"""Fields of the plan that two runs must share before their times are compared."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two states of the code, ready to be judged."""

    base: Side
    candidate: Side
    matches: Sequence[Match]
    effects: Mapping[Key, Effect]  # time of the candidate over that of the base, by cell, and of all cells together
    allowed: float  # relative growth of a time without a rule
    reference: str = ""  # times of two runs are relative to this implementation, which is not judged itself
    least: float = 0.0  # relative difference that two machines explain
    see: float | None = None  # as in Limit
    error: float = FALSE_SHARE
    change: tuple[float, str] = (1.0, "")  # as in state_change
    notes: Sequence[str] = ()
    invalid: Sequence[str] = ()  # reasons why no time counts
    doubtful: Sequence[str] = ()  # reasons to distrust some times
    doubted: Collection[Key] = ()  # those times
    is_cut_short: bool = False


def judge(base: Results, candidate: Results, thresholds: Thresholds | None = None) -> Decision:
    """Compare two stored runs.

    Raises:
        ValueError: one of the runs compared two sides.
    """
    for results in (base, candidate):
        if results.plan.sides is not None:
            words = f"{results.run} compared two sides, and is judged by itself and against no other run"
            raise ValueError(f"{words}: give it alone, as in attnbench gate {results.run}")
    limits = thresholds or Thresholds()
    return conclude(_of_runs(base, candidate, limits), limits)


def judge_sides(results: Results, thresholds: Thresholds) -> Decision:
    """Decide on a run that compared two states of the code (`attnbench compare rev:main rev:HEAD`)."""
    return conclude(_of_sides(results), thresholds)


def conclude(pair: Pair, thresholds: Thresholds) -> Decision:
    """Rule on every metric of every cell, and combine the rulings into one outcome with one sentence.

    Noise-free findings count even if the times of the session are invalid or doubtful. A lost cell is a finding unless
    the run was cut short.
    """
    *timed, suite = rulings_on_times(pair, thresholds)
    rulings = [one for match in pair.matches for one in certain.rulings(match, thresholds)] + timed
    findings = [one for one in (*rulings, suite) if one.outcome is Outcome.finding]
    counts = Counter(str(one.kind) for one in findings if one.workload != EVERY)
    parts = [f"{number} {kind}" for kind, number in counts.items()]
    if len(findings) > counts.total():
        parts.append("the suite as a whole")
    if pair.invalid and (pair.is_cut_short or not parts):
        outcome, words = Outcome.invalid, "; ".join(pair.invalid)
    elif parts:
        outcome, words = Outcome.finding, ", ".join(parts)
    elif pair.doubtful:
        outcome, words = Outcome.inconclusive, pair.doubtful[0]
    else:
        outcome, words = _without_findings(rulings, suite)
    doubtful = [line for line in pair.doubtful if line not in pair.invalid]
    records = [record for match in pair.matches for record in (match.base, match.candidate) if record is not None]
    metrics = {one.metric for record in records for one in record.measurements if not one.metric.startswith(LATENCY)}
    return Decision(
        base=pair.base,
        candidate=pair.candidate,
        outcome=outcome,
        words=words,
        suite=suite,
        rulings=tuple(rulings),
        notes=(*doubtful, *pair.notes, *thresholds.notes([match.key for match in pair.matches], metrics)),
        invalid=tuple(pair.invalid),
    )


def _without_findings(rulings: Sequence[Ruling], suite: Ruling) -> tuple[Outcome, str]:
    statuses = [one for one in rulings if one.metric == STATUS]
    if not any(one.base == one.candidate == Status.ok for one in statuses):
        return Outcome.inconclusive, "nothing could be compared: no cell is ok on both sides"
    timed = [one for one in rulings if one.metric == LATENCY and (one.effect is not None or one.kind is not Kind.same)]
    num_judged = sum(one.outcome is not Outcome.inconclusive for one in timed)
    words = f"{num_judged} of {len(timed)} times could be judged"
    reasons = {reason: [one for one in (*rulings, suite) if one.reason is reason] for reason in Reason}
    if slower := sum(one.effect is not None and one.effect > 1 for one in reasons[Reason.machine_state]):
        return Outcome.inconclusive, f"{slower} slower by no more than the state of the machine explains; {words}"
    if refused := len(reasons[Reason.threshold]):
        return Outcome.inconclusive, f"{refused} of the thresholds asked for cannot be judged; {words}"
    if untried := sum(one.kind is Kind.undecided for one in statuses):
        return Outcome.inconclusive, f"{untried} of the cells that were ok were not tried, by a prediction; {words}"
    if num_judged < JUDGED_SHARE * len(timed):
        return Outcome.inconclusive, f"{words}, fewer than {100 * JUDGED_SHARE:g} %"
    if any(one.outcome is Outcome.improved for one in (*rulings, suite)):
        return Outcome.improved, f"nothing got worse, something got better; {words}"
    return Outcome.passed, f"nothing got worse; {words}"


def rulings_on_times(pair: Pair, thresholds: Thresholds) -> list[Ruling]:
    """A ruling on each time, judged together, and last a ruling on the suite: all cells together.

    In a session with two sides the suite is judged together with its cells, as in the session's own table. In a
    comparison of two runs it is judged alone, so that small changes of many cells are detected.
    """
    by_key = {match.key: match for match in pair.matches}
    cells = [key for key in pair.effects if key != EVERYTHING]
    limits = {key: _limit(pair, thresholds, [key] if key in by_key else cells) for key in pair.effects}
    margins = {key: min(limit.allowed, LARGEST_MARGIN) for key, limit in limits.items()}
    rulings = [*_without_effect(pair)]
    apart = {key: effect for key, effect in pair.effects.items() if key == EVERYTHING and pair.see is not None}
    others = {key: effect for key, effect in pair.effects.items() if key not in apart}
    judgements = verdict.judge(others, margins, pair.error) | verdict.judge(apart, margins, pair.error)
    for key, judged in judgements.items():
        kind, reason, words = decided(judged, limits[key])
        fields = {"reason": reason, "effect": judged.ratio, "low": judged.low, "high": judged.high}
        words = f"geometric mean: {words}" if key == EVERYTHING else words
        one = ruling(key, LATENCY, kind, words, smallest=judged.detectable, **fields, **_medians(by_key.get(key)))
        if key in by_key:
            one = suspected(one, by_key[key])
        rulings.append(_taken_back(explained(one, pair.change), pair))
    if EVERYTHING not in pair.effects:
        rulings.append(ruling(EVERYTHING, LATENCY, Kind.undecided, "no time could be judged"))
    return rulings


def _limit(pair: Pair, thresholds: Thresholds, cells: Sequence[Key]) -> Limit:
    """The limit for a cell, or for all cells together: the smallest of their rules, if all have one."""
    allowed = thresholds.limit(cells, LATENCY)
    return Limit(
        allowed=max(pair.allowed if allowed is None else allowed, pair.least),
        is_asked=allowed is not None and not pair.least,
        least=pair.least,
        see=pair.see,
    )


def _is_timed(match: Match) -> bool:
    """Whether a cell is ok on both sides and had a time in the base."""
    base, candidate = match.base, match.candidate
    are_ok = base is not None and candidate is not None and base.status is candidate.status is Status.ok
    return are_ok and base is not None and base.measurement(LATENCY) is not None


def _without_effect(pair: Pair) -> Iterator[Ruling]:
    """Rulings on times that cannot be compared; the reference itself has none."""
    words = f"there is no reference for it: {pair.reference or 'the base'} was not measured next to it in both runs"
    for match in pair.matches:
        if match.key in pair.effects or not _is_timed(match):
            continue
        assert match.candidate is not None
        if match.candidate.measurement(LATENCY) is None:
            yield ruling(match.key, LATENCY, Kind.lost, "its time is no longer measured", **_medians(match))
        elif match.key[1] != pair.reference:
            yield ruling(match.key, LATENCY, Kind.undecided, words, **_medians(match))


def _medians(match: Match | None) -> dict[str, Any]:
    """Median seconds of a call on both sides, with their unit."""
    if match is None:
        return {}
    samples = {
        name: () if record is None else record.samples(LATENCY)
        for name, record in (("base", match.base), ("candidate", match.candidate))
    }
    return {"unit": "s"} | {name: median_estimate(taken).point for name, taken in samples.items() if taken}


def _taken_back(one: Ruling, pair: Pair) -> Ruling:
    """The ruling without its verdict, if the times of the session cannot be trusted."""
    is_doubted = bool(pair.doubted) if one.workload == EVERY else (one.workload, one.implementation) in pair.doubted
    if not pair.invalid and not is_doubted:
        return one
    why = "the session is not valid" if pair.invalid else "its times are doubtful"
    return undecided(one, f"not judged, since {why}; seen: {one.words}", one.reason)


def _of_sides(results: Results) -> Pair:
    """The two sides of a session, with its margin."""
    sides = results.plan.sides
    assert sides is not None
    known = session_effects(results)
    names = {key: EVERYTHING if key == WHOLE else (key[0], key[1].implementation) for key in known}
    return Pair(
        base=Side(run=sides.base.given, commit=sides.base.commit),
        candidate=Side(run=sides.candidate.given, commit=sides.candidate.commit),
        matches=certain.match_records(*by_side(results)),
        effects={names[key]: effect for key, effect in known.items()},
        allowed=results.plan.smallest_effect,
        error=results.plan.false_share,
        notes=[_method(results), *(f"{name} is gone: {reason}" for name, reason in sides.lost.items())],
        invalid=invalid_reasons(results),
        doubtful=doubts(results),
        doubted={names[key] for key in known if is_doubtful(results, key)},
        is_cut_short=results.elapsed_s is None,
    )


def _of_runs(base: Results, candidate: Results, thresholds: Thresholds) -> Pair:
    """Two separate runs, compared by their ratios to the reference.

    Other machines or versions get wider limits. Runs with different settings have no comparable times.
    """
    matches = certain.match_records(
        base.records, candidate.records, has_same_inputs=base.plan.seed == candidate.plan.seed
    )
    differ = [
        f"{name} ({getattr(base.plan, name)} and {getattr(candidate.plan, name)})"
        for name in MUST_MATCH
        if getattr(base.plan, name) != getattr(candidate.plan, name)
    ]
    before, after = (
        {(workload, arm.implementation): effect for (workload, arm), effect in session_effects(results).items()}
        for results in (base, candidate)
    )
    keys = [match.key for match in matches if _is_timed(match) and match.key in before.keys() & after.keys()]
    effects = {key: verdict.between_runs(before[key], after[key], thresholds.between_runs) for key in keys}
    by_workload: dict[str, list[Effect]] = {}
    for key in keys:
        if effects[key].error is not None:
            by_workload.setdefault(key[0], []).append(verdict.between_runs(before[key], after[key], 0.0))
    if by_workload:
        effects[EVERYTHING] = mean_between_runs([*by_workload.values()], thresholds.between_runs)
    least = thresholds.elsewhere if _is_elsewhere(base, candidate) else 0.0
    named = {"base": base, "candidate": candidate}
    doubtful = [f"{name}: {line}" for name, results in named.items() for line in doubts(results)]
    doubted = [
        (workload, name)
        for workload, name in keys
        if differ or any(is_doubtful(results, (workload, Arm(implementation=name))) for results in named.values())
    ]
    if differ and keys:
        doubtful.append(f"times cannot be compared: the runs differ in {', '.join(differ)}")
    return Pair(
        base=Side(run=base.run, commit=base.started.commit),
        candidate=Side(run=candidate.run, commit=candidate.started.commit),
        matches=matches,
        effects=effects,
        allowed=ALLOWED[LATENCY],
        reference=candidate.plan.baseline,
        least=least,
        see=max(thresholds.see, 2 * least),
        change=state_change(base, candidate),
        notes=list(_notes(base, candidate, thresholds)),
        invalid=[f"{name}: {line}" for name, results in named.items() for line in invalid_reasons(results)],
        doubtful=doubtful,
        doubted=doubted,
        is_cut_short=candidate.elapsed_s is None or base.elapsed_s is None,
    )


def invalid_reasons(results: Results) -> list[str]:
    """Reasons why no time of a run counts."""
    reasons = []
    if results.elapsed_s is None:
        reasons.append(f"it did not come to its end: go on with {results.plan.resume_command(results.run)}")
    if results.num_lost:
        reasons.append(f"the rest of a damaged run, in {LOST.format(results.num_lost)}")
    return [*reasons, *(doubts(results) if is_doubtful(results) else ())]


def _method(results: Results) -> str:
    """Describe the measurement: processes, margin (unless a rule allows more) and allocator."""
    plan, number = results.plan, num_processes(results)
    return f"times of {processes(number)}, margin {percent(plan.smallest_effect)}, allocator {plan.allocator}"


def _notes(base: Results, candidate: Results, thresholds: Thresholds) -> Iterator[str]:
    """Notes that readers need besides the rulings."""
    reference = candidate.plan.baseline
    yield _method(candidate)
    if words := state_change(base, candidate)[1]:
        yield f"the machine was in another state: {words}"
    if _is_elsewhere(base, candidate):
        places = " and ".join("+".join((*run.environments, *run.hosts)) or "none" for run in (base, candidate))
        yield (
            f"the runs come from different machines or versions ({places}): besides what is certain, only ratios to "
            f"{reference} are compared, and growth of up to {100 * thresholds.elsewhere:g} % is put down to the machine"
        )
    before, after = (
        {name_of(spec): digest for spec, digest in results.plan.digests.items()} for results in (base, candidate)
    )
    if before.get(base.plan.baseline, "") != after.get(reference, ""):
        yield f"the source of the reference {reference} has changed: every ratio to it may move with it"


def _is_elsewhere(base: Results, candidate: Results) -> bool:
    """Whether the runs, or a cell of both, were measured on different machines."""
    hosts = {record.key: record.host for record in base.records}
    moved = any(hosts.get(record.key, record.host) != record.host for record in candidate.records)
    return moved or list(base.environments) != list(candidate.environments)
