"""A simulated clock, and a simulated machine that changes durations by noise and by the effects of earlier work."""

import math
from collections.abc import Callable
from itertools import repeat

import numpy as np

from attnbench.devices import Clock
from studies.simulated.worlds import STEP_S, World

NUM_STEPS = 2**14
"""Number of steps of the drift, about 80 s in all; then the drift runs backwards, then forwards again, and so on."""
NUM_NOISES = 2**12
SHARE_AFTER_TOUCH = 0.02
"""Share of the slowdown by earlier work that remains in the second sample after a switch to other work."""
LARGEST_CARRY_S = 1e-3
"""Seconds at the beginning of a sample that earlier work can slow down; it does not affect the rest."""
TAKEN = 0.2
"""In a shared world, another program is running while the drift (a log) is above this."""


class VirtualClock(Clock):
    """A simulated clock: time passes only when simulated work spends it, and `disturb` may change the amount.

    `disturb(seconds, now)` returns the seconds that pass, with drift, spikes and throttling of known size. In a sample
    it is called once, with the sum of all calls. `turn()` is called before a sample if its call differs from that of
    the previous sample.
    """

    resolution_s = 1e-9

    def __init__(
        self,
        disturb: Callable[[float, float], float] = lambda seconds, _: seconds,
        turn: Callable[[], object] = lambda: None,
    ) -> None:
        self._now = 0.0
        self._disturb = disturb
        self._turn = turn
        self._last: Callable[[], object] | None = None
        self._stretch_s: float | None = None  # undisturbed seconds of the sample so far; None between samples

    def now(self) -> float:
        """Return the simulated seconds since the start."""
        return self._now

    def spend(self, seconds: float) -> None:
        """Spend simulated time: a simulated implementation calls this instead of computing something."""
        if self._stretch_s is None:
            self._now += self._disturb(seconds, self._now)
        else:
            self._stretch_s += seconds

    def elapsed(self, call: Callable[[], object], num_calls: int) -> float:
        """Time a sample of `num_calls` calls: return the simulated seconds that pass."""
        if call is not self._last:
            self._last = call
            self._turn()
        self._stretch_s = 0.0
        try:
            for _ in repeat(None, num_calls):
                call()
            spent_s = self._disturb(self._stretch_s, self._now)
        finally:
            self._stretch_s = None
        self._now += spent_s
        return spent_s


class Machine:
    """A machine with the drift and noise of a world; an instance serves as `disturb` of a VirtualClock."""

    def __init__(self, world: World, seed: int) -> None:
        """Draw the drift of the whole session."""
        self.world = world
        self._draws = np.random.default_rng(seed)
        self._drift = world.drift(self._draws, NUM_STEPS, 1)[:, 0].tolist()
        self._noises: list[float] = []
        self._num_slots = 5
        self._slot = -1
        self._since = 0  # samples since the last turn
        self._last_s, self._before_s = 0.0, 0.0  # seconds of the last sample, and of the last one of other work
        self.num_faults = 0  # page faults so far

    def begin_visit(self, num_slots: int) -> None:
        """Start a block at the next turn; `num_slots` is the number of calls that take turns in it."""
        self._slot, self._num_slots = -1, num_slots

    def turn(self) -> None:
        """Switch to other work, which has the next slot (position) in the block."""
        self._slot = (self._slot + 1) % self._num_slots
        self._since = 0

    def forget(self) -> None:
        """Empty the caches, so that the next sample must load all of its data again."""
        self._since = 0

    def load(self, now: float) -> float:
        """Return the number of programs that want to run: 2 while another program of the world runs, else 1."""
        return 1.0 + (self.world.is_shared and self._drift_at(now) > TAKEN)

    def _drift_at(self, now: float) -> float:
        step = int(now / STEP_S) % (2 * NUM_STEPS)
        drift: float = self._drift[min(step, 2 * NUM_STEPS - 1 - step)]
        return drift

    def __call__(self, seconds: float, now: float) -> float:
        """Return the seconds that a sample really takes; `seconds` is its undisturbed duration."""
        if not self._noises:
            self._noises = self.world.noise(self._draws, (NUM_NOISES,)).tolist()
        log = self._drift_at(now) + self._noises.pop() + self.world.slot * max(0, self._slot)
        self._last_s = (seconds + self._carry_s(seconds)) * math.exp(log)
        self._since += 1
        return self._last_s

    def _carry_s(self, seconds: float) -> float:
        """Return the extra seconds of a sample for refilling the caches; most are in the first one after a turn."""
        if self._since == 0:
            self._before_s = self._last_s
        share = (1.0, SHARE_AFTER_TOUCH, 0.0)[min(self._since, 2)]
        size = min(1.0, self._before_s / (10 * LARGEST_CARRY_S))
        return share * size * self.world.carry * min(seconds, LARGEST_CARRY_S)
