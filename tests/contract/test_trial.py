"""Calls are timed against one another by a virtual clock: each call takes what is planted."""

import itertools
import math

import pytest

from attnbench.contract.trial import BEHIND, ENOUGH_S, FEWEST, LEAST_SPREAD, MOST, READING_S, trial
from attnbench.devices import Clock


class Planted(Clock):
    """Time goes on only inside of calls; each reading takes longer by the next of some factors."""

    def __init__(self, disturbed=(1.0,)):
        self.resolution_s = 1e-9
        self.time_s = 0.0
        self.disturbed = itertools.cycle(disturbed)

    def elapsed(self, call, num_calls):
        start = self.time_s
        for _ in range(num_calls):
            call()
        return (self.time_s - start) * next(self.disturbed)

    def call(self, seconds, seen=None):
        def take():
            self.time_s += seconds
            if seen is not None:
                seen.append(seconds)

        return take


def test_the_ratio_to_the_first_is_found():
    clock = Planted()
    found = trial({"usual": clock.call(1e-3), "fast": clock.call(0.8e-3), "slow": clock.call(1.2e-3)}, clock)
    assert set(found) == {"fast", "slow"}
    assert found["fast"].log == pytest.approx(math.log(0.8))
    assert found["slow"].log == pytest.approx(math.log(1.2))
    assert found["fast"].spread == pytest.approx(LEAST_SPREAD * math.sqrt(2))


def test_what_disturbs_some_readings_changes_nothing():
    clock = Planted(disturbed=(1.0, 3.0, 1.7, 1.0, 2.2))
    found = trial({"usual": clock.call(1e-3), "fast": clock.call(0.9e-3)}, clock)
    assert found["fast"].log == pytest.approx(math.log(0.9))
    assert found["fast"].spread == pytest.approx(LEAST_SPREAD * math.sqrt(2))


def test_where_no_two_readings_are_alike_it_goes_on_and_says_how_little_it_knows():
    clock, seen = Planted(disturbed=[1.1**each for each in range(40)]), []
    found = trial({"usual": clock.call(2e-3, seen), "fast": clock.call(1.9e-3)}, clock)
    assert len(seen) == 2 + 2 * MOST  # before each reading, one refills the caches
    assert found["fast"].spread > 0.2
    calm, few = Planted(), []
    trial({"usual": calm.call(0.02, few), "fast": calm.call(0.018)}, calm)
    assert len(few) == 3 + FEWEST


def test_whoever_is_clearly_behind_drops_out():
    clock, seen = Planted(), []
    slow = 1.1 * BEHIND * 1e-3
    found = trial({"usual": clock.call(1e-3), "near": clock.call(1.01e-3), "slow": clock.call(slow, seen)}, clock)
    assert len(seen) == 2 + 2 * 2  # before each reading, one refills the caches
    assert found["slow"].log == pytest.approx(math.log(1.1 * BEHIND))


def test_slow_calls_are_not_tried_for_long_however_little_is_known():
    clock, seen = Planted(disturbed=[1.1**each for each in range(40)]), []
    trial({"usual": clock.call(0.2, seen), "other": clock.call(0.2)}, clock)
    assert len(seen) == 3 + FEWEST


def test_short_calls_are_repeated_and_all_of_it_ends():
    clock, seen = Planted(), []
    trial({"usual": clock.call(1e-6, seen), "other": clock.call(1e-6)}, clock)
    readings = (len(seen) - 2) * 1e-6 / READING_S
    assert readings == pytest.approx(MOST, rel=0.01)
    assert clock.time_s < 2 * ENOUGH_S


def test_one_that_raises_is_left_out_and_nothing_is_known_if_the_first_does():
    def broken():
        raise RuntimeError("not enough memory")

    clock = Planted()
    assert set(trial({"usual": clock.call(1e-3), "broken": broken, "fast": clock.call(1e-4)}, clock)) == {"fast"}
    assert trial({"usual": broken, "fast": clock.call(1e-4)}, clock) == {}
