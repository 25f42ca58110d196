"""Intervals, ratios and effects: by value, by law, and by simulation with a fixed seed."""

import math

import numpy as np
import pytest

from attnbench.statistics.intervals import (
    Estimate,
    Pairs,
    growth_exponent,
    mean_of,
    median,
    median_estimate,
    paired_ratio,
    pairs,
    t_quantile,
)
from attnbench.storage.records import Sample

NUM_BLOCKS = 4


def samples(visits: list[list[float]], epoch: int = 0) -> list[Sample]:
    return [
        Sample(value=value, epoch=epoch, visit=visit, block=block)
        for visit, values in enumerate(visits)
        for block, value in enumerate(values)
    ]


def ratio_of(arm: list[Sample], baseline: list[Sample]) -> Estimate | None:
    return paired_ratio(pairs(arm, baseline))


def noisy(
    rng: np.random.Generator, *, num_visits: int, between: float, within: float, log: float = 0.0
) -> list[Sample]:
    levels = rng.normal(log, between, num_visits)
    return samples([list(np.exp(level + rng.normal(0, within, NUM_BLOCKS))) for level in levels])


def test_median_of_an_even_number_is_the_middle_of_the_middle_two() -> None:
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5


def test_t_quantile_by_value() -> None:
    assert t_quantile(0.975, 2) == pytest.approx(4.302653)
    assert t_quantile(0.80, 10) == pytest.approx(0.879058)


def test_interval_of_a_median_by_value() -> None:
    found = median_estimate(samples([[1.0, 1.0], [math.e, math.e], [math.e**2, math.e**2]]))
    half = 4.302653 * 1.0 / math.sqrt(3) * math.sqrt(math.pi / 2)
    assert found.point == pytest.approx(math.e)
    assert found.low == pytest.approx(math.exp(1 - half), rel=1e-5)
    assert found.high == pytest.approx(math.exp(1 + half), rel=1e-5)
    assert (found.num_clusters, found.num_samples) == (3, 6)


def test_visits_of_different_epochs_are_different_clusters() -> None:
    both = samples([[1.0], [1.1]], epoch=0) + samples([[1.2], [1.3]], epoch=1)
    assert median_estimate(both).num_clusters == 4


@pytest.mark.parametrize("num_visits", [1, 2])
def test_fewer_than_three_visits_have_no_interval(num_visits: int) -> None:
    found = median_estimate(samples([[1.0, 1.2, 1.1]] * num_visits))
    assert (found.low, found.high, found.half_width, found.largest_log) == (None, None, None, None)


def test_more_samples_in_the_same_visits_do_not_narrow_the_interval() -> None:
    once = median_estimate(samples([[1.0], [1.1], [1.2]]))
    often = median_estimate(samples([[1.0] * 50, [1.1] * 50, [1.2] * 50]))
    assert often.half_width == pytest.approx(once.half_width)


def test_median_scales_with_the_unit_and_its_relative_interval_does_not() -> None:
    rng = np.random.default_rng(1)
    drawn = noisy(rng, num_visits=6, between=0.1, within=0.1)
    scaled = [Sample(s.value * 1000, epoch=s.epoch, visit=s.visit, block=s.block) for s in drawn]
    one, thousand = median_estimate(drawn), median_estimate(scaled)
    assert thousand.point == pytest.approx(1000 * one.point)
    assert thousand.half_width == pytest.approx(one.half_width)


def test_a_level_shared_by_a_block_cancels_in_its_ratio() -> None:
    levels = [[1.0, 7.0, 0.2], [3.0, 50.0, 0.1], [2.0, 2.0, 9.0]]
    found = ratio_of(samples([[1.5 * m for m in visit] for visit in levels]), samples(levels))
    assert found is not None
    assert found.point == pytest.approx(1.5)
    assert found.half_width == pytest.approx(0.0, abs=1e-12)


def test_ratio_uses_only_blocks_that_both_arms_share() -> None:
    arm = [Sample(2.0, block=0), Sample(1000.0, block=1)]
    found = ratio_of(arm, [Sample(1.0, block=0), Sample(9.0, block=7)])
    assert found is not None
    assert (found.point, found.num_samples) == (2.0, 1)


def test_a_discarded_block_has_no_pair() -> None:
    arm = [Sample(2.0, block=0), Sample(1000.0, block=1)]
    found = pairs(arm, [Sample(1.0, block=0), Sample(1.0, block=1)], discarded={(0, 0, 1)})
    assert found.logs.tolist() == [math.log(2.0)]


def test_pairs_are_in_the_order_of_time_and_can_be_chosen_by_visit() -> None:
    arm, baseline = samples([[2.0, 4.0], [8.0], [16.0]]), samples([[1.0, 1.0], [1.0], [1.0]])
    found = pairs(arm[::-1], baseline)
    assert np.exp(found.logs) == pytest.approx([2.0, 4.0, 8.0, 16.0])
    assert np.exp(found.of_visits(0).logs) == pytest.approx([2.0, 4.0, 16.0])
    assert len(Pairs(logs=np.array([]), visits=()).of_visits(1).logs) == 0


