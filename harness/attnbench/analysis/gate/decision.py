"""The decision of a gate on two states of the code: a ruling for each metric of each cell, and one ending.

The two states come from two separate runs, or from one session with two sides. Such a session detects smaller
differences, because both sides are sampled in the same blocks. Rulings on noise-free facts come from certain.py, and
rulings on times from times.py.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from attnbench.analysis.comparisons import doubts, is_doubtful, judgements, num_processes, reference, session_effects
from attnbench.analysis.conclusion import Ending
from attnbench.analysis.gate import certain, times
from attnbench.analysis.gate.rulings import (
    ALLOWED,
    BETTER,
    EVERYTHING,
    STATUS,
    Decision,
    Kind,
    Ruling,
    Side,
    Thresholds,
)
from attnbench.analysis.gate.times import Pair, processes, state_change
from attnbench.analysis.results import LOST, Results
from attnbench.analysis.sides import by_side, matched
from attnbench.plugins import name_of
from attnbench.statistics import verdict
from attnbench.statistics.effects import WHOLE
from attnbench.statistics.verdict import Effect, Reason, between_runs
from attnbench.storage.records import FIRST_CALL, LATENCY, Arm, Status
from attnbench.units import percent
from attnbench.workloads.workload import Workload

BETWEEN_RUNS = 0.02  # standard deviation of the log ratio to the reference between runs of the same code
SEE = 0.20  # in two runs, a time counts as judged if a slowdown of 20 % would have been detected
JUDGED_SHARE = 0.5  # the gate is inconclusive if a smaller share of the times could be judged
MUST_MATCH = ("baseline", "cache", "launch", "pace", "allocator")
"""Fields of the plan that must be equal in two runs before their times are compared."""


def judge(base: Results, candidate: Results, thresholds: Thresholds | None = None) -> Decision:
    """Compare two stored runs; without `thresholds`, use the defaults.

    Raises:
        ValueError: one of the runs itself compared two states of the code, or the runs have no shape in common.
    """
    for results in (base, candidate):
        if results.plan.sides is not None:
            words = f"{results.run} compared two sides, so it cannot be compared with another run"
            raise ValueError(f"{words}: give it alone, as in attnbench gate {results.run}")
    if differing := _other_axes(base, candidate):
        raise ValueError(
            f"{base.run} and {candidate.run} have no shape in common: they differ in {differing}; run the shapes of "
            "the base, or store a new baseline with --accept"
        )
    return _conclude(_of_runs(base, candidate), thresholds or Thresholds())


def judge_sides(results: Results, thresholds: Thresholds) -> Decision:
    """Decide on a run that compared two states of the code (`attnbench compare rev:main rev:HEAD`)."""
    return _conclude(_of_sides(results), thresholds)


def _conclude(pair: Pair, thresholds: Thresholds) -> Decision:
    """Rule on every metric of every cell, and combine the rulings into one ending with one sentence.

    Findings on noise-free facts count even if the times are invalid or doubtful. If a run was cut short, the session
    is invalid in any case.
    """
    rulings = list[Ruling]()
    for match in pair.matches:
        rulings += certain.rulings(match, thresholds, has_same_inputs=pair.has_same_inputs)
        rulings += times.on_cell(match, pair, thresholds)
    suite = times.on_suite(pair, thresholds)
    counts = Counter(str(one.kind) for one in rulings if one.ending is Ending.finding)
    parts = [f"{number} {kind}" for kind, number in counts.items()]
    if suite is not None and suite.ending is Ending.finding:
        parts.append("the suite as a whole")
    if pair.invalid and (pair.is_cut_short or not parts):
        ending, words = Ending.invalid, "; ".join(pair.invalid)
    elif parts:
        ending, words = Ending.finding, ", ".join(parts)
    elif pair.doubtful:
        ending, words = Ending.inconclusive, pair.doubtful[0]
    else:
        ending, words = _without_findings(rulings, pair.way_out)
    doubtful = [line for line in pair.doubtful if line not in pair.invalid]
    measured = [one for match in pair.matches for record in match.records for one in record.measurements]
    metrics = {one.metric for one in measured if not one.metric.startswith((LATENCY, FIRST_CALL))}
    return Decision(
        base=pair.base,
        candidate=pair.candidate,
        ending=ending,
        words=words,
        suite=suite,
        rulings=tuple(rulings),
        notes=(*doubtful, *pair.notes, *thresholds.notes([match.key for match in pair.matches], metrics)),
        invalid=tuple(pair.invalid),
    )


def _without_findings(rulings: Sequence[Ruling], way_out: str) -> tuple[Ending, str]:
    statuses = [one for one in rulings if one.metric == STATUS]
    if not any(one.base == one.candidate == Status.ok for one in statuses):
        return Ending.inconclusive, "nothing could be compared: no cell is ok on both sides"
    timed = [one for one in rulings if one.metric == LATENCY]
    num_judged = sum(one.ending is not Ending.inconclusive for one in timed)
    words = f"{num_judged} of {len(timed)} times could be judged"
    if refused := sum(one.reason is Reason.threshold for one in timed):
        return Ending.inconclusive, f"{refused} times cannot be judged against their thresholds; {words}: {way_out}"
    if untried := sum(one.kind is Kind.undecided for one in statuses):
        return Ending.inconclusive, f"{untried} cells that were ok before were skipped by a prediction; {words}"
    if num_judged < JUDGED_SHARE * len(timed):
        return Ending.inconclusive, f"{words}, fewer than {100 * JUDGED_SHARE:g} %: {way_out}"
    better = ", something got better" * any(one.kind in BETTER for one in rulings)
    return Ending.passed, f"nothing got worse{better}; {words}"


def _of_sides(results: Results) -> Pair:
    """Return the `Pair` of a session's two sides, with the judgements of the session."""
    sides = results.plan.sides
    assert sides is not None
    judged = judgements(results).items()
    return Pair(
        base=Side(run=sides.base.given, commit=sides.base.commit),
        candidate=Side(run=sides.candidate.given, commit=sides.candidate.commit),
        matches=matched(*by_side(results)),
        judged={EVERYTHING if key == WHOLE else (key[0], key[1].implementation): one for key, one in judged},
        notes=[_method(results), *(f"{name} is gone: {reason}" for name, reason in sides.lost.items())],
        invalid=invalid_reasons(results),
        doubtful=doubts(results),
        is_cut_short=results.elapsed_s is None,
        way_out=f"run it again {_with_less_noise(results)}",
    )


