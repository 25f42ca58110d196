"""Time between two separate runs: simulated ones, where the truth is known, and the arithmetic by value."""

import math
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy import stats as reference

from attnbench.analysis.gate import times
from attnbench.analysis.gate.judge import judge
from attnbench.analysis.gate.rulings import EVERY, Decision, Kind, Outcome
from attnbench.analysis.gate.thresholds import Rule, Thresholds
from attnbench.analysis.gate.times import Effect, Relative
from attnbench.statistics.intervals import Estimate
from studies.simulated import virtual
from studies.simulated.virtual import SimulatedClient, plan
from studies.simulated.worlds import WORLDS

pytestmark = pytest.mark.usefixtures("many_visits")

NAMES = ("reference", "one", "other")
RATIO = {"reference": 1.0, "one": 1.3, "other": 0.8}
NUM_SESSIONS = 40
STRICT = Thresholds(between_runs=0.0, rule=(Rule(metric="latency", allowed=0.0),))
"""Nothing is allowed, and simulated runs differ by nothing but noise: what is judged here is the error."""
KEEN = Thresholds(between_runs=0.0, rule=(Rule(metric="latency", allowed=0.02),))


def session(folder: Path, world: str, seed: int, slowdown: float, thresholds: Thresholds, *, budget_s=8.0) -> Decision:
    """Two whole runs, each on a machine of its own; in the second, `one` takes longer."""

    def run(name: str, number: int, ratio: float):
        def seconds(workload, implementation):
            return 2e-3 * RATIO[implementation] * (ratio if implementation == "one" else 1.0)

        client = SimulatedClient(WORLDS[world], seconds, seed=number, layout=0.003)
        asked = msgspec.structs.replace(plan(3, NAMES, budget_s=budget_s, seed=number), num_rounds=9)
        return virtual.execute(asked, folder / f"{name}{seed}", client)

    return judge(run("base", 2 * seed, 1.0), run("candidate", 2 * seed + 1, slowdown), thresholds)


def test_of_sessions_with_nothing_changed_at_most_one_in_twenty_alarms(tmp_path):
    worlds = list(WORLDS)
    found = [
        session(tmp_path, worlds[seed % len(worlds)], seed, 1.0, STRICT, budget_s=4.0) for seed in range(NUM_SESSIONS)
    ]
    alarms = [decision for decision in found if decision.outcome is Outcome.finding]
    assert len(alarms) <= 0.05 * NUM_SESSIONS
    assert sum(ruling.smallest is not None for decision in found for ruling in decision.rulings) > 200


@pytest.mark.parametrize("world", WORLDS)
def test_five_percent_are_found_or_said_to_be_out_of_sight(world, tmp_path):
    decision = session(tmp_path, world, 7, 1.05, KEEN, budget_s=60.0)
    timed = [ruling for ruling in decision.rulings if ruling.metric == "latency" and ruling.implementation == "one"]
    assert len(timed) == 3
    for ruling in timed:
        assert ruling.effect == pytest.approx(1.05, abs=0.04)
        assert ruling.kind is Kind.slower or ruling.smallest > 0.045
    others = [ruling for ruling in decision.rulings if ruling.implementation == "other"]
    assert not [ruling for ruling in others if ruling.outcome is Outcome.finding]


def test_thirty_percent_are_found_in_each_world(tmp_path):
    for seed, world in enumerate(WORLDS):
        found = session(tmp_path, world, seed, 1.3, Thresholds(between_runs=0.0))
        kinds = Counter(ruling.kind for ruling in found.rulings if ruling.implementation == "one")
        assert kinds[Kind.slower] >= 2, world


def estimate(log: float, error: float, degrees: float = 8.0) -> Estimate:
    return Estimate(
        point=math.exp(log), standard_error=error, num_clusters=int(degrees) + 1, num_samples=40, degrees=degrees
    )


def relative(log: float, error: float = 0.01) -> Relative:
    return Relative(ratio=estimate(log, error), floor=estimate(0.0, 0.002), num_epochs=3)


def test_errors_add_in_squares_and_what_runs_differ_by_counts_twice():
    found = times.effect(("w", "i"), relative(0.3, 0.01), relative(0.4, 0.02), between_runs=0.03)
    assert found.ratio.point == pytest.approx(math.exp(0.1))
    assert found.ratio.standard_error == pytest.approx(math.sqrt(0.01**2 + 0.02**2 + 2 * 0.03**2))
    bare = times.effect(("w", "i"), relative(0.3, 0.01), relative(0.4, 0.02), between_runs=0.0)
    welch = (0.01**2 + 0.02**2) ** 2 / (0.01**4 / 8 + 0.02**4 / 8)
    assert bare.ratio.degrees == pytest.approx(welch)


