"""The clock of a device that works through queues: calls are launched behind a block, and their device time is read.

The block is a kernel that spins. Whether it outlasted the launches is seen afterwards: the event right behind it must
not have happened when the last call was queued. Else the calls are timed again behind a longer spin. A spin always
ends, so nothing can hang. nvbench blocks by a kernel that waits for a flag in the host's memory, which torch has not.

Source: https://github.com/NVIDIA/nvbench (a blocking kernel, cold measurements, a flush outside of the timed span).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from attnbench.devices import Clock, Reading
from attnbench.storage.records import Flag

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

HOST_BOUND = 5
"""A call whose device time is less than so many times what the host needs to issue it is called host-bound."""
HEADROOM, LEAST_SPIN_S, LONGEST_SPIN_S, GROWTH = 1.5, 100e-6, 0.1, 4
"""The spin is so many times as long as the launches took before, and so much longer; the next try is so many times
longer, up to a limit."""
FIRST_ISSUE_S = 50e-6
"""What the host is taken to need for a call that it has not issued yet."""
MOST_QUEUED = 256
"""Calls behind one block: a launch queue holds about 1024, and a call is several kernels. Where it is full, fewer."""
CONFIRMED = 2
"""So many times in a row a longer spin must keep the host longer, before a call is said to wait for the device."""
LEFT_S = 20e-6
"""The device is busy elsewhere where it takes so much longer to be idle than its current stream."""
NUM_READINGS = 9
CALIBRATING_CYCLES = 2_000_000


class Event(Protocol):
    """A mark in the current stream, as torch.cuda.Event has it."""

    def record(self) -> object:
        """Put it behind all that is queued."""

    def query(self) -> bool:
        """Whether it has happened."""

    def synchronize(self) -> object:
        """Wait until it has."""

    def elapsed_time(self, end: Any, /) -> float:  # noqa: ANN401 - the same kind of event
        """Milliseconds from this one to `end`."""


class Runtime(Protocol):
    """All that the clock asks of a device; torch.cuda, or a simulated timeline."""

    def current(self) -> AbstractContextManager[object]:
        """Within: the device is the current one."""

    def event(self) -> Event:
        """A new one, with timing."""

    def spin(self, cycles: int) -> object:
        """Queue a kernel that lasts for so many cycles of the device."""

    def synchronize(self) -> object:
        """Wait for all streams."""

    def host_s(self) -> float:
        """The host's monotonic timer."""


@dataclass(kw_only=True)
class Known:
    """What is known of a call from before."""

    issue_s: float = FIRST_ISSUE_S  # what the host needs for one
    most: int = MOST_QUEUED  # calls that fit behind one block
    waits: bool = False  # the host waits for the device inside one


@dataclass(frozen=True, kw_only=True)
class Span:
    """Some calls behind one block."""

    device_s: float
    issue_s: float
    is_hidden: bool  # the block outlasted the launches
    left_s: float  # until the whole device was idle, after the current stream was


