"""Calls are timed against one another by a virtual clock: each call takes what is planted."""

import itertools
import math

import pytest

from attnbench.contract.trial import (
    BEHIND,
    ENOUGH_S,
    FAR_BEHIND,
    FEWEST,
    LEAST_SPREAD,
    LONGEST_S,
    MOST,
    READING_S,
    trial,
)
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


def nothing():
    """Nobody else takes the caches."""


def test_the_ratio_to_the_first_is_found():
    clock = Planted()
    calls = {"usual": clock.call(1e-3), "fast": clock.call(0.8e-3), "slow": clock.call(1.2e-3)}
    found = trial(calls, clock, nothing)
    assert set(found) == {"fast", "slow"}
    assert found["fast"].log == pytest.approx(math.log(0.8))
    assert found["slow"].log == pytest.approx(math.log(1.2))
    assert found["fast"].spread == pytest.approx(LEAST_SPREAD)


def test_what_disturbs_some_readings_changes_nothing():
    clock = Planted(disturbed=(1.0, 3.0, 1.0, 1.0, 2.2))
    found = trial({"usual": clock.call(1e-3), "fast": clock.call(0.9e-3)}, clock, nothing)
    assert found["fast"].log == pytest.approx(math.log(0.9))
    assert found["fast"].spread == pytest.approx(LEAST_SPREAD)


def test_a_lucky_reading_is_not_all_that_counts():
    """Of one whose times vary the least says little about the next call: the mean of the lower half counts."""
    clock, turn = Planted(), itertools.count()

    def varies():
        clock.time_s += 0.9e-3 if next(turn) // 2 == MOST // 2 else 1.05e-3  # one untimed call and one reading a turn

    found = trial({"usual": clock.call(1e-3), "varies": varies}, clock, nothing)
    lower = math.ceil(MOST / 2)
    assert found["varies"].log == pytest.approx((math.log(0.9) + (lower - 1) * math.log(1.05)) / lower)
    assert found["varies"].spread > LEAST_SPREAD
    assert found["varies"].log > 0 > math.log(0.9)


def test_who_owes_its_speed_to_calls_like_it_is_seen_through():
    """Before each reading of a short call something else takes the caches, and one untimed call refills them."""
    clock = Planted()
    since = itertools.count()

    def forgets():
        nonlocal since
        since = itertools.count()

    def spoiled():
        clock.time_s += 0.8e-3 if next(since) > 3 else 1.2e-3  # only its fifth call in a row is fast

    alone = trial({"usual": clock.call(1e-3), "spoiled": spoiled}, clock, nothing)
    assert alone["spoiled"].log == pytest.approx(math.log(0.8))
    assert trial({"usual": clock.call(1e-3), "spoiled": spoiled}, clock, forgets)["spoiled"].log > math.log(1.1)


def test_long_calls_are_read_as_they_are():
    clock, others = Planted(), []
    trial({"usual": clock.call(0.02), "other": clock.call(0.02)}, clock, lambda: others.append(1))
    assert len(others) == 2  # before the first reading of each, whose length is not known yet


def test_where_no_two_readings_are_alike_it_goes_on_and_says_how_little_it_knows():
    clock, seen = Planted(disturbed=[1.1**each for each in range(40)]), []
    found = trial({"usual": clock.call(5e-3, seen), "fast": clock.call(4.9e-3)}, clock, nothing)
    assert len(seen) == 2 + 2 * MOST  # before each reading, one refills the caches
    assert found["fast"].spread > 0.1
    calm, few = Planted(), []
    trial({"usual": calm.call(0.02, few), "fast": calm.call(0.018)}, calm, nothing)
    assert len(few) == 3 + FEWEST


def test_whoever_is_clearly_behind_drops_out():
    clock, seen = Planted(), []
    slow = 1.1 * BEHIND * 1e-3
    calls = {"usual": clock.call(1e-3), "near": clock.call(1.01e-3), "slow": clock.call(slow, seen)}
    found = trial(calls, clock, nothing)
    assert len(seen) == 2 + 2 * 2  # before each reading, one refills the caches
    assert found["slow"].log == pytest.approx(math.log(1.1 * BEHIND))


def test_slow_calls_are_not_tried_for_long_however_little_is_known():
    clock, seen = Planted(disturbed=[1.1**each for each in range(40)]), []
    trial({"usual": clock.call(0.15, seen), "other": clock.call(0.15)}, clock, nothing)
    assert len(seen) == 3 + FEWEST


def test_where_a_call_takes_long_nothing_is_tried():
    clock, seen = Planted(), []
    assert trial({"usual": clock.call(1.1 * LONGEST_S), "other": clock.call(10.0, seen)}, clock, nothing) is None
    assert seen == []


def test_whoever_is_far_behind_is_called_once():
    clock, seen = Planted(), []
    calls = {"usual": clock.call(0.1), "slow": clock.call(0.1 * FAR_BEHIND + 0.1, seen), "near": clock.call(0.11)}
    assert set(trial(calls, clock, nothing)) == {"near"}
    assert len(seen) == 1


def test_a_slow_first_call_is_forgiven():
    clock, calls_made = Planted(), itertools.count()

    def prepares():
        clock.time_s += 0.15 if next(calls_made) == 0 else 0.5e-3

    assert trial({"usual": clock.call(1e-3), "fast": prepares}, clock, nothing)["fast"].log < 0


def test_short_calls_are_repeated_and_all_of_it_ends():
    clock, seen = Planted(), []
    trial({"usual": clock.call(1e-6, seen), "other": clock.call(1e-6)}, clock, nothing)
    readings = (len(seen) - 2) * 1e-6 / READING_S
    assert readings == pytest.approx(MOST, rel=0.01)
    assert clock.time_s < 2 * ENOUGH_S


def test_one_that_raises_is_left_out_and_nothing_is_known_if_the_first_does():
    def broken():
        raise RuntimeError("not enough memory")

    clock = Planted()
    calls = {"usual": clock.call(1e-3), "broken": broken, "fast": clock.call(1e-4)}
    assert set(trial(calls, clock, nothing)) == {"fast"}
    assert trial({"usual": broken, "fast": clock.call(1e-4)}, clock, nothing) == {}
    assert trial({"usual": clock.call(1e-3), "broken": broken}, clock, nothing) == {}


def test_one_that_raises_later_is_left_out_too():
    clock, made = Planted(), itertools.count()

    def full():
        clock.time_s += 1e-3
        if next(made) > 5:
            raise RuntimeError("not enough memory")

    calls = {"usual": clock.call(1e-3), "full": full, "fast": clock.call(0.9e-3)}
    assert set(trial(calls, clock, nothing)) == {"fast"}
    assert trial({"usual": full, "fast": clock.call(0.9e-3)}, clock, nothing) == {}
