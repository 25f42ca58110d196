"""The gate on one session with both sides: decisions from its verdicts."""

import dataclasses
import math
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.comparisons import comparisons, control_effects
from attnbench.analysis.gate.certain import match_records
from attnbench.analysis.gate.decision import EVERYTHING, Timed, conclude, judge_sides, judge_times, side, side_by_side
from attnbench.analysis.gate.rulings import Decision, Kind, Outcome, Rule, Ruling, Thresholds
from attnbench.statistics.verdict import Effect, Reason, half_widths
from attnbench.storage.records import BASE
from studies.simulated import virtual
from studies.simulated.worlds import WORLDS
from tests import journals
from tests.analysis.gate import scripts

NAMES = ("sdpa", "fused")
POINTS = journals.workloads(seq_len=(512,), seed=(0, 1))
NUM_PROCESSES = 9
MARGIN = 0.02


def effect(ratio: float, high: float | None = None) -> Effect:
    """Build a ratio over nine processes whose 95 % interval ends at `high`; without it there is no interval."""
    error = None if high is None else math.log(high / ratio) / float(half_widths(1.0, NUM_PROCESSES - 1, 0.05))
    return Effect(
        log=math.log(ratio),
        error=error,
        degrees=NUM_PROCESSES - 1,
        num_processes=NUM_PROCESSES,
        num_measured=NUM_PROCESSES,
        num_looks=1,
    )


def judged(seen: Effect, allowed: float | None = None) -> Ruling:
    """Judge one time of a session with two sides, with or without a rule that allows growth."""
    timed = Timed(effect=seen, allowed=MARGIN if allowed is None else allowed, is_asked=allowed is not None)
    (found,) = judge_times({EVERYTHING: timed}, Thresholds(), None)
    return found


def session(folder: Path, ratio: float, asked: Thresholds | None = None, **changes) -> Decision:
    """Write a session: `fused` is the candidate's version of the base's `sdpa`; both are in the same blocks."""
    same = 1.3e-3 / 2.6e-3
    found = scripts.run(folder / "run", scripts.scales("fused", same * ratio), names=NAMES, points=POINTS)
    base = [
        msgspec.structs.replace(record, implementation="fused", measurements=record.measurements[:2], operators=None)
        for record in found.records
        if record.implementation == "sdpa"
    ]
    candidate = [record for record in found.records if record.implementation == "fused"]
    candidate = [msgspec.structs.replace(record, operators=None, **changes) for record in candidate]
    matches, asked = match_records(base, candidate), asked or Thresholds()
    timed, _ = side_by_side(found, matches, asked)
    suite = judged(effect(1.05, 1.055) if ratio > 1.02 else effect(1.001, 1.006), math.inf if asked.rule else None)
    return conclude((side(found), side(found)), matches, (timed, suite), asked)


def kinds(decision: Decision) -> set[Kind]:
    return {ruling.kind for ruling in decision.rulings if ruling.metric == "latency"}


def reasons(decision: Decision) -> set[Reason | None]:
    return {ruling.reason for ruling in decision.rulings if ruling.metric == "latency"}


@pytest.mark.parametrize(("is_checked", "kind"), [(True, Kind.faster), (False, Kind.suspicious)])
@pytest.mark.parametrize("allowed", [None, 1e-4, math.inf])
def test_half_the_time_asks_for_a_check_whatever_a_rule_allows(
    tmp_path: Path, *, allowed: float | None, is_checked: bool, kind: Kind
) -> None:
    asked = Thresholds(rule=() if allowed is None else (Rule(metric="latency", allowed=allowed),))
    decision = session(tmp_path, 0.5, asked, **({} if is_checked else {"agreement": None}))
    assert kinds(decision) == {kind}


@pytest.mark.parametrize(
    ("allowed", "kind"), [(0.0, Kind.slower), (0.04, Kind.slower), (0.10, Kind.same), (math.inf, Kind.same)]
)
def test_what_a_rule_allows_decides(allowed: float, kind: Kind) -> None:
    found = judged(effect(1.05, 1.055), allowed)
    assert found.kind is kind
    assert "+5.0 % (+4.5 to +5.5)" in found.words


@pytest.mark.usefixtures("many_visits")
@pytest.mark.parametrize(
    ("slowdown", "budget_s", "allowed", "outcome"),
    [
        (0.0, 120.0, None, Outcome.passed),
        (0.05, 120.0, None, Outcome.finding),
        (0.05, 120.0, 0.02, Outcome.finding),
        (0.05, 120.0, 0.10, Outcome.passed),
        (0.0, 0.0, None, Outcome.inconclusive),
    ],
)
def test_a_side_by_side_session_is_judged_as_a_whole(tmp_path, slowdown, budget_s, allowed, outcome):
    def cost_s(workload, name):
        return 1e-4 * workload.seq_len * (1.0 if name.endswith("(base)") else 1.0 + slowdown)

    asked = virtual.with_sides(virtual.plan(2, ("x",), budget_s=budget_s, seed=1))
    asked = msgspec.structs.replace(asked, num_rounds=4 if budget_s else 3)
    client = virtual.SimulatedClient(WORLDS["calm"], cost_s, seed=1, layout=0.003, process=0.003)
    rules = () if allowed is None else (Rule(metric="latency", allowed=allowed),)
    decision = judge_sides(virtual.execute(asked, tmp_path / "run", client), Thresholds(rule=rules))
    assert decision.outcome is outcome
    assert (decision.base.run, decision.candidate.run) == ("rev:old", "rev:new")
    assert {ruling.implementation for ruling in decision.rulings} == {"x"}


