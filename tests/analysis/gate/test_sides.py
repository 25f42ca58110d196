"""One session in which both sides were measured: its verdicts, and what is certain, as a decision."""

import dataclasses
import math
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.comparisons import compared, comparisons, noise_floors
from attnbench.analysis.gate.certain import match_records
from attnbench.analysis.gate.decision import conclude, judge_sides, side, side_by_side, whole
from attnbench.analysis.gate.rulings import Decision, Kind, Outcome, Rule, Ruling, Thresholds
from attnbench.statistics.intervals import Estimate, t_quantile
from attnbench.statistics.verdicts import ALONE, Effect, Reason
from attnbench.storage.records import BASE, Status
from studies.simulated import virtual
from studies.simulated.worlds import WORLDS
from tests import journals
from tests.analysis.gate import scripts

NAMES = ("sdpa", "fused")
POINTS = journals.workloads(seq_len=(512,), seed=(0, 1))
NUM_VISITS = 9


def effect(ratio: float, high: float | None = None, **more) -> Effect:
    """A ratio whose interval ends there, of nine visits; there is no interval where there is no end."""
    error = None if high is None else math.log(high / ratio) / t_quantile(0.975, NUM_VISITS - 1)
    found = Estimate(point=ratio, standard_error=error, num_clusters=NUM_VISITS, num_samples=90)
    return Effect(ratio=found, **{"margin": 0.02, "e_same": 1.0, **more})


SUITE = effect(1.001, 1.006, e_apart=math.inf)
SLOWER_SUITE = effect(1.05, 1.055, e_same=1e9)


def session(folder: Path, ratio: float, asked: Thresholds | None = None, **changes) -> Decision:
    """`fused` is the candidate's state of what the base calls `sdpa`; both went into the same blocks."""
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
    cells = [(each.record, each.effect) for each in compared(found)]
    timed = side_by_side(cells, matches, asked, ALONE, noise_floors(found))
    suite = whole(SLOWER_SUITE if ratio > 1.02 else SUITE, asked, [each.key for each in matches])
    return conclude((side(found), side(found)), matches, (timed, suite), asked)


def kinds(decision: Decision) -> set[Kind]:
    return {ruling.kind for ruling in decision.rulings if ruling.metric == "latency"}


def reasons(decision: Decision) -> set[Reason | None]:
    return {ruling.reason for ruling in decision.rulings if ruling.metric == "latency"}


def test_the_same_code_passes(tmp_path: Path) -> None:
    decision = session(tmp_path, 1.0)
    assert decision.outcome is Outcome.passed
    assert kinds(decision) == {Kind.same}


def test_five_percent_are_seen_side_by_side(tmp_path: Path) -> None:
    decision = session(tmp_path, 1.05)
    assert decision.outcome is Outcome.finding
    assert kinds(decision) == {Kind.slower}


@pytest.mark.parametrize("allowed", [0.4, math.inf])
def test_what_a_rule_allows_passes(tmp_path: Path, allowed: float) -> None:
    asked = Thresholds(rule=(Rule(metric="latency", allowed=allowed),))
    assert kinds(session(tmp_path, 1.3, asked)) == {Kind.same}


def test_a_threshold_below_the_sessions_floor_is_refused(tmp_path: Path) -> None:
    decision = session(tmp_path, 1.0, Thresholds(rule=(Rule(metric="latency", allowed=1e-4),)))
    assert reasons(decision) == {Reason.noise_floor}
    assert decision.outcome is Outcome.inconclusive


@pytest.mark.parametrize(("is_checked", "kind"), [(True, Kind.faster), (False, Kind.suspicious)])
def test_half_the_time_asks_for_a_check(tmp_path: Path, is_checked: bool, kind: Kind) -> None:  # noqa: FBT001
    decision = session(tmp_path, 0.5, **({} if is_checked else {"agreement": None}))
    assert kinds(decision) == {kind}


@pytest.mark.parametrize(("is_checked", "kind"), [(True, Kind.faster), (False, Kind.suspicious)])
@pytest.mark.parametrize("allowed", [1e-4, math.inf])
def test_half_the_time_asks_for_a_check_whatever_a_rule_allows(
    tmp_path: Path, *, allowed: float, is_checked: bool, kind: Kind
) -> None:
    asked = Thresholds(rule=(Rule(metric="latency", allowed=allowed),))
    decision = session(tmp_path, 0.5, asked, **({} if is_checked else {"agreement": None}))
    assert kinds(decision) == {kind}