def test_swapping_the_runs_turns_the_effect_upside_down():
    one, other = relative(0.3), relative(0.35)
    there, back = (times.effect(("w", "i"), *pair, 0.02).ratio for pair in ((one, other), (other, one)))
    assert there.point == pytest.approx(1 / back.point)
    assert times.p_value(there) == pytest.approx(times.p_value(back))


def test_the_p_value_is_that_of_student():
    assert times.p_value(estimate(0.03, 0.01, 5.0)) == pytest.approx(2 * reference.t.sf(3.0, 5))
    assert times.p_value(estimate(0.0, 0.0)) == 1.0
    assert times.p_value(estimate(0.01, 0.0)) == 0.0


def effects(*logs: float, error: float = 0.01) -> list[Effect]:
    return [
        Effect(workload="w", implementation=str(n), ratio=estimate(log, error, 1e6), floor=None, num_epochs=3)
        for n, log in enumerate(logs)
    ]


def test_many_cells_ask_for_more_of_each():
    assert times.sure(effects(0.025)) == [True]
    assert times.sure(effects(0.025, *[0.0] * 15)) == [False] * 16
    assert times.sure(effects(*[0.04] * 16)) == [True] * 16
    assert times.sure([]) == []


def test_the_smallest_effect_is_found_four_times_in_five():
    """Effects of that very size, drawn anew: the share that is called slower."""
    given = effects(*[0.0] * 8)
    (least, *_) = times.smallest(given, [False] * 8, [0.02] * 8)
    assert least is not None
    draws = np.random.default_rng(3).normal(math.log1p(least), 0.01, 400)
    asked = times.Asked(allowed=0.02, is_by_rule=False, see=1.0, fewest_epochs=3)
    called = 0
    for log in draws:
        drawn = effects(float(log), *[0.0] * 7)
        is_sure = times.sure(drawn)[0]
        called += times.rule(drawn[0], asked, is_sure=is_sure, smallest=least)[0] is Kind.slower
    assert 0.75 < called / 400 < 0.85


def test_the_suite_is_the_geometric_mean_and_takes_cells_of_a_workload_as_one():
    given = [
        Effect(workload=w, implementation=i, ratio=estimate(log, 0.01, 1e6), floor=None, num_epochs=3)
        for w, i, log in (("a", "x", 0.1), ("a", "y", 0.2), ("b", "x", 0.05))
    ]
    found = times.suite(given, Thresholds(), 0.0, 0.02)
    assert found.effect == pytest.approx(math.exp((0.15 + 0.05) / 2))
    assert found.high / found.effect == pytest.approx(math.exp(1.96 * 0.01 / math.sqrt(2)), rel=1e-3)
    assert (found.workload, found.kind) == (EVERY, Kind.slower)
    shifted = times.suite(given, Thresholds(), 0.02, 0.02)
    assert shifted.high / shifted.effect == pytest.approx(
        math.exp(1.96 * math.hypot(0.01, 0.04) / math.sqrt(2)), rel=1e-3
    )


def test_what_would_show_is_told_in_percent_as_long_as_that_says_something():
    assert times.reach(0.123) == "12 %"
    assert times.reach(1e6) == "10 times the time"


def test_a_suite_without_times_is_undecided():
    found = times.suite([], Thresholds(), 0.02, 0.05)
    assert (found.kind, found.outcome) == (Kind.undecided, Outcome.inconclusive)


def test_rounds_are_made_whatever_is_decided_and_spread_over_the_processes(tmp_path):
    client = SimulatedClient(
        WORLDS["calm"], lambda _, name: 2e-3 * {"reference": 1, "one": 9, "other": 5}[name], seed=1
    )
    asked = msgspec.structs.replace(plan(2, NAMES, budget_s=0.0), num_rounds=9)
    results = virtual.execute(asked, tmp_path / "run", client)
    assert set(results.num_visits.values()) == {9}
    for record in results.records:
        epochs = [sample.epoch for sample in record.measurement("latency").samples if sample.block == 0]
        assert Counter(epochs) == {0: 3, 1: 3, 2: 3}
