"""Time several calls against one another within some tenths of a second: what a policy leaves open is tried.

Each is called once untimed. Then all take turns, back and forth, a reading each, so that a slow moment meets all of
them. The lower half of each one's readings counts: whatever interrupts a call adds to it. Whoever is clearly behind
drops out.

In a model something else runs between two calls, and who owes its speed to calls like it right before is slower there.
Before a reading of a short call something else therefore takes the caches; then an untimed call refills them, as in any
other measurement here.
"""

import math
from bisect import insort
from collections.abc import Callable, Mapping
from statistics import fmean, pstdev
from typing import NamedTuple

from attnbench.devices import Clock
from attnbench.storage.events import TOUCH_BELOW_S

READING_S = 5e-4
"""What a reading lasts at least: calls that are shorter are repeated in it."""
FEWEST, MOST = 5, 11
"""Readings of each that stays."""
ENOUGH_S, MOST_S = 0.1, 1.0
"""When all readings took so long, none follow but the fewest, and those until the least ones are confirmed; after so
much, none but the fewest."""
CONFIRMED = 0.03
"""The least reading of a call is confirmed when the next one is larger by at most so much, relatively: two disturbed
ones hardly are as much alike."""
LEAST_SPREAD = 0.02
"""What a log ratio is uncertain by at least: the next process may have other addresses."""
BEHIND = 1.3
"""From the second reading on, whoever takes so many times as long as the fastest drops out..."""
FAR_BEHIND, LONGEST_S = 4.0, 0.2
"""... and so many times as long as the first one, after a single call, unless that is shorter than so many seconds.
Where the first one takes longer than these, nothing is tried: others may take ten times as long."""


class Tried(NamedTuple):
    """The logarithm of a call's time over that of the first one, and the standard deviation of that."""

    log: float
    spread: float


def trial(
    calls: Mapping[str, Callable[[], object]], clock: Clock, between: Callable[[], object]
) -> dict[str, Tried] | None:
    """How long each of the other calls takes, against the first; who raises or is far behind is left out.

    None: nothing is tried, since the first one takes long. Where it raises, all are left out. `between` is what takes
    the caches.
    """
    usual = next(iter(calls))
    counts: dict[str, int] = {}
    longest_s = math.inf
    for name, call in calls.items():
        once_s = math.inf
        try:
            if clock.elapsed(call, 1) <= longest_s:
                once_s = max(clock.elapsed(call, 1), clock.resolution_s, 1e-9)
                counts[name] = math.ceil(READING_S / once_s)
        except Exception:  # noqa: BLE001, S110 - anybody's code; memory may be short, too
            pass
        if name == usual:
            if once_s > LONGEST_S:
                return None if math.isfinite(once_s) else {}
            longest_s = max(LONGEST_S, FAR_BEHIND * once_s)
    times: dict[str, list[float]] = {name: [] for name in counts}
    left, spent_s = list(counts), 0.0
    for turn in range(MOST):
        for name in left if turn % 2 == 0 else left[::-1]:
            try:
                if not times[name] or times[name][0] < TOUCH_BELOW_S:
                    between()
                    calls[name]()
                elapsed_s = clock.elapsed(calls[name], counts[name])
            except Exception:  # noqa: BLE001 - likewise
                if name == usual:
                    return {}
                del times[name]
                continue
            insort(times[name], elapsed_s / counts[name])
            spent_s += elapsed_s
        left = [name for name in left if name in times]
        if turn > 0:
            least = min(times[name][0] for name in left)
            left = [name for name in left if times[name][0] <= BEHIND * least]
            is_confirmed = all(times[name][1] <= (1 + CONFIRMED) * times[name][0] for name in left)
            is_enough = turn + 1 >= FEWEST and (spent_s >= MOST_S or (spent_s >= ENOUGH_S and is_confirmed))
            if len(left) == 1 or is_enough:
                break
    first_log, first_doubt = _lower(times.pop(usual))
    found = {name: _lower(own) for name, own in times.items()}
    return {
        name: Tried(log=log - first_log, spread=math.hypot(LEAST_SPREAD, doubt, first_doubt))
        for name, (log, doubt) in found.items()
    }


def _lower(times: list[float]) -> tuple[float, float]:
    """The mean logarithm of the lower half, and its standard error."""
    logs = [math.log(each) for each in times[: math.ceil(len(times) / 2)]]
    return fmean(logs), pstdev(logs) / math.sqrt(max(1, len(logs) - 1))
