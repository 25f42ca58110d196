"""The clock of a device with queues: it queues the calls behind a spin, and measures their time on the device.

A spin is a kernel that only keeps the device busy. It must last until all calls are queued; if the event right after
the spin happens earlier, the calls are timed again behind a longer spin. A spin always ends, so nothing can hang.
Instead of a spin, nvbench uses a kernel that waits for a flag in host memory; torch does not offer such a kernel.

Source: https://github.com/NVIDIA/nvbench (a blocking kernel, cold measurements, a flush outside of the timed span).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from statistics import median
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from attnbench.devices import Clock, Reading
from attnbench.storage.records import Flag

HOST_NEAR = 5
"""A call is host-bound if its device time is below the time in which the host issues it, and nearly host-bound if its
device time is below HOST_NEAR times that time."""
HEADROOM, LEAST_SPIN_S, LONGEST_SPIN_S, GROWTH = 1.5, 100e-6, 0.1, 4
"""The first spin lasts HEADROOM times the expected time of the launches, plus LEAST_SPIN_S; each further spin is at
least GROWTH times as long as the last, up to LONGEST_SPIN_S."""
FIRST_ISSUE_S = 50e-6  # initial guess of the host's seconds to issue a call
MOST_QUEUED = 256
"""Most calls behind one spin: a launch queue has room for about 1024 kernels, and a call has several. If the queue is
full, fewer calls are tried."""
CONFIRMED = 2
"""Number of longer spins in a row that must delay the host before a call counts as waiting for the device. `inspect`
flags a call for work on another stream if it leaves such work in CONFIRMED + 1 tries in a row."""
LEFT_S, LEFT_SHARE = 20e-6, 0.25
"""A call leaves work on another stream if the device becomes idle later than the current stream: by more than LEFT_S
plus twice the usual delay, and by more than LEFT_SHARE of the device time. The share is needed because a driver takes
longer to report an idle device after long calls (on an H200, in calls over 8,192 tokens)."""
NUM_READINGS = 9  # readings of each constant: the cycles per second, the cost of two events and the usual delay
CALIBRATING_CYCLES = 2_000_000  # length of the spin that measures the cycles per second
PRIMER_S = 30e-6
"""Seconds of a short spin before the main spin. The device is then busy at the event between the two, so that the time
of the main spin shows the frequency of the device's clock."""


@dataclass(kw_only=True)
class Known:
    """Facts about a call from earlier timings."""

    issue_s: float = FIRST_ISSUE_S  # seconds in which the host issues one call
    most: int = MOST_QUEUED  # calls that fit behind one spin
    waits: bool = False  # the host waits for the device inside the call


@dataclass(frozen=True, kw_only=True)
class Span:
    """Times of some calls that were queued behind one spin."""

    device_s: float  # time from the start of the first call to the end of the last on the current stream
    issue_s: float  # time that the host took to issue all calls
    is_hidden: bool  # the spin outlasted the launches
    left_s: float  # time from the end of the work on the current stream to the end on all streams


