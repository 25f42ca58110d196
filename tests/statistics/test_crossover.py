"""Crossovers: the ladder, the next value to measure, and the place that follows."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.statistics.crossover import MOST_VALUES, STEP, Point, find_crossovers, ladder, next_value, point


def at(sign: int, log: float | None = None) -> Point:
    return Point(sign=sign, log=0.1 * sign if log is None else log, num_processes=8)


def search(values: list[int], sign_at) -> dict[int, Point]:
    """Search until nothing more can be learned, with an error-free sign at every value."""
    points: dict[int, Point] = {}
    while (value := next_value(points, values)) is not None:
        assert value not in points
        points[value] = sign_at(value)
    return points


@given(st.integers(1, 64), st.integers(2, 10_000))
def test_a_ladder_has_both_ends_and_even_steps(low: int, factor: int) -> None:
    values = ladder(low, low * factor)
    assert (values[0], values[-1]) == (low, low * factor)
    assert values == sorted(set(values))
    assert all(after <= max(before + 1, math.ceil(before * STEP) + 1) for before, after in itertools.pairwise(values))
    assert all(value % 8 == 0 for value in ladder(8, 256, 8))


@pytest.mark.parametrize(("low", "high", "multiple"), [(8, 8, 1), (16, 8, 1), (4, 64, 8), (0, 8, 1)])
def test_a_ladder_goes_up(low: int, high: int, multiple: int) -> None:
    with pytest.raises(ValueError, match="is no range"):
        ladder(low, high, multiple)


@given(st.integers(17, 4095))
def test_a_crossing_is_found_between_two_neighbours_of_the_ladder(where: int) -> None:
    values = ladder(16, 4096)
    points = search(values, lambda value: at(-1 if value < where else 1))
    (place,) = find_crossovers(points)
    assert place.low < where <= place.high
    assert values.index(place.high) == values.index(place.low) + 1
    assert place.low <= place.at <= place.high
    assert place.sign == 1
    assert len(points) <= 2 + math.ceil(math.log2(len(values)))


def test_what_stays_open_is_left_inside_the_interval() -> None:
    values = ladder(16, 4096)
    points = search(
        values, lambda value: at(0 if 200 < value < 400 else -1 if value < 300 else 1, math.log(value / 300))
    )
    (place,) = find_crossovers(points)
    assert place.low <= 200
    assert place.high >= 400
    assert place.at == pytest.approx(300, rel=0.01)
    assert len(points) <= MOST_VALUES


def test_two_that_never_change_places_are_looked_at_at_both_ends_and_in_the_middle() -> None:
    points = search(ladder(16, 4096), lambda _: at(1))
    assert len(points) == 3
    assert find_crossovers(points) == []


@pytest.mark.parametrize("sign", [1, -1, 0])
def test_a_clear_difference_has_a_sign_and_three_processes_have_none(sign: int) -> None:
    assert point([*np.random.default_rng(0).normal(0.1 * sign, 0.005, 8)]).sign == sign
    assert point([0.5] * 3) == Point(sign=0, log=0.5, num_processes=3)


def test_equal_times_are_called_different_in_less_than_a_twentieth_of_whole_searches() -> None:
    draws, wrong = np.random.default_rng(1), 0
    for _ in range(200):
        wrong += any(point([*draws.normal(0.0, 0.02, look)]).sign for look in (4, 8, 16) for _ in range(6))
    assert wrong <= 10
