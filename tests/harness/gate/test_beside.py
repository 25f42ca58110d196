"""One session in which both sides were measured: its verdicts, and what is certain, as a decision."""

import dataclasses
import gc
from pathlib import Path

import msgspec
import pytest

from harness.compare import comparisons, noise_floors
from harness.gate import beside
from harness.gate.judge import side
from harness.gate.rulings import Decision, Kind, Outcome
from harness.gate.thresholds import Rule, Thresholds
from harness.records import Status, Verdict
from harness.simulated import virtual
from harness.simulated.worlds import WORLDS
from harness.statistics.stats import Estimate
from tests.harness import journals
from tests.harness.gate import scripts

NAMES = ("sdpa", "fused")
POINTS = journals.workloads(seq_len=(512,), seed=(0, 1))
SUITE = Estimate(point=1.001, standard_error=0.002, num_clusters=9, num_samples=90)


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
    verdict = Verdict.slower if ratio > 1.02 else Verdict.equivalent
    return beside.judge(
        (side(found), side(found)),
        (base, candidate),
        comparisons(found),
        beside.overall(SUITE, verdict, 0.01),
        asked or Thresholds(),
        floors=noise_floors(found),
    )


def kinds(decision: Decision) -> set[Kind]:
    return {ruling.kind for ruling in decision.rulings if ruling.metric == "latency"}


def test_the_same_code_passes(tmp_path: Path) -> None:
    decision = session(tmp_path, 1.0)
    assert decision.outcome is Outcome.passed
    assert kinds(decision) == {Kind.same}


def test_five_percent_are_seen_side_by_side(tmp_path: Path) -> None:
    decision = session(tmp_path, 1.05)
    assert decision.outcome is Outcome.finding
    assert kinds(decision) == {Kind.slower}


def test_what_a_rule_allows_passes(tmp_path: Path) -> None:
    asked = Thresholds(rule=(Rule(metric="latency", allowed=0.4),))
    assert kinds(session(tmp_path, 1.3, asked)) == {Kind.same}


def test_a_threshold_below_the_sessions_floor_is_refused(tmp_path: Path) -> None:
    decision = session(tmp_path, 1.0, Thresholds(rule=(Rule(metric="latency", allowed=1e-4),)))
    assert kinds(decision) == {Kind.refused}
    assert decision.outcome is Outcome.inconclusive


@pytest.mark.parametrize(("is_checked", "kind"), [(True, Kind.faster), (False, Kind.suspicious)])
def test_half_the_time_asks_for_a_check(tmp_path: Path, is_checked: bool, kind: Kind) -> None:  # noqa: FBT001
    decision = session(tmp_path, 0.5, **({} if is_checked else {"agreement": None}))
    assert kinds(decision) == {kind}


def test_what_is_certain_counts(tmp_path: Path) -> None:
    decision = session(tmp_path, 1.0, status=Status.disagrees)
    assert Kind.failed in {ruling.kind for ruling in decision.of(Outcome.finding)}


def test_nothing_of_the_whole_is_inconclusive() -> None:
    assert beside.overall(None, Verdict.undecided, None).outcome is Outcome.inconclusive


@pytest.fixture
def little_garbage():
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("little_garbage")
@pytest.mark.parametrize(
    ("slowdown", "budget_s", "outcome"),
    [(0.0, 120.0, Outcome.passed), (0.05, 120.0, Outcome.finding), (0.0, 0.0, Outcome.inconclusive)],
)
def test_a_side_by_side_session_is_judged_as_a_whole(tmp_path, slowdown, budget_s, outcome):
    def cost_s(workload, name):
        return 1e-4 * workload.seq_len * (1.0 if name.endswith("(base)") else 1.0 + slowdown)

    asked = virtual.with_sides(virtual.plan(2, ("x",), budget_s=budget_s, seed=1))
    crew = virtual.VirtualCrew(WORLDS["calm"], cost_s, seed=1, layout=0.003, process=0.003)
    decision = beside.of_sides(virtual.execute(asked, tmp_path / "run", crew), Thresholds())
    assert decision.outcome is outcome
    assert (decision.base.run, decision.candidate.run) == ("rev:old", "rev:new")
    assert {ruling.implementation for ruling in decision.rulings} == {"x"}


def test_what_seems_slower_and_is_not_sure_is_no_pass(tmp_path: Path) -> None:
    found = scripts.run(tmp_path / "run", names=NAMES, points=POINTS)
    (record, *_) = [each for each in found.records if each.implementation == "fused"]
    (told, *_) = [each for each in comparisons(found) if each.workload == record.workload]
    known = {"verdict": Verdict.undecided, "ratio": 1.1, "high": 1.2, "minimum_detectable_effect": 0.05}
    outcomes = []
    for low in (0.99, 1.05):
        seen = msgspec.structs.replace(told, low=low, **known)
        decision = beside.judge(
            (side(found), side(found)),
            ([record], [record]),
            [seen],
            beside.overall(SUITE, Verdict.equivalent, 0.01),
            Thresholds(),
            floors={},
        )
        outcomes += [ruling.outcome for ruling in decision.rulings if ruling.metric == "latency"]
    assert outcomes == [Outcome.passed, Outcome.inconclusive]


def test_a_session_that_was_cut_short_is_invalid_whatever_is_missing_from_it(tmp_path: Path) -> None:
    """Killed after the base's check and before the candidate's, it seems to have lost the candidate."""
    asked = virtual.with_sides(virtual.plan(2, ("x",), budget_s=5.0, seed=1))
    crew = virtual.VirtualCrew(WORLDS["calm"], lambda *_: 1e-3, seed=1)
    whole = virtual.execute(asked, tmp_path / "run", crew)
    base = tuple(record for record in whole.records if record.implementation.endswith("(base)"))
    lost = dataclasses.replace(whole, records=base)
    assert beside.of_sides(lost, Thresholds()).outcome is Outcome.finding
    assert beside.of_sides(dataclasses.replace(lost, elapsed_s=None), Thresholds()).outcome is Outcome.invalid
