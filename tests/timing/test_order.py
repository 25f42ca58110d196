"""Identical code through the real loop of blocks, with a slower first slot: the random order makes it fair."""

import math
import random
from types import SimpleNamespace

import pytest

from attnbench.statistics.intervals import visit_numbers
from attnbench.statistics.verdict import effect
from attnbench.storage.records import FALSE_SHARE, Arm
from attnbench.timing import blocks
from attnbench.timing.schedule import visit_seed
from studies.simulated.machine import VirtualClock

pytestmark = pytest.mark.usefixtures("many_visits")

BASELINE = Arm(implementation="baseline")
CONTROL, RIVAL = BASELINE.as_control(), Arm(implementation="rival")
ARMS = (RIVAL, BASELINE, CONTROL)
NUM_SEEDS, NUM_VISITS, NUM_BLOCKS = 100, 8, 4
CALL_S = 1.0
"""Long calls, so that a turn is one stretch of time without an untimed call before it."""
FIRST_SLOT, NOISE = 1.05, 0.01


def session(seed: int) -> float:
    """Return the rival's p-value against the baseline and its control, visit by visit; all are the same code."""
    draws, turns = random.Random(f"noise/{seed}"), []

    def disturb(seconds: float, _: float) -> float:
        is_first = (len(turns) - 1) % len(ARMS) == 0
        return seconds * (FIRST_SLOT if is_first else 1.0) * math.exp(draws.gauss(0.0, NOISE))

    clock = VirtualClock(disturb)
    reported = blocks.Conditions(on_turn=turns.append)
    calls = [blocks.TimedCall(arm=arm, call=lambda: clock.spend(CALL_S), called_s=CALL_S) for arm in ARMS]
    known = tuple((arm, CALL_S) for arm in ARMS)
    samples = {arm: [] for arm in ARMS}
    for number in range(NUM_VISITS):
        drawn = visit_seed(seed, "identical", number)
        at = blocks.Visit(epoch=0, number=number, num_blocks=NUM_BLOCKS, seed=drawn, known=known)
        for arm, taken in blocks.visit(calls, clock, at, reported).items():
            samples[arm].extend(taken)
    assert len(turns) == NUM_VISITS * NUM_BLOCKS * len(ARMS)
    logs = visit_numbers([samples[RIVAL]], [samples[BASELINE], samples[CONTROL]])
    return effect([*logs.values()]).p_value


def num_alarms() -> int:
    """Count the sessions in which identical code seems to differ."""
    return sum(session(seed) <= FALSE_SHARE for seed in range(NUM_SEEDS))


def test_an_effect_of_the_slot_raises_few_alarms_where_the_order_is_drawn():
    assert num_alarms() <= 2 * FALSE_SHARE * NUM_SEEDS


class InOrder:
    """A generator that keeps every order unchanged."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def sample(self, items, number):
        return list(items)[:number]


def test_the_same_effect_alarms_always_where_the_order_is_not_drawn(monkeypatch):
    monkeypatch.setattr(blocks, "random", SimpleNamespace(Random=InOrder))
    assert num_alarms() >= 0.9 * NUM_SEEDS