@pytest.mark.parametrize(("is_new", "status"), [(True, Status.ok), (False, Status.error), (False, Status.unsupported)])
def test_where_no_cell_is_ok_on_both_sides_nothing_could_be_compared(
    tmp_path: Path, *, is_new: bool, status: Status
) -> None:
    found = scripts.run(tmp_path / "run", names=NAMES, points=POINTS)
    records = [msgspec.structs.replace(record, status=status, message="no", agreement=None) for record in found.records]
    matches, suite = match_records([] if is_new else records, records), whole(None, Thresholds(), [])
    decision = conclude((side(found), side(found)), matches, ([], suite), Thresholds())
    reported = (Outcome.inconclusive, "nothing could be compared: no cell is ok on both sides")
    assert (decision.outcome, decision.words) == reported


def test_a_rule_that_is_about_nothing_is_reported(tmp_path: Path) -> None:
    rules = (
        Rule(implementation="fusd", allowed=0.5),
        Rule(metric="peak_mem", allowed=0.5),
        Rule(metric="peak_memory", allowed=0.5),
    )
    cell, metric = session(tmp_path, 1.0, Thresholds(rule=rules)).notes
    assert cell.startswith("rule 1 (*, fusd) covers no cell")
    assert metric.startswith("rule 2 covers nothing here: there is no metric peak_mem (did you mean peak_memory?)")


def test_what_is_certain_counts(tmp_path: Path) -> None:
    decision = session(tmp_path, 1.0, status=Status.disagrees)
    assert Kind.failed in {ruling.kind for ruling in decision.of(Outcome.finding)}


def test_nothing_of_the_whole_is_inconclusive() -> None:
    assert whole(None, Thresholds(), []).outcome is Outcome.inconclusive


def judged_whole(found: Effect, allowed: float | None) -> Ruling:
    rules = () if allowed is None else (Rule(metric="latency", allowed=allowed),)
    return whole(found, Thresholds(rule=rules), [("w", "x")])


@pytest.mark.parametrize(
    ("allowed", "outcome", "words"),
    [
        (0.0, Outcome.finding, "slower: +5.0 % (+4.5 to +5.5); allowed is 2.0 %"),
        (0.04, Outcome.finding, "slower: +5.0 % (+4.5 to +5.5); allowed is 4.0 %"),
        (0.10, Outcome.passed, "+5.0 % (+4.5 to +5.5); allowed is 10 %"),
        (math.inf, Outcome.passed, "+5.0 % (+4.5 to +5.5); any growth is allowed"),
    ],
)
def test_what_is_allowed_to_every_cell_is_allowed_to_the_whole(allowed: float, outcome: Outcome, words: str) -> None:
    found = judged_whole(SLOWER_SUITE, allowed)
    assert found.outcome is outcome
    assert found.words == f"geometric mean: {words}"


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
    client = virtual.SimulatedClient(WORLDS["calm"], cost_s, seed=1, layout=0.003, process=0.003)
    rules = () if allowed is None else (Rule(metric="latency", allowed=allowed),)
    decision = judge_sides(virtual.execute(asked, tmp_path / "run", client), Thresholds(rule=rules))
    assert decision.outcome is outcome
    assert (decision.base.run, decision.candidate.run) == ("rev:old", "rev:new")
    assert {ruling.implementation for ruling in decision.rulings} == {"x"}


def judged(
    folder: Path, asked: Thresholds, seen: Effect, floor: Estimate | None = None, *, is_apart: bool = False
) -> Ruling:
    """The ruling on the time of one cell with that effect."""
    found = scripts.run(folder / "run", names=NAMES, points=POINTS)
    (record, *_) = [each for each in found.records if each.implementation == "fused"]
    floors = {} if floor is None else {record.workload.id: floor}
    (ruling,) = side_by_side(
        [(record, seen)], match_records([record], [record]), asked, ALONE, floors, is_apart=is_apart
    )
    return ruling


@pytest.mark.parametrize(("high", "outcome"), [(1.11, Outcome.passed), (1.09, Outcome.inconclusive)])
def test_what_seems_slower_and_is_not_sure_is_no_pass(tmp_path: Path, high: float, outcome: Outcome) -> None:
    found = judged(tmp_path, Thresholds(), effect(1.05, high))
    assert found.outcome is outcome
    assert found.smallest is not None
    assert found.smallest < Thresholds().see
    assert found.low is not None
    assert (found.low > 1) is (outcome is Outcome.inconclusive)


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
    tmp_path: Path, allowed: float, high: float | None, outcome: Outcome
) -> None:
    asked = Thresholds(rule=(Rule(metric="latency", allowed=allowed),))
    assert judged(tmp_path, asked, effect(1.2, high)).outcome is outcome


@pytest.mark.parametrize(("allowed", "outcome"), [(math.inf, Outcome.passed), (None, Outcome.inconclusive)])
def test_a_whole_that_is_undecided_passes_where_any_growth_is_allowed(allowed: float | None, outcome: Outcome) -> None:
    assert judged_whole(effect(1.2, 1.7), allowed).outcome is outcome


