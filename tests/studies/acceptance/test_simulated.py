"""Small forms of the simulated acceptance tests, with limits that suit so few repetitions."""

import numpy as np
import pytest

from attnbench.analysis import comparisons as compare
from attnbench.statistics import evidence
from studies.acceptance import simulated, small
from studies.acceptance.races import whole_run
from studies.acceptance.simulated import (
    bias,
    detectable_effect,
    most_likely,
    null_differences,
    null_sessions,
    racing,
    simulated_false_alarms,
)
from studies.simulated.virtual import SimulatedClient, plan
from studies.simulated.worlds import WORLDS

pytestmark = pytest.mark.usefixtures("many_visits")


def test_the_upper_limit_of_a_share_by_value():
    assert most_likely(0, 100) == pytest.approx(1 - 0.01 ** (1 / 100))
    assert most_likely(5, 5) == 1.0
    assert most_likely(40, 1000) == pytest.approx(0.0566, abs=0.001)


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_identical_arms_differ_symmetrically_in_every_world(world):
    both = null_differences(world, np.random.default_rng(1), 50, 400)
    for found in both:
        assert found.shape == (50, 400)
        assert np.mean(found > 0) == pytest.approx(0.5, abs=0.015)
        assert abs(np.median(found)) < 0.002
    assert np.array_equal(both, null_differences(world, np.random.default_rng(1), 50, 400))


def test_t3_few_false_alarms_however_often_one_looks():
    found = simulated_false_alarms(num_runs=300, num_blocks=300)
    assert (found.test, found.is_short, len(found.rows)) == ("simulated_false_alarms", True, len(WORLDS))
    assert all(row["share"] <= 0.08 for row in found.rows)
    assert np.mean([row["share"] for row in found.rows]) <= 0.045


@pytest.mark.long
def test_t4_no_session_of_the_same_code_raises_an_alarm():
    found = null_sessions(num_runs=len(WORLDS), num_workloads=2)
    assert found.passes, found.found
    assert {row["world"] for row in found.rows} == set(WORLDS)
    assert sum(row["equivalent, alarms"] for row in found.rows) > 32


@pytest.mark.long
def test_t4_sees_what_happens_where_each_cell_is_tested_on_its_own(monkeypatch):
    """Without e-BH, at 20 % for each cell: the margin hides it from users, and nothing of it from T4."""
    monkeypatch.setattr(evidence, "discoveries", lambda values, share: values >= 1 / 0.2)
    found = null_sessions(num_runs=4, num_workloads=8)
    assert not found.passes, found.found


@pytest.mark.long
def test_intervals_of_races_cover_the_truth_though_a_race_stops_when_it_likes_what_it_sees():
    """Of 72 that each cover in 95 of 100, fewer than 62 would be bad luck of one in a thousand."""
    truth = {"baseline": 1.0, "near": 1.03, "far": 1.1, "same": 1.0}
    covered = []
    for world in WORLDS.values():
        client = SimulatedClient(world, lambda _, name: 2e-3 * truth[name], seed=5, layout=simulated.LAYOUT)
        results = whole_run(plan(3, tuple(truth), budget_s=15.0, seed=5), client)
        found = [row for row in compare.comparisons(results) if row.low is not None]
        covered += [row.low <= truth[row.implementation] <= row.high for row in found]
    assert len(covered) == 9 * len(WORLDS)
    assert sum(covered) >= 0.86 * len(covered)


@pytest.mark.long
def test_t9_ratios_are_not_biased():
    found = bias(num_runs=4, num_visits=9)
    assert len(found.rows) == len(WORLDS) * len(simulated.T9_RATIOS)
    errors = np.array([row["errors"] for row in found.rows])
    assert abs(errors.mean()) <= 0.2
    assert abs(np.mean([row["bias"] for row in found.rows])) <= 1e-3
    assert abs(np.mean(errors * np.sign([row["ratio"] - 1 for row in found.rows]))) <= 0.2


@pytest.mark.long
def test_t12_racing_saves_time_and_changes_few_verdicts():
    found = racing(num_runs=2, num_workloads=6)
    raced, uniform, equal, right, cells = (
        sum(r[key] for r in found.rows) for key in ("raced_s", "uniform_s", "equal", "right", "cells")
    )
    assert raced <= 0.8 * uniform  # of 16 workloads it is some 40 %
    assert equal >= 0.97 * cells
    assert right >= 0.9 * cells
    assert right >= sum(row["right_uniform"] for row in found.rows) - 0.03 * cells
    assert f"{right / cells:.1%} are right" in found.found


@pytest.mark.long
def test_t13_what_is_said_to_be_detectable_is_found_more_often_than_not():
    found = detectable_effect(num_runs=6)
    assert 0.6 <= np.mean([row["found"] for row in found.rows]) <= 0.95
    assert all(row["effect"] >= 0.02 for row in found.rows)


def test_a_slowdown_of_one_percent_is_found_and_identical_code_alarms_nobody():
    found = small.small_slowdown_simulated(num_runs=16)
    assert found.passes, found.found
    assert found.is_short
    assert "slower in 16 of 16" in found.found


def test_who_alarms_or_misses_does_not_pass():
    same = {"tool": "attnbench", "kind": "same", "verdict": "equivalent", "log": 0.0, "decided_s": 1.0}
    slower = same | {"kind": "extra work", "verdict": "slower", "log": 0.01}
    theirs = [{"tool": "other", "statistic": "mean", "kind": "same", "log": log} for log in (0.002, -0.005)]
    cases = [
        ([same, slower], True),
        ([same | {"verdict": "faster"}, slower], False),
        ([same, slower | {"decided_s": 61.0}], False),
        ([same, slower | {"verdict": "equivalent"}], False),
    ]
    for rows, passes in cases:
        found = small.small_slowdown([*rows, *theirs], short=True)
        assert found.passes is passes, found.found
    assert found.rivals["other"].startswith("75% by mean (identical code up to 0.50% apart, n=2)")
