"""Time several calls against one another within some milliseconds: what a policy leaves open is tried.

Each is called once untimed. Then all take turns, back and forth, a reading each, so that a slow moment meets all of
them, and the least reading of each counts: whatever interrupts a call adds to it. Before a short call an untimed one
refills the caches, as in any other measurement here. Whoever is clearly behind drops out.
"""

import math
from bisect import insort
from collections.abc import Callable, Mapping
from typing import NamedTuple

from attnbench.devices import Clock
from attnbench.storage.events import TOUCH_BELOW_S

READING_S = 3e-4
"""What a reading lasts at least: calls that are shorter are repeated in it."""
FEWEST, MOST = 4, 15
"""Readings of each that stays."""
ENOUGH_S, MOST_S = 0.06, 1.0
"""When all readings took so long, none follow but the fewest, and those until the least ones are confirmed; and none at
all after so much."""
CONFIRMED = 0.03
"""The least reading of a call is confirmed when the next one is larger by at most so much: two disturbed ones hardly
are as much alike."""
LEAST_SPREAD = 0.01
"""What a log ratio is uncertain by at least: the next process may have other addresses."""
BEHIND = 1.3
"""From the second reading on, whoever takes so many times as long as the fastest drops out."""


class Tried(NamedTuple):
    """The logarithm of a call's time over that of the first one, and the standard deviation of that."""

    log: float
    spread: float


def trial(calls: Mapping[str, Callable[[], object]], clock: Clock) -> dict[str, Tried]:
    """How long each of the other calls takes, against the first; one that raises is left out, all if the first does."""
    usual = next(iter(calls))
    counts: dict[str, int] = {}
    for name, call in calls.items():
        try:
            call()
            counts[name] = max(1, math.ceil(READING_S / max(clock.elapsed(call, 1), clock.resolution_s, 1e-9)))
        except Exception:  # noqa: BLE001 - anybody's code; memory may be short, too
            if name == usual:
                return {}
    times: dict[str, list[float]] = {name: [] for name in counts}
    left, spent_s = list(counts), 0.0
    for turn in range(MOST):
        for name in left if turn % 2 == 0 else left[::-1]:
            if not times[name] or times[name][0] < TOUCH_BELOW_S:
                calls[name]()
            elapsed_s = clock.elapsed(calls[name], counts[name])
            insort(times[name], elapsed_s / counts[name])
            spent_s += elapsed_s
        if turn > 0:
            least = min(times[name][0] for name in left)
            left = [name for name in left if times[name][0] <= BEHIND * least]
            is_confirmed = all(_doubt(times[name]) <= CONFIRMED for name in left)
            is_enough = turn + 1 >= FEWEST and (spent_s >= MOST_S or (spent_s >= ENOUGH_S and is_confirmed))
            if len(left) == 1 or is_enough:
                break
    first = times.pop(usual)
    return {
        name: Tried(
            log=math.log(own[0] / first[0]),
            spread=math.hypot(max(LEAST_SPREAD, _doubt(own)), max(LEAST_SPREAD, _doubt(first))),
        )
        for name, own in times.items()
    }


def _doubt(times: list[float]) -> float:
    """By how much the two least readings differ, as a logarithm."""
    return math.log(times[1] / times[0])