@pytest.mark.parametrize(
    ("is_apart", "control_error", "allowed", "floor"),
    [(False, 0.001, 0.03, ""), (True, 0.001, 0.03, "5.0 %"), (True, 0.001, 0.06, ""), (True, 0.03, 0.06, "7.2 %")],
)
def test_apart_the_floor_is_the_controls_or_the_cells_own_whichever_is_larger(
    tmp_path: Path, *, is_apart: bool, control_error: float, allowed: float, floor: str
) -> None:
    control = Estimate(point=1.0, standard_error=control_error, num_clusters=9, num_samples=90)
    asked = Thresholds(rule=(Rule(metric="latency", allowed=allowed),))
    seen = effect(1.0, 1.05, margin=0.06, e_apart=1e9)
    found = judged(tmp_path, asked, seen, control, is_apart=is_apart)
    assert (found.kind, found.reason) == ((Kind.undecided, Reason.noise_floor) if floor else (Kind.same, None))
    assert not floor or f"identical code may seem {floor} apart" in found.words


@pytest.mark.parametrize(
    ("allowed", "high", "is_refused"), [(0.01, 1.018, True), (0.01, 1.009, False), (0.03, 1.018, False)]
)
def test_a_threshold_below_what_the_session_took_for_no_difference_is_refused(
    tmp_path: Path, *, allowed: float, high: float, is_refused: bool
) -> None:
    """The cell was left alone as soon as it was within 2 %: who asks for 1 % has no answer from it."""
    control = Estimate(point=1.0, standard_error=0.001, num_clusters=9, num_samples=90)
    asked = Thresholds(rule=(Rule(metric="latency", allowed=allowed),))
    found = judged(tmp_path, asked, effect(1.004, high, e_apart=1e9), control)
    refused = (Kind.undecided, Reason.smallest_effect)
    assert (found.kind, found.reason) == (refused if is_refused else (Kind.same, None))
    assert not is_refused or "compare with --smallest-effect 0.01" in found.words


@pytest.mark.usefixtures("many_visits")
@pytest.mark.parametrize(
    ("smallest", "kind", "reason"),
    [(0.02, Kind.undecided, Reason.smallest_effect), (0.005, Kind.slower, None)],
)
def test_one_percent_is_a_finding_where_it_is_asked_for(
    tmp_path: Path, smallest: float, kind: Kind, reason: Reason | None
) -> None:
    asked = virtual.with_sides(virtual.plan(1, ("x",), budget_s=120.0, seed=1))
    asked = msgspec.structs.replace(asked, smallest_effect=smallest)
    costs = {"x": 2e-3 * 1.012}
    client = virtual.SimulatedClient(WORLDS["calm"], lambda _, name: costs.get(name, 2e-3), seed=1)
    results = virtual.execute(asked, tmp_path / "run", client)
    rule = Rule(metric="latency", allowed=0.01)
    decision = judge_sides(results, Thresholds(rule=(rule,)))
    assert (kinds(decision), reasons(decision)) == ({kind}, {reason})


@pytest.mark.usefixtures("many_visits")
def test_what_processes_differ_by_is_the_floor_of_a_session_apart(tmp_path: Path) -> None:
    asked = virtual.with_sides(virtual.plan(1, ("x",), budget_s=120.0, seed=1), is_apart=True)
    client = virtual.SimulatedPair(WORLDS["calm"], lambda *_: 2e-3, seed=1, layout=0.001, process=0.05)
    results = virtual.execute(asked, tmp_path / "run", client)
    (row,) = comparisons(results)
    (control,) = noise_floors(results).values()
    assert row.high is not None
    assert control.largest_log is not None
    own, by_control = row.high / row.ratio - 1, math.expm1(control.largest_log)
    assert by_control < own / 2  # the control lies in the base's own process
    between = Thresholds(rule=(Rule(metric="latency", allowed=(by_control + own) / 2),))
    assert reasons(judge_sides(results, between)) == {Reason.noise_floor}


def test_a_session_that_was_cut_short_is_invalid_whatever_is_missing_from_it(tmp_path: Path) -> None:
    """Killed after the base's check and before the candidate's, it seems to have lost the candidate."""
    asked = virtual.with_sides(virtual.plan(2, ("x",), budget_s=5.0, seed=1))
    client = virtual.SimulatedClient(WORLDS["calm"], lambda *_: 1e-3, seed=1)
    results = virtual.execute(asked, tmp_path / "run", client)
    base = tuple(record for record in results.records if record.side == BASE)
    lost = dataclasses.replace(results, records=base)
    assert judge_sides(lost, Thresholds()).outcome is Outcome.finding
    killed = judge_sides(dataclasses.replace(lost, elapsed_s=None), Thresholds())
    assert killed.outcome is Outcome.invalid
    assert killed.words.endswith("go on with attnbench compare rev:old rev:new --resume run")