@pytest.mark.parametrize(
    ("ratio", "high", "kind", "reason"),
    [
        (1.001, 1.01, Kind.same, None),
        (1.001, 1.03, Kind.undecided, Reason.imprecise),
        (1.05, 1.11, Kind.undecided, Reason.imprecise),  # noise never passes, even if a small slowdown would show
        (1.05, 1.06, Kind.slower, None),
        (0.9, 0.92, Kind.faster, None),
        (1.2, None, Kind.undecided, Reason.few_processes),
    ],
)
def test_a_time_without_a_rule_goes_by_the_margin(
    ratio: float, high: float | None, kind: Kind, reason: Reason | None
) -> None:
    found = judged(effect(ratio, high))
    assert (found.kind, found.reason) == (kind, reason)


@pytest.mark.parametrize(
    ("allowed", "high", "outcome"),
    [
        (math.inf, 1.7, Outcome.passed),
        (math.inf, None, Outcome.passed),
        (0.4, 1.3, Outcome.passed),
        (0.4, 1.7, Outcome.inconclusive),
        (0.4, None, Outcome.inconclusive),
    ],
)
def test_what_is_undecided_passes_where_all_that_it_may_be_is_allowed(
    allowed: float, high: float | None, outcome: Outcome
) -> None:
    assert judged(effect(1.2, high), allowed).outcome is outcome


@pytest.mark.parametrize(
    ("allowed", "high", "is_refused"), [(0.01, 1.018, True), (0.01, 1.009, False), (0.03, 1.018, False)]
)
def test_a_threshold_below_what_the_interval_resolves_is_refused(
    *, allowed: float, high: float, is_refused: bool
) -> None:
    """Measuring stops at 2 %: a rule that asks for 1 % cannot be answered."""
    found = judged(effect(1.004, high), allowed)
    expected = (Kind.undecided, Reason.threshold) if is_refused else (Kind.same, None)
    assert (found.kind, found.reason) == expected


@pytest.mark.usefixtures("many_visits")
def test_one_percent_is_a_finding_where_it_is_asked_for(tmp_path: Path) -> None:
    asked = virtual.with_sides(virtual.plan(1, ("x",), budget_s=600.0, seed=1))
    asked = msgspec.structs.replace(asked, smallest_effect=0.005)
    costs = {"x": 2e-3 * 1.012}
    client = virtual.SimulatedClient(WORLDS["calm"], lambda _, name: costs.get(name, 2e-3), seed=1)
    results = virtual.execute(asked, tmp_path / "run", client)
    rule = Rule(metric="latency", allowed=0.005)
    assert kinds(judge_sides(results, Thresholds(rule=(rule,)))) == {Kind.slower}


@pytest.mark.usefixtures("many_visits")
def test_what_processes_differ_by_is_in_the_interval_of_a_session_apart(tmp_path: Path) -> None:
    asked = virtual.with_sides(virtual.plan(1, ("x",), budget_s=120.0, seed=1), is_apart=True)
    client = virtual.SimulatedPair(WORLDS["calm"], lambda *_: 2e-3, seed=1, layout=0.001, process=0.05)
    results = virtual.execute(asked, tmp_path / "run", client)
    (row,) = comparisons(results)
    (control,) = control_effects(results).values()
    assert row.high is not None
    largest = math.expm1(abs(control.log) + (control.half_width(0.05) or math.inf))
    own = row.high / row.ratio - 1
    assert largest < own / 2  # the control lies in the base's own process
    between = Thresholds(rule=(Rule(metric="latency", allowed=(largest + own) / 2),))
    assert reasons(judge_sides(results, between)) == {Reason.threshold}


def test_a_session_that_was_cut_short_is_invalid_whatever_is_missing_from_it(tmp_path: Path) -> None:
    """If killed between the two checks, it seems to have lost the candidate."""
    asked = virtual.with_sides(virtual.plan(2, ("x",), budget_s=5.0, seed=1))
    client = virtual.SimulatedClient(WORLDS["calm"], lambda *_: 1e-3, seed=1)
    results = virtual.execute(asked, tmp_path / "run", client)
    base = tuple(record for record in results.records if record.side == BASE)
    lost = dataclasses.replace(results, records=base)
    assert judge_sides(lost, Thresholds()).outcome is Outcome.finding
    killed = judge_sides(dataclasses.replace(lost, elapsed_s=None), Thresholds())
    assert killed.outcome is Outcome.invalid
    assert killed.words.endswith("go on with attnbench compare rev:old rev:new --resume run")