def biased(rng: np.random.Generator, *, num_visits: tuple[int, ...], between: float, within: float) -> list[Sample]:
    """Samples whose epochs lie apart by `between` on the log scale, and their visits by `within`."""
    return [
        Sample(value=math.exp(bias + rng.normal(0, within)), epoch=epoch, visit=visit)
        for epoch, number in enumerate(num_visits)
        for bias in [rng.normal(0, between)]
        for visit in range(number)
    ]


@pytest.mark.parametrize("num_visits", [(5, 5, 5), (10,) * 6, (1, 1, 1, 20, 20, 20, 20, 20)])
@pytest.mark.parametrize(("between", "within"), [(0.0, 0.02), (0.01, 0.01), (0.03, 0.01)])
def test_interval_covers_the_truth_where_epochs_have_a_bias_of_their_own(
    num_visits: tuple[int, ...], between: float, within: float
) -> None:
    rng = np.random.default_rng(20)
    found = []
    for _ in range(400):
        arm = biased(rng, num_visits=num_visits, between=between, within=within)
        ratio = ratio_of(arm, [Sample(1.0, epoch=each.epoch, visit=each.visit) for each in arm])
        assert ratio is not None
        found.append(covers(ratio, 1.0))
    assert 0.915 <= np.mean(found) <= 0.99


def test_mean_of_ratios_is_geometric_and_its_error_adds_up() -> None:
    one = Estimate(point=2.0, standard_error=0.03, num_clusters=8, num_samples=32)
    other = Estimate(point=8.0, standard_error=0.04, num_clusters=8, num_samples=32)
    found = mean_of([one, other])
    assert found.point == pytest.approx(4.0)
    assert found.standard_error == pytest.approx(0.025)
    assert found.degrees == pytest.approx(7 * 0.0025**2 / (0.0009**2 + 0.0016**2))


def test_no_pair_no_ratio() -> None:
    assert ratio_of([Sample(1.0, block=0)], [Sample(1.0, block=1)]) is None
    assert ratio_of([], [Sample(1.0)]) is None
    assert ratio_of([Sample(1.0)], []) is None


def test_swapping_arms_flips_the_sign_and_keeps_the_width() -> None:
    rng = np.random.default_rng(2)
    one = noisy(rng, num_visits=5, between=0.1, within=0.1, log=0.3)
    other = noisy(rng, num_visits=5, between=0.1, within=0.1)
    there, back = ratio_of(one, other), ratio_of(other, one)
    assert there is not None
    assert back is not None
    assert math.log(back.point) == pytest.approx(-math.log(there.point))
    assert back.half_width == pytest.approx(there.half_width)


def test_order_of_samples_changes_nothing() -> None:
    drawn = noisy(np.random.default_rng(3), num_visits=5, between=0.1, within=0.1)
    one, other = median_estimate(drawn), median_estimate(drawn[::-1])
    assert other.point == one.point
    assert other.half_width == pytest.approx(one.half_width)


@pytest.mark.parametrize("num_visits", [3, 6, 15])
@pytest.mark.parametrize(("between", "within"), [(0.05, 0.005), (0.02, 0.02), (0.005, 0.05)])
def test_median_interval_covers_the_truth(num_visits: int, between: float, within: float) -> None:
    rng = np.random.default_rng(num_visits)
    found = [median_estimate(noisy(rng, num_visits=num_visits, between=between, within=within)) for _ in range(300)]
    assert 0.93 <= np.mean([covers(estimate, 1.0) for estimate in found]) <= 0.995


@pytest.mark.parametrize("num_visits", [3, 6, 15])
@pytest.mark.parametrize(("between", "within"), [(0.05, 0.005), (0.005, 0.05)])
def test_ratio_interval_covers_the_truth(num_visits: int, between: float, within: float) -> None:
    rng = np.random.default_rng(10 + num_visits)
    covered = []
    for _ in range(300):
        arm = noisy(rng, num_visits=num_visits, between=between, within=within, log=0.2)
        ratio = ratio_of(arm, noisy(rng, num_visits=num_visits, between=0.0, within=within))
        assert ratio is not None
        covered.append(covers(ratio, math.exp(0.2)))
    assert 0.925 <= np.mean(covered) <= 0.975


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_growth_exponent_of_a_power_law_is_its_power(power: float) -> None:
    lengths = [128, 512, 2048]
    assert growth_exponent(lengths, [3e-5 * length**power for length in lengths]) == pytest.approx(power)


def test_growth_needs_two_lengths() -> None:
    assert growth_exponent([512, 512], [1.0, 2.0]) is None
    assert growth_exponent([], []) is None


def covers(estimate: Estimate, truth: float) -> bool:
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low <= truth <= estimate.high
