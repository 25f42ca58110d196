"""Verdicts: what an interval says against 1 and the margin, and which cells are compared at all."""

import math
from pathlib import Path

import pytest

from harness.compare import SMALLEST_EFFECT, comparisons, margin, noise_floors, verdict
from harness.records import Comparison, Verdict
from harness.stats import Estimate
from harness.store import Results
from tests.harness import journals

POINTS = journals.workloads(mask=("none", "causal"), seq_len=(128, 2048))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return journals.write(tmp_path_factory.mktemp("run"), POINTS)


def estimate(point: float, relative_error: float | None) -> Estimate:
    return Estimate(point=point, standard_error=relative_error, num_clusters=10, num_samples=40)


def named(results: Results, name: str) -> list[Comparison]:
    return [found for found in comparisons(results) if found.implementation == name]


@pytest.mark.parametrize(
    ("point", "error", "expected"),
    [
        (1.10, 0.01, Verdict.slower),
        (1 / 1.10, 0.01, Verdict.faster),
        (1.01, 0.0001, Verdict.equivalent),  # surely different, and too little to matter
        (1.00, 0.005, Verdict.equivalent),
        (1.05, 0.04, Verdict.undecided),  # large, not sure
        (1.015, 0.005, Verdict.undecided),  # may or may not be beyond the margin
        (1.50, None, Verdict.undecided),
    ],
)
def test_verdict_by_value(point: float, error: float | None, expected: Verdict) -> None:
    assert verdict(estimate(point, error), SMALLEST_EFFECT) is expected


@pytest.mark.parametrize("point", [1.005, 1.019, 1.021, 1.03, 1.2])
@pytest.mark.parametrize("error", [0.0001, 0.002, 0.01, 0.1])
def test_swapping_arms_swaps_faster_and_slower(point: float, error: float) -> None:
    swapped = {Verdict.slower: Verdict.faster}
    there, back = verdict(estimate(point, error), 0.02), verdict(estimate(1 / point, error), 0.02)
    assert back is swapped.get(there, there)


def test_margin_is_two_percent_or_the_noise_floor_whichever_is_more() -> None:
    assert margin(None) == SMALLEST_EFFECT
    assert margin(estimate(1.0, None)) == SMALLEST_EFFECT
    assert margin(estimate(1.0, 0.001)) == SMALLEST_EFFECT
    assert margin(estimate(1.04, 0.01)) == pytest.approx(math.expm1(math.log(1.04) + 2.262157 * 0.01), rel=1e-5)


def test_a_noisy_cell_calls_nothing_below_its_own_noise() -> None:
    limit = margin(estimate(1.04, 0.01))
    assert verdict(estimate(1.05, 0.001), limit) is Verdict.equivalent


def test_on_a_very_noisy_machine_nothing_is_called_equivalent() -> None:
    limit = margin(estimate(1.5, 0.2))
    assert limit > 1.0
    assert verdict(estimate(1.2, 0.01), limit) is Verdict.undecided
    assert verdict(estimate(1.01, 0.01), limit) is Verdict.equivalent


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
    short = journals.write(tmp_path, POINTS, ("sdpa", "fused"), num_epochs=1)
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
