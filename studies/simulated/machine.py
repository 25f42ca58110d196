"""One machine of a world: it bends what work takes, slot by slot, and remembers what ran before."""

import math

import numpy as np

from attnbench.devices.clock import VirtualClock
from studies.simulated.worlds import STEP_S, World

NUM_STEPS = 2**14
"""Of the mood: 80 s, after which it runs back, and then forth again."""
NUM_LUCKS = 2**12
SHARE_AFTER_TOUCH = 0.02
"""Of what other work left behind in the caches, so much is still there after one stretch of one's own work."""
LARGEST_CARRY_S = 1e-3
"""A call longer than this is slowed by what ran before no longer than this."""
TAKEN = 0.2
"""A mood above this is somebody else's, in a world that is shared."""


class Machine:
    """Bends time as a world does; call it with seconds and now. One machine is one draw of its world."""

    def __init__(self, world: World, seed: int) -> None:
        """Draw the mood of the whole session."""
        self.world = world
        self._draws = np.random.default_rng(seed)
        self._mood = world.mood(self._draws, NUM_STEPS, 1)[:, 0].tolist()
        self._lucks: list[float] = []
        self._num_slots = 5
        self._slot = -1
        self._since = 0  # stretches of work since another had its turn
        self._last_s, self._before_s = 0.0, 0.0  # the last stretch of work, and that of other work before
        self.num_faults = 0  # so far

    def begin_visit(self, num_slots: int) -> None:
        """The next turn is the first of a block with so many."""
        self._slot, self._num_slots = -1, num_slots

    def turn(self) -> None:
        """Other work begins: the next slot of the block."""
        self._slot = (self._slot + 1) % self._num_slots
        self._since = 0

    def forget(self) -> None:
        """The caches were emptied: what comes next finds nothing of its own in them."""
        self._since = 0

    def load(self, now: float) -> float:
        """How many want to run: whoever is timed, and another where the world has one at this moment."""
        return 1.0 + (self.world.is_shared and self._mood_at(now) > TAKEN)

    def _mood_at(self, now: float) -> float:
        step = int(now / STEP_S) % (2 * NUM_STEPS)
        mood: float = self._mood[min(step, 2 * NUM_STEPS - 1 - step)]
        return mood

    def __call__(self, seconds: float, now: float) -> float:
        """The seconds that a stretch of work really takes."""
        if not self._lucks:
            self._lucks = self.world.luck(self._draws, (NUM_LUCKS,)).tolist()
        bend = self._mood_at(now) + self._lucks.pop() + self.world.slot * max(0, self._slot)
        self._last_s = (seconds + self._carry_s(seconds)) * math.exp(bend)
        self._since += 1
        return self._last_s

    def _carry_s(self, seconds: float) -> float:
        """What refilling the caches costs: most of it the first stretch after other work, which may be a touch."""
        if self._since == 0:
            self._before_s = self._last_s
        share = (1.0, SHARE_AFTER_TOUCH, 0.0)[min(self._since, 2)]
        size = min(1.0, self._before_s / (10 * LARGEST_CARRY_S))
        return share * size * self.world.carry * min(seconds, LARGEST_CARRY_S)


def clock_in(world: World, seed: int) -> VirtualClock:
    """A clock of a machine in that world."""
    machine = Machine(world, seed)
    return VirtualClock(machine, machine.turn)
