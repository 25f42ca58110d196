"""Times, their intervals over processes, and the one number of each process: by value and by law."""

import math

import numpy as np
import pytest

from attnbench.statistics.intervals import by_process, effect_of, median_estimate, visit_numbers
from attnbench.statistics.verdict import LAYOUT_LOG
from attnbench.storage.records import Sample

NUM_BLOCKS = 4
T_3 = 3.182446
"""The quantile at 97.5 % of Student's t with 3 degrees of freedom."""


def samples(processes: list[list[float]], visit: int = 0) -> list[Sample]:
    """Build one visit of each process, with a value for each block."""
    return [
        Sample(value=value, epoch=epoch, visit=visit + epoch, block=block)
        for epoch, values in enumerate(processes)
        for block, value in enumerate(values)
    ]


def test_interval_of_a_median_by_value() -> None:
    found = median_estimate(samples([[1.0, 1.0], [math.e, math.e], [math.e**2] * 2, [math.e**3] * 2]))
    half = T_3 * math.sqrt(5 / 3) / 2 * math.sqrt(math.pi / 2)
    assert found.point == pytest.approx((math.e + math.e**2) / 2)
    ends = (found.low / found.point, found.high / found.point)
    assert ends == pytest.approx((math.exp(-half), math.exp(half)), rel=1e-5)
    assert (found.num_processes, found.num_visits, found.num_samples) == (4, 4, 8)


def test_more_visits_in_the_same_processes_do_not_narrow_the_interval() -> None:
    levels = [[1.0], [1.1], [1.2], [1.3]]
    once = median_estimate(samples(levels))
    often = median_estimate([each for visit in range(0, 400, 4) for each in samples(levels, visit)])
    assert (often.low, often.high) == pytest.approx((once.low, once.high))
    assert (once.num_visits, often.num_visits) == (4, 400)


@pytest.mark.parametrize("num_processes", [4, 8, 16])
@pytest.mark.parametrize(("between", "within"), [(0.05, 0.005), (0.02, 0.02), (0.005, 0.05)])
def test_median_interval_covers_the_truth(num_processes: int, between: float, within: float) -> None:
    draws = np.random.default_rng(num_processes)
    logs = draws.normal(0, between, (300, num_processes, 1)) + draws.normal(0, within, (300, num_processes, NUM_BLOCKS))
    found = [median_estimate(samples(session)) for session in np.exp(logs).tolist()]
    assert np.mean([each.low <= 1.0 <= each.high for each in found]) >= 0.93


def test_a_level_shared_by_a_block_cancels_in_its_ratio() -> None:
    levels = [[1.0, 7.0, 0.2], [3.0, 50.0, 0.1], [2.0, 2.0, 9.0]]
    found = visit_numbers(samples([[1.5 * m for m in visit] for visit in levels]), samples(levels))
    assert [*found.values()] == pytest.approx([math.log(1.5)] * 3)


def test_no_pair_no_number() -> None:
    assert visit_numbers([Sample(1.0, block=0)], [Sample(1.0, block=1)]) == {}
    assert visit_numbers([], [Sample(1.0)]) == {}
    assert visit_numbers([Sample(1.0)], []) == {}
    assert visit_numbers([], []) == {}
    with pytest.raises(ValueError, match="no number"):
        effect_of({})


def test_a_process_gives_the_mean_of_its_visits_and_a_single_one_shares_its_bias() -> None:
    visits = {(0, 0): 0.1, (0, 1): 0.3, (2, 2): 0.5}
    assert by_process(visits) == pytest.approx({0: 0.2, 2: 0.5})
    assert (effect_of(visits).num_measured, effect_of(visits).bias) == (2, 0.0)
    alone = effect_of({(0, visit): 0.1 for visit in range(8)})
    assert (alone.num_processes, alone.bias) == (8, LAYOUT_LOG)