class QueuedClock(Clock):
    """Device time, from the first kernel's start to the last one's end, less what two events cost themselves."""

    resolution_s = 0.5e-6  # of a CUDA event, as its documentation states

    def __init__(self, runtime: Runtime) -> None:
        """Ask nothing of the device yet."""
        self.runtime = runtime
        self._known: WeakKeyDictionary[Callable[[], object], Known] = WeakKeyDictionary()

    def now(self) -> float:
        """By the host's timer."""
        return self.runtime.host_s()

    @cached_property
    def cycles_per_s(self) -> float:
        """How fast the device counts while it spins."""
        taken = []
        for _ in range(NUM_READINGS):
            start, end = self.runtime.event(), self.runtime.event()
            start.record()
            self.runtime.spin(CALIBRATING_CYCLES)
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) * 1e-3)
        return CALIBRATING_CYCLES / median(taken)

    @cached_property
    def floor_s(self) -> float:
        """Seconds between two events with nothing between them, measured once."""
        taken = []
        for _ in range(NUM_READINGS):
            start, end = self.runtime.event(), self.runtime.event()
            self.runtime.spin(int(LEAST_SPIN_S * self.cycles_per_s))
            start.record()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) * 1e-3)
        return median(taken)

    def elapsed(self, call: Callable[[], object], num_calls: int) -> float:
        """Device seconds of the calls."""
        return self.read(call, num_calls).elapsed_s

    def read(self, call: Callable[[], object], num_calls: int, flush: Callable[[], object] | None = None) -> Reading:
        """Device and host time of the calls. Each has an empty cache and a span of its own where a flush is given."""
        known = self._known_of(call)
        device_s = issue_s = 0.0
        flags, left = Flag(0), num_calls
        with self.runtime.current():
            while left:
                number = 1 if flush else min(left, known.most)
                span = self._hidden(call, number, flush, known)
                if span is None:  # fewer fit behind a block
                    continue
                left -= number
                device_s, issue_s = device_s + span.device_s, issue_s + span.issue_s
                flags |= Flag(0) if span.is_hidden else Flag.not_hidden
                flags |= Flag.other_stream if self._is_busy_elsewhere(span) else Flag(0)
        flags |= Flag.waits if known.waits else Flag(0)
        flags |= Flag.host_bound if device_s < HOST_BOUND * issue_s or Flag.not_hidden in flags else Flag(0)
        return Reading(elapsed_s=device_s, host_s=issue_s, flags=flags)

    def inspect(self, call: Callable[[], object]) -> Flag:
        """Whether a call leaves work on another stream.

        It is made without a block, behind which such work would be over before the current stream's began.
        """
        with self.runtime.current():
            for _ in range(CONFIRMED + 1):
                if not self._is_busy_elsewhere(self._span(call, 1, None, 0.0)):
                    return Flag(0)
        return Flag.other_stream

    @cached_property
    def _idle_s(self) -> float:
        """What it takes to hear that an idle device is idle."""
        self.runtime.synchronize()
        taken = []
        for _ in range(NUM_READINGS):
            start_s = self.runtime.host_s()
            self.runtime.synchronize()
            taken.append(self.runtime.host_s() - start_s)
        return median(taken)

    def _is_busy_elsewhere(self, span: Span) -> bool:
        return span.left_s > 2 * self._idle_s + LEFT_S

    def _known_of(self, call: Callable[[], object]) -> Known:
        try:
            return self._known.setdefault(call, Known())
        except TypeError:  # it has no weak references, or no hash
            return Known()

    def _hidden(
        self, call: Callable[[], object], number: int, flush: Callable[[], object] | None, known: Known
    ) -> Span | None:
        """The calls behind a block that outlasts their launches, if any does; None where fewer should be tried."""
        spin_s = LEAST_SPIN_S + HEADROOM * number * known.issue_s
        if known.waits:
            return self._span(call, number, flush, LEAST_SPIN_S)
        span, num_waits = self._span(call, number, flush, spin_s), 0
        is_first = True  # whose host time may be that of a compiler
        while not span.is_hidden and spin_s < LONGEST_SPIN_S:
            needed_s = 0.0 if is_first else LEAST_SPIN_S + HEADROOM * span.issue_s
            is_first = False
            longer_s = min(LONGEST_SPIN_S, max(GROWTH * spin_s, needed_s))
            again = self._span(call, number, flush, longer_s)
            is_kept = not again.is_hidden and again.issue_s - span.issue_s > (longer_s - spin_s) / 2
            num_waits = num_waits + 1 if is_kept else 0
            span, spin_s = again, longer_s
            if num_waits == CONFIRMED:  # the host waits for the block: the queue is full, or the call synchronises
                known.waits = number == 1
                break
        if span.is_hidden:
            known.issue_s = span.issue_s / number
        elif number > 1:
            known.most = number // 2
            return None
        return span

    def _span(self, call: Callable[[], object], number: int, flush: Callable[[], object] | None, spin_s: float) -> Span:
        """The calls between two events, behind a spin where one is asked for."""
        runtime, cycles_per_s, floor_s = self.runtime, self.cycles_per_s, self.floor_s
        start, end = runtime.event(), runtime.event()
        runtime.synchronize()
        if flush is not None:
            flush()
        if spin_s:
            runtime.spin(int(spin_s * cycles_per_s))
        start.record()
        began_s = runtime.host_s()
        for _ in repeat(None, number):
            call()
        issue_s = runtime.host_s() - began_s
        end.record()
        is_hidden = not start.query()
        end.synchronize()
        left_s = runtime.host_s()
        runtime.synchronize()
        left_s = runtime.host_s() - left_s
        device_s = max(start.elapsed_time(end) * 1e-3 - floor_s, self.resolution_s)
        return Span(device_s=device_s, issue_s=issue_s, is_hidden=is_hidden, left_s=left_s)