class QueuedClock(Clock):
    """A clock of device time, from the start of the first kernel to the end of the last, less the cost of two events.

    On a device that cannot spin (run a kernel that only keeps it busy), the time includes pauses in which the device
    waits for the host, so that a short call seems to take as long as its launches; the flags report this.
    """

    def __init__(self, runtime: Any, host_s: Callable[[], float] = perf_counter) -> None:  # noqa: ANN401
        """Use the events of `runtime`, an Accelerator or a simulated one; `host_s` is the host's monotonic timer."""
        self.runtime, self.now = runtime, host_s  # type: ignore[method-assign]
        # 0.5 us: documented for CUDA events; 1 us: assumed for other devices
        self.resolution_s = 0.5e-6 if runtime.can_spin else 1e-6
        self._known: WeakKeyDictionary[Callable[[], object], Known] = WeakKeyDictionary()
        self._cycles, self._spun_s = 0, 0.0  # cycles and seconds of spins since the last `clock_hz`

    @cached_property
    def cycles_per_s(self) -> float:
        """Frequency of the device's clock during a spin, in cycles per second."""
        return CALIBRATING_CYCLES / self._between_s(inside=CALIBRATING_CYCLES)

    @cached_property
    def floor_s(self) -> float:
        """Seconds between two events with nothing between them; 0 on a device that cannot spin."""
        return self._between_s(before=int(LEAST_SPIN_S * self.cycles_per_s)) if self.runtime.can_spin else 0.0

    def _between_s(self, *, before: int = 0, inside: int = 0) -> float:
        """Return the median seconds between two events with a spin of `inside` cycles between them.

        A spin of `before` cycles precedes the first event. A spin of 0 cycles is left out.
        """
        taken: list[float] = []
        for _ in range(NUM_READINGS):
            start, end = self.runtime.event(), self.runtime.event()
            if before:
                self.runtime.spin(before)
            start.record()
            if inside:
                self.runtime.spin(inside)
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) * 1e-3)
        return median(taken)

    def clock_hz(self) -> float:
        """Return the device's clock frequency during the spins since the last `clock_hz`; 0 if there were none.

        A spin lasts a fixed number of cycles, so the time between the events before and after it shows the frequency
        of a busy device. A frequency from the driver may be that of an idle device.
        """
        cycles, spun_s = self._cycles, self._spun_s
        self._cycles, self._spun_s = 0, 0.0
        return cycles / spun_s if spun_s > 0 else 0.0

    def read(self, call: Callable[[], object], num_calls: int, flush: Callable[[], object] | None = None) -> Reading:
        """Time `num_calls` calls on device and host; as many as fit follow one spin (a kernel that only takes time).

        With `flush`, each call is behind a spin of its own, and finds empty caches.
        """
        known = self._known_of(call)
        device_s = issue_s = 0.0
        flags, left = Flag(0), num_calls
        with self.runtime.current():
            while left:
                number = 1 if flush else min(left, known.most)
                span = self._hidden(call, number, flush, known)
                if span is None:  # `known.most` is lower now: fewer calls fit
                    continue
                left -= number
                device_s, issue_s = device_s + span.device_s, issue_s + span.issue_s
                flags |= Flag(0) if span.is_hidden else Flag.not_hidden
                flags |= Flag.other_stream if self._is_busy_elsewhere(span) else Flag(0)
        flags |= Flag.waits if known.waits else Flag(0)
        if device_s < issue_s or Flag.not_hidden in flags:
            flags |= Flag.host_bound
        elif device_s < HOST_NEAR * issue_s:
            flags |= Flag.host_near
        return Reading(elapsed_s=device_s, host_s=issue_s, flags=flags)

    def inspect(self, call: Callable[[], object]) -> Flag:
        """Return `Flag.other_stream` if a call leaves work on another stream in each of several tries; else no flag.

        The call is timed without a spin before it: during a spin, work on the other stream would end undetected.
        """
        with self.runtime.current():
            for _ in range(CONFIRMED + 1):
                if not self._is_busy_elsewhere(self._span(call, 1, None, 0.0)):
                    return Flag(0)
        return Flag.other_stream

    @cached_property
    def _idle_s(self) -> float:
        """Seconds that the driver takes to report an idle device once the current stream is idle and nothing else runs.

        It is measured after a spin, because an H100's driver is several times slower after work than on an idle device.
        """
        return max(self._span(lambda: None, 1, None, LEAST_SPIN_S).left_s for _ in range(NUM_READINGS))

    def _is_busy_elsewhere(self, span: Span) -> bool:
        if not self.runtime.can_spin:
            return False  # the driver's usual delay is unknown
        return span.left_s > max(2 * self._idle_s + LEFT_S, LEFT_SHARE * span.device_s)

    def _known_of(self, call: Callable[[], object]) -> Known:
        try:
            return self._known.setdefault(call, Known())
        except TypeError:  # `call` has no weak references, or no hash
            return Known()

    def _hidden(
        self, call: Callable[[], object], number: int, flush: Callable[[], object] | None, known: Known
    ) -> Span | None:
        """Time the calls behind a spin that outlasts the launches, if possible; None if fewer calls must be tried."""
        if not self.runtime.can_spin:
            span = self._span(call, number, flush, 0.0)
            return replace(span, is_hidden=span.device_s >= HOST_NEAR * span.issue_s)
        spin_s = LEAST_SPIN_S + HEADROOM * number * known.issue_s
        if known.waits:
            return self._span(call, number, flush, LEAST_SPIN_S)
        span, num_waits = self._span(call, number, flush, spin_s), 0
        is_first = True  # the host time of the first try may include compilation
        while not span.is_hidden and spin_s < LONGEST_SPIN_S:
            needed_s = 0.0 if is_first else LEAST_SPIN_S + HEADROOM * span.issue_s
            is_first = False
            longer_s = min(LONGEST_SPIN_S, max(GROWTH * spin_s, needed_s))
            again = self._span(call, number, flush, longer_s)
            is_kept = not again.is_hidden and again.issue_s - span.issue_s > (longer_s - spin_s) / 2
            num_waits = num_waits + 1 if is_kept else 0
            span, spin_s = again, longer_s
            if num_waits == CONFIRMED:  # the host waits for the spin: the queue is full, or the call synchronises
                known.waits = number == 1
                break
        if span.is_hidden:
            known.issue_s = span.issue_s / number
        elif number > 1:
            known.most = number // 2
            return None
        return span

    def _span(self, call: Callable[[], object], number: int, flush: Callable[[], object] | None, spin_s: float) -> Span:
        """Time the calls between two events, behind a spin of `spin_s` seconds if that is above 0."""
        runtime, floor_s = self.runtime, self.floor_s
        cycles = int(spin_s * self.cycles_per_s) if spin_s else 0
        before, start, end = runtime.event(), runtime.event(), runtime.event()
        is_busy = False
        runtime.synchronize()
        if flush is not None:
            flush()
        if cycles:
            runtime.spin(int(PRIMER_S * self.cycles_per_s))
            before.record()
            runtime.spin(cycles)
            is_busy = not before.query()  # then there was no pause between the spins
        start.record()
        began_s = self.now()
        for _ in repeat(None, number):
            call()
        issue_s = self.now() - began_s
        end.record()
        is_hidden = not start.query()
        end.synchronize()
        left_s = self.now()
        runtime.synchronize()
        left_s = self.now() - left_s
        device_s = max(start.elapsed_time(end) * 1e-3 - floor_s, self.resolution_s)
        if is_busy:
            self._cycles += cycles
            self._spun_s += before.elapsed_time(start) * 1e-3 - floor_s
        return Span(device_s=device_s, issue_s=issue_s, is_hidden=is_hidden, left_s=left_s)
