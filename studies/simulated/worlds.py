"""Simulated machines, each with one kind of noise of known size: what the tests of the method are made with.

A world has a mood, which changes with time and is shared by whatever runs at that moment; luck, which each sample has
of its own; and, in one of them, an effect of the slot in a block and of what ran before. None of them knows which arm
it meets: what an arm truly costs is said elsewhere, and stays the truth in every world.

Sizes are those seen on shared virtual machines: 1 to 2 % from sample to sample, tens of percent over a session.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Draws = np.random.Generator

STEP_S = 5e-3
"""The mood holds for so long; about what a turn in a block takes."""
USUAL_NOISE = 0.01
"""A standard deviation of the log of a sample, in a world where nothing happens."""
SHARE_OF_SPIKES = 0.05
SHARE_OF_UNLUCKY = 0.3


def even(_: Draws, num_steps: int, num_paths: int) -> Array:
    """No mood at all."""
    return np.zeros((num_steps, num_paths))


def quiet(draws: Draws, shape: tuple[int, ...]) -> Array:
    """Normal noise of 1 %."""
    return draws.normal(0.0, USUAL_NOISE, shape)


def drifting(draws: Draws, num_steps: int, num_paths: int) -> Array:
    """30 % slower or faster each minute for two, and a slow wave of 10 %."""
    time_s = STEP_S * np.arange(num_steps)[:, None]
    slope = 0.3 / 60 * draws.choice([-1.0, 1.0], num_paths)
    wave = 0.1 * np.sin(2 * np.pi * (time_s / 7 + draws.random(num_paths)))
    both: Array = wave + slope * np.minimum(time_s, 120.0)
    return both


def walking(draws: Draws, num_steps: int, num_paths: int) -> Array:
    """A random walk of 10 % a second, turned back at a third slower or faster."""
    walk = np.cumsum(draws.normal(0.0, 0.1 * np.sqrt(STEP_S), (num_steps, num_paths)), axis=0)
    folded: Array = np.abs((walk + 0.3) % 1.2 - 0.6)
    return folded - 0.3


def spiky(draws: Draws, shape: tuple[int, ...]) -> Array:
    """One sample of twenty takes 20 to 300 % longer; the others have noise of 1.5 %."""
    spikes = np.log1p(draws.uniform(0.2, 3.0, shape)) * (draws.random(shape) < SHARE_OF_SPIKES)
    return spikes + draws.normal(0.0, 1.5 * USUAL_NOISE, shape)


def twofold(draws: Draws, shape: tuple[int, ...]) -> Array:
    """Three samples of ten are 8 % slower: an unlucky placement in memory."""
    return 0.08 * (draws.random(shape) < SHARE_OF_UNLUCKY) + draws.normal(0.0, USUAL_NOISE, shape)


def heating(draws: Draws, num_steps: int, num_paths: int) -> Array:
    """Five seconds at full clock, three at 60 % of it, with a short way between them."""
    time_s = STEP_S * np.arange(num_steps)[:, None] + 8 * draws.random(num_paths)
    phase_s = time_s % 8
    slow: Array = np.log(1 / 0.6) * np.clip(np.minimum(phase_s - 5, 8 - phase_s) / 0.2, 0.0, 1.0)
    return slow


def beside_a_thread(draws: Draws, num_steps: int, num_paths: int) -> Array:
    """Somebody else's thread comes about once in a second, stays half as long, and takes a third of the machine."""
    time_s = STEP_S * np.arange(num_steps)
    num_stays = 4 + int(2 * time_s[-1])
    stays_s = draws.exponential(np.array([1.0, 0.5] * num_stays)[:, None], (2 * num_stays, num_paths))
    stays_s[0] *= draws.random(num_paths) < 2 / 3  # else the thread is there from the beginning
    switches_s = np.cumsum(stays_s, axis=0)
    counts = np.stack([np.searchsorted(path, time_s, side="right") for path in switches_s.T], axis=1)
    return np.where(counts % 2 == 1, 0.4 + draws.normal(0.0, 0.05, counts.shape), 0.0)


@dataclass(frozen=True, kw_only=True)
class World:
    """One kind of machine. All effects are logs of how much longer work takes."""

    name: str
    mood: Callable[[Draws, int, int], Array] = even  # (steps, paths), a step lasts STEP_S
    luck: Callable[[Draws, tuple[int, ...]], Array] = quiet  # any shape, one for each sample
    slot: float = 0.0  # each slot of a block is so much slower than the one before
    is_shared: bool = False  # its mood is somebody else, who comes and goes
    carry: float = 0.0  # after 10 ms of other work, the first millisecond takes so much longer; after less, less


WORLDS: dict[str, World] = {
    world.name: world
    for world in (
        World(name="calm"),
        World(name="drift", mood=drifting),
        World(name="random_walk", mood=walking),
        World(name="spikes", luck=spiky),
        World(name="bimodal", luck=twofold),
        World(name="slots", slot=0.015, carry=0.2),
        World(name="throttling", mood=heating),
        World(name="busy", mood=beside_a_thread, is_shared=True),
    )
}
