"""Verdicts: what an interval says against 1 and the margin, and which cells are compared at all."""

import dataclasses
import math
from pathlib import Path

import pytest

from attnbench.analysis.comparisons import by_implementation, comparisons, noise_floors, winners
from attnbench.analysis.results import Results
from attnbench.storage.records import Arm, Comparison, Verdict
from tests import journals

POINTS = journals.workloads(mask=("none", "causal"), seq_len=(128, 2048))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return journals.write(tmp_path_factory.mktemp("run"), POINTS)


def named(results: Results, name: str) -> list[Comparison]:
    return [found for found in comparisons(results) if found.implementation == name]


def test_ok_cells_but_the_baseline_are_compared_and_no_others(results: Results) -> None:
    timed = {
        (record.workload.id, record.implementation)
        for record in results.records
        if record.status == "ok" and record.implementation != journals.BASELINE
    }
    assert {(found.workload.id, found.implementation) for found in comparisons(results)} == timed


def test_true_ratios_are_found(results: Results) -> None:
    for found in comparisons(results):
        truth = journals.seconds(found.workload, found.implementation)
        truth /= journals.seconds(found.workload, journals.BASELINE)
        assert found.ratio == pytest.approx(truth, rel=0.01)
        assert found.baseline == journals.BASELINE


def test_nearly_equal_is_equivalent_and_twice_the_time_is_slower(results: Results) -> None:
    assert {found.verdict for found in named(results, "sdpa_flash")} == {Verdict.equivalent}
    assert {found.verdict for found in named(results, "fused")} == {Verdict.slower}


def test_half_the_time_is_faster(tmp_path: Path) -> None:
    quick = journals.write(tmp_path, POINTS, ("sdpa", "sdpa_flash"), slowdown=0.5)
    assert {found.verdict for found in comparisons(quick)} == {Verdict.faster}


def test_one_epoch_of_two_visits_decides_nothing(tmp_path: Path) -> None:
    short = journals.write(tmp_path, POINTS, ("sdpa", "fused"), num_epochs=1, num_visits=2)
    for found in comparisons(short):
        assert (found.verdict, found.low, found.high) == (Verdict.undecided, None, None)
        assert found.minimum_detectable_effect is None
        assert found.ratio > 1


def test_without_a_baseline_there_is_no_comparison(tmp_path: Path) -> None:
    assert comparisons(journals.write(tmp_path, POINTS, ("fused", "einsum"))) == []


def test_identical_code_gives_a_ratio_near_one(results: Results) -> None:
    floors = noise_floors(results)
    assert set(floors) == {workload.id for workload in POINTS}
    for floor in floors.values():
        assert floor.point == pytest.approx(1.0, abs=0.02)


def test_the_fastest_is_clear_where_all_others_are_slower(results: Results) -> None:
    for winner in winners(results):
        times = {name: journals.seconds(winner.workload, name) for name in journals.SPEEDS}
        first, second = sorted(set(times.values()))[:2]
        assert times[winner.implementation] == first
        assert winner.is_clear is (second > 1.02 * first and list(times.values()).count(first) == 1)
        if winner.is_clear:
            assert winner.ratio is not None
            assert winner.ratio.point == pytest.approx(second / first, rel=0.02)
            assert times[winner.rivals[0]] == second


def test_nobody_is_said_to_rival_the_baseline_who_was_called_slower(tmp_path: Path) -> None:
    short = journals.write(tmp_path, POINTS, num_visits=3)
    slower = {each.key for each in comparisons(short) if each.verdict is Verdict.slower}
    assert slower
    for winner in winners(short):
        if winner.implementation == "sdpa" and not winner.is_clear:
            keys = {(winner.workload.id, Arm(implementation=name)) for name in winner.rivals}
            assert not keys & slower


def test_among_equals_there_is_no_clear_winner(tmp_path: Path) -> None:
    points = journals.workloads(seed=tuple(range(30)))
    names = ("sdpa", *(f"equal_{number}" for number in range(4)))
    equal = journals.write(tmp_path, points, names, slowdown=1.3e-3 / 2e-3)
    found = winners(equal)
    assert len(found) == 30
    assert not any(winner.is_clear for winner in found)
    assert {len(winner.rivals) for winner in found} == {4}


def test_the_mean_over_workloads_is_geometric(results: Results) -> None:
    found = by_implementation(results)["fused"].effect.ratio
    logs = [math.log(each.ratio) for each in named(results, "fused")]
    assert math.log(found.point) == pytest.approx(sum(logs) / len(logs))
    assert found.low is not None
    assert found.low < found.point


def test_with_too_few_processes_there_is_a_mean_and_nothing_that_says_how_sure_it_is(tmp_path: Path) -> None:
    points = journals.workloads(seq_len=(128, 2048))
    found = by_implementation(journals.write(tmp_path, points, ("sdpa", "fused"), num_epochs=1, num_visits=4))
    assert found["fused"].effect.num_cells == len(points)
    assert found["fused"].effect.ratio.low is None
    assert found["fused"].verdict is Verdict.undecided


def test_discarded_blocks_have_no_say(results: Results) -> None:
    workload = POINTS[0].id
    kept = {(0, visit, block) for visit in range(4) for block in range(4)}
    discarded = {
        workload: frozenset(
            (epoch, visit, block) for epoch, visit, block in _blocks() if (epoch, visit, block) not in kept
        )
    }
    disturbed = dataclasses.replace(results, discarded=discarded)
    (found,) = [each for each in comparisons(disturbed) if _is(each, workload, "fused")]
    (whole,) = [each for each in comparisons(results) if _is(each, workload, "fused")]
    assert found.ratio != whole.ratio
    assert found.e_same < whole.e_same


def _blocks() -> list[tuple[int, int, int]]:
    return [(epoch, epoch * 4 + visit, block) for epoch in range(3) for visit in range(4) for block in range(4)]


def _is(found: Comparison, workload: str, name: str) -> bool:
    return (found.workload.id, found.implementation) == (workload, name)
