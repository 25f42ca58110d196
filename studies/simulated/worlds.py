"""Simulated machines, each with one kind of noise of known size, for tests of the method.

A world has a drift, which changes with time and affects everything that runs at that moment, and noise in each sample.
One world also has effects of the slot (position) in a block, and of earlier work. No effect depends on the
implementation that runs: its true time is given separately, and is the same in every world.

The noise has sizes seen on shared virtual machines: 1 to 2 % from sample to sample, tens of percent over a session.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Draws = np.random.Generator

STEP_S = 5e-3
"""Seconds during which the drift is constant: about the duration of one sample."""
USUAL_NOISE = 0.01
"""Standard deviation of the log of a sample in an undisturbed world."""
SHARE_OF_SPIKES = 0.05
SHARE_OF_SLOW = 0.3


def steady(_: Draws, num_steps: int, num_paths: int) -> Array:
    """Return no drift: zeros (num_steps, num_paths)."""
    return np.zeros((num_steps, num_paths))


def quiet(draws: Draws, shape: tuple[int, ...]) -> Array:
    """Draw normally distributed noise with a standard deviation of 1 %."""
    return draws.normal(0.0, USUAL_NOISE, shape)


def drifting(draws: Draws, num_steps: int, num_paths: int) -> Array:
    """Draw a drift of 30 % a minute for two minutes, up or down, with a wave of 10 % every seven seconds."""
    time_s = STEP_S * np.arange(num_steps)[:, None]
    slope = 0.3 / 60 * draws.choice([-1.0, 1.0], num_paths)
    wave = 0.1 * np.sin(2 * np.pi * (time_s / 7 + draws.random(num_paths)))
    drift: Array = wave + slope * np.minimum(time_s, 120.0)
    return drift


def walking(draws: Draws, num_steps: int, num_paths: int) -> Array:
    """Draw a random walk (log of the slowdown) whose standard deviation is 0.1 after a second, reflected at +-0.3."""
    walk = np.cumsum(draws.normal(0.0, 0.1 * np.sqrt(STEP_S), (num_steps, num_paths)), axis=0)
    folded: Array = np.abs((walk + 0.3) % 1.2 - 0.6)
    return folded - 0.3


def spiky(draws: Draws, shape: tuple[int, ...]) -> Array:
    """Draw noise of 1.5 %; in addition, 5 % of the samples take 20 to 300 % longer."""
    spikes = np.log1p(draws.uniform(0.2, 3.0, shape)) * (draws.random(shape) < SHARE_OF_SPIKES)
    return spikes + draws.normal(0.0, 1.5 * USUAL_NOISE, shape)


def bimodal(draws: Draws, shape: tuple[int, ...]) -> Array:
    """Draw noise of 1 %; in addition, 30 % of the samples are 8 % slower, as with an unlucky placement in memory."""
    return 0.08 * (draws.random(shape) < SHARE_OF_SLOW) + draws.normal(0.0, USUAL_NOISE, shape)


def throttling(draws: Draws, num_steps: int, num_paths: int) -> Array:
    """Draw a drift that repeats: five seconds at full clock, then three at 60 % of it, with short ramps between."""
    time_s = STEP_S * np.arange(num_steps)[:, None] + 8 * draws.random(num_paths)
    phase_s = time_s % 8
    slow: Array = np.log(1 / 0.6) * np.clip(np.minimum(phase_s - 5, 8 - phase_s) / 0.2, 0.0, 1.0)
    return slow


def busy(draws: Draws, num_steps: int, num_paths: int) -> Array:
    """Draw the drift due to another thread, which on average runs for half a second and then pauses for a second.

    While the thread runs, it takes about a third of the machine.
    """
    time_s = STEP_S * np.arange(num_steps)
    num_stays = 4 + int(2 * time_s[-1])
    stays_s = draws.exponential(np.array([1.0, 0.5] * num_stays)[:, None], (2 * num_stays, num_paths))
    stays_s[0] *= draws.random(num_paths) < 2 / 3  # else the thread runs from the beginning
    switches_s = np.cumsum(stays_s, axis=0)
    counts = np.stack([np.searchsorted(path, time_s, side="right") for path in switches_s.T], axis=1)
    return np.where(counts % 2 == 1, 0.4 + draws.normal(0.0, 0.05, counts.shape), 0.0)


@dataclass(frozen=True, kw_only=True)
class World:
    """One kind of machine. All effects are logs of the slowdown."""

    name: str
    drift: Callable[[Draws, int, int], Array] = steady  # (steps, paths), a step lasts STEP_S
    noise: Callable[[Draws, tuple[int, ...]], Array] = quiet  # any shape, a number for each sample
    slot: float = 0.0  # slowdown of each slot of a block against the slot before it
    is_shared: bool = False  # whether the drift is caused by another program, which runs from time to time
    carry: float = 0.0  # slowdown of a sample's first millisecond after 10 ms of other work, smaller after less work


WORLDS: dict[str, World] = {
    world.name: world
    for world in (
        World(name="calm"),
        World(name="drift", drift=drifting),
        World(name="random_walk", drift=walking),
        World(name="spikes", noise=spiky),
        World(name="bimodal", noise=bimodal),
        World(name="slots", slot=0.015, carry=0.2),
        World(name="throttling", drift=throttling),
        World(name="busy", drift=busy, is_shared=True),
    )
}