def _of_runs(base: Results, candidate: Results) -> Pair:
    """Return the `Pair` of two separate runs; a time is judged by its ratio to the reference's time in the same run.

    If the machines, their states, the versions or the settings differ, all judgements are doubtful.
    """
    both = {"base": base, "candidate": candidate}
    matches = matched(base.records, candidate.records)
    old, new = _settings(base), _settings(candidate)
    differ = [f"{name} ({old[name]} and {new[name]})" for name in old if old[name] != new[name]]
    differ += [f"the state of the machine ({words})"] if (words := state_change(base, candidate)) else []
    before, after = map(_effects, both.values())
    keys = [
        match.key
        for match in matches
        if times.is_timed(match) and match.key in before.keys() & after.keys()
        if reference(base, match.records[0].key) == reference(candidate, match.records[0].key)
    ]
    effects = {key: between_runs(before[key], after[key], BETWEEN_RUNS) for key in keys}
    suspect = {key for run in both.values() for key in keys if is_doubtful(run, (key[0], Arm(implementation=key[1])))}
    judged = {
        key: replace(one, is_doubtful=bool(differ) or key in suspect)
        for key, one in verdict.judge(effects, ALLOWED[LATENCY]).items()
    }
    doubtful = [f"{name}: {line}" for name, results in both.items() for line in doubts(results)]
    if differ and keys:
        doubtful.append(f"times cannot be compared: the runs differ in {', '.join(differ)}")
    base_side, candidate_side = (Side(run=run.run, commit=run.started.commit) for run in both.values())
    return Pair(
        base=base_side,
        candidate=candidate_side,
        matches=matches,
        judged=judged,
        reference=candidate.plan.baseline,
        see=SEE,
        has_same_inputs=base.plan.seed == candidate.plan.seed,
        notes=[_method(candidate)],
        invalid=[f"{name}: {line}" for name, results in both.items() for line in invalid_reasons(results)],
        doubtful=doubtful,
        is_cut_short=any(results.elapsed_s is None for results in both.values()),
        way_out=f"run both again {_with_less_noise(candidate)}",
    )


def _effects(results: Results) -> dict[tuple[str, str], Effect]:
    """Return a run's effects (log ratios of times) by workload and implementation; the keys have no side."""
    return {(workload, arm.implementation): effect for (workload, arm), effect in session_effects(results).items()}


def _other_axes(base: Results, candidate: Results) -> str:
    """Describe the axes in which two runs without a common workload differ; "" if they share a workload."""
    before, after = base.plan.workloads, candidate.plan.workloads
    if not before or not after or {each.id for each in before} & {each.id for each in after}:
        return ""
    is_square = all(workload.kv_len == workload.seq_len for workload in (*before, *after))
    texts = []
    for axis in Workload.__struct_fields__:
        old = dict.fromkeys(str(workload.axes()[axis]) for workload in before)
        new = dict.fromkeys(str(workload.axes()[axis]) for workload in after)
        if axis not in {"seed", "kv_len" * is_square} and old.keys() != new.keys():
            texts.append(f"{axis} ({', '.join(old)} and {', '.join(new)})")
    return ", ".join(texts)


def _settings(results: Results) -> dict[str, str]:
    """Return the facts, by name, that must be equal in two runs before their times are compared."""
    digests = {name_of(spec): digest for spec, digest in results.plan.digests.items()}
    facts = {name: str(getattr(results.plan, name)) for name in MUST_MATCH}
    facts["machine or versions"] = "+".join((*results.environments, *results.hosts)) or "none"
    facts["source of the baseline"] = digests.get(results.plan.baseline, "none")
    return facts


def invalid_reasons(results: Results) -> list[str]:
    """Return the reasons why no time of a run can be judged."""
    reasons = []
    if results.elapsed_s is None:
        reasons.append(f"it did not finish: continue with {results.plan.resume_command(results.run)}")
    if results.num_lost:
        reasons.append(f"it is the rest of a damaged run, in {LOST.format(results.num_lost)}")
    return [*reasons, *(doubts(results) if is_doubtful(results) else ())]


def _with_less_noise(results: Results) -> str:
    """Suggest how to repeat a run with less noise: options that it did not have, or a quieter machine."""
    plan = results.plan
    options = f"--rounds {2 * plan.num_rounds}" + " --conditions steady" * (plan.allocator == "system")
    options += " --set num_threads=1" * any(each.num_threads != 1 for each in plan.workloads)
    return f"with {options}, or on a quieter machine"


def _method(results: Results) -> str:
    """Describe how the times were measured: number of processes, margin and allocator."""
    plan, number = results.plan, num_processes(results)
    return f"times of {processes(number)}, margin {percent(plan.smallest_effect)}, allocator {plan.allocator}"
