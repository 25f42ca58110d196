"""Clocks: how long some calls take, behind one interface, so that a simulated machine can drive the whole engine.

The clock of a CUDA device is in devices/cuda.py; nothing here knows torch.
"""

import time
from collections.abc import Callable
from itertools import repeat
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    resolution_s: float

    def now(self) -> float:
        """Seconds since some fixed moment."""

    def elapsed(self, call: Callable[[], object], num_calls: int) -> float:
        """Seconds that `num_calls` calls take, back to back."""


def tick() -> float:
    """The smallest step that the processor's timer was seen to make, in seconds."""
    steps = []
    for _ in range(100):
        start = time.perf_counter_ns()
        while (end := time.perf_counter_ns()) == start:
            pass
        steps.append(end - start)
    return min(steps) * 1e-9


class CpuClock:
    """The processor's monotonic timer."""

    def __init__(self) -> None:
        """Find out the timer's step."""
        self.resolution_s = tick()

    def now(self) -> float:
        """Seconds of the monotonic timer."""
        return time.perf_counter()

    def elapsed(self, call: Callable[[], object], num_calls: int) -> float:
        """Wall time of the calls."""
        start = time.perf_counter_ns()
        for _ in repeat(None, num_calls):
            call()
        return (time.perf_counter_ns() - start) * 1e-9


class VirtualClock:
    """A simulated machine: time passes only when work spends it, and `disturb` may bend what is spent.

    `disturb(seconds, now)` returns the seconds that really pass: drift, spikes and throttling with a known truth. The
    calls of one stretch are bent together, as one sample. `turn` hears when another call than the last has its turn.
    """

    resolution_s = 1e-9

    def __init__(
        self,
        disturb: Callable[[float, float], float] = lambda seconds, _: seconds,
        turn: Callable[[], object] = lambda: None,
    ) -> None:
        """Start at 0."""
        self._now = 0.0
        self._disturb = disturb
        self._turn = turn
        self._last: Callable[[], object] | None = None
        self._stretch_s: float | None = None  # spent so far by the stretch that is being timed, undisturbed

    def now(self) -> float:
        """Simulated seconds since the start."""
        return self._now

    def spend(self, seconds: float) -> None:
        """Let time pass: what a simulated implementation does instead of work."""
        if self._stretch_s is None:
            self._now += self._disturb(seconds, self._now)
        else:
            self._stretch_s += seconds

    def elapsed(self, call: Callable[[], object], num_calls: int) -> float:
        """Simulated time that the calls spend."""
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
