"""The number of blocks that a process takes: by costs and variances, within the time that is left."""

import math

import numpy as np
import pytest

from attnbench.statistics.verdict import LOOKS
from attnbench.storage.records import Arm, Sample
from attnbench.timing.visits import BETWEEN, INSIDE, LEAST_BETWEEN, Costs, Spread, best, in_blocks, share, spread_of

ONE, OTHER = Arm(implementation="one"), Arm(implementation="other")
COSTS = Costs(process_s=0.3, block_s=0.03)
SPREAD = Spread(inside=0.02**2, between=0.002**2)


def taken(inside, between, num_processes=30, num_blocks=40):
    """Samples of two arms whose log ratios vary so much inside a process and between processes."""
    draws, samples = np.random.default_rng(3), {ONE: [], OTHER: []}
    for process in range(num_processes):
        shift = draws.normal(0, between)
        for block in range(num_blocks):
            level = draws.normal(0, 0.3)  # shared by a block
            place = {"epoch": process, "visit": process, "block": block}
            samples[ONE].append(Sample(math.exp(level + shift + draws.normal(0, inside)), **place))
            samples[OTHER].append(Sample(math.exp(level), **place))
    return samples


@pytest.mark.parametrize(("inside", "between"), [(0.02, 0.01), (0.05, 0.02), (0.01, 0.03)])
def test_both_variances_are_found_in_the_samples(inside, between):
    found = spread_of(taken(inside, between), {ONE: OTHER, OTHER: OTHER})
    assert math.sqrt(found.inside) == pytest.approx(inside, rel=0.1)
    assert math.sqrt(found.between) == pytest.approx(between, rel=0.4)


def test_until_there_are_samples_usual_variances_stand_in():
    assert spread_of({}, {ONE: OTHER}) == Spread(inside=INSIDE**2, between=BETWEEN**2)
    assert spread_of(taken(0.02, 0.0), {ONE: OTHER}).between >= LEAST_BETWEEN**2


def test_the_best_number_of_blocks_has_the_smallest_error_in_a_given_time():
    def error(number):
        return (SPREAD.between + math.pi / 2 * SPREAD.inside / number) * (COSTS.process_s + number * COSTS.block_s)

    number = best(COSTS, SPREAD)
    assert error(number) < min(error(0.8 * number), error(1.25 * number))


def test_processes_up_to_a_look_share_the_time_that_is_left():
    given = share(COSTS, SPREAD, num_taken=0, left_s=10.0, limits=(8, 4))
    look = round(0.95 * 10.0 / (COSTS.process_s + given.longest_s))
    assert look in LOOKS
    assert given.num_blocks == int(given.longest_s / COSTS.block_s)
    assert given.longest_s / (COSTS.process_s + given.longest_s) >= 0.7


@pytest.mark.parametrize("left_s", [0.0, 0.5, 1.5])
def test_too_little_time_is_shared_by_the_processes_of_the_first_look(left_s):
    given = share(COSTS, SPREAD, num_taken=1, left_s=left_s, limits=(8, 4))
    assert given.num_blocks == 8
    assert given.longest_s == pytest.approx(max(0.95 * left_s / 3 - COSTS.process_s, 2 * COSTS.block_s))


def test_a_budget_of_an_hour_does_not_delay_the_first_verdict():
    given = share(COSTS, SPREAD, num_taken=0, left_s=3600.0, limits=(8, 4))
    assert given.num_blocks <= 8 * max(8, best(COSTS, SPREAD))


def test_the_seconds_of_blocks_include_the_pauses_between_their_samples():
    samples = {
        arm: [
            Sample(0.5, num_calls=2, visit=visit, block=block, start_s=100 * visit + 10 * block + late)
            for visit in range(2)
            for block in range(3)
        ]
        for arm, late in ((ONE, 0.0), (OTHER, 2.0))
    }
    assert in_blocks(samples | {Arm(): []}) == (2 * (20 + 2 + 1), 6)
