"""A simulated device in virtual time: streams, bounded launch queues, events, and kernels that spin."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attnbench.devices import CaptureError


class SimulatedEvent:
    """An event in the current stream, with the methods of torch's events."""

    def __init__(self, runtime: "SimulatedRuntime") -> None:
        """Create an event that is not recorded yet."""
        self.runtime, self.at_s = runtime, 0.0

    def record(self) -> None:
        """Record the event after all work queued in the current stream."""
        self.runtime.launch(self.runtime.event_s)
        self.at_s = self.runtime.ends_s[0]

    def query(self) -> bool:
        """Return whether the event has happened by the host's current time."""
        return self.at_s <= self.runtime.now_s

    def synchronize(self) -> None:
        """Make the host wait for the event."""
        self.runtime.now_s = max(self.runtime.now_s, self.at_s)

    def elapsed_time(self, end: "SimulatedEvent") -> float:
        """Return the milliseconds from this event to `end`."""
        return 1e3 * (end.at_s - self.at_s)


class SimulatedRuntime:
    """A device whose time is virtual; stream 0 is the current one.

    `launch_s` is the host's time for one launch, `event_s` the device's time for an event. A launch waits while
    `num_queued` launches of its stream are unfinished. `notice_s` is the extra time that the driver needs to notice
    that the device has finished some work. Planted fault: `spin_share` below 1 makes spinning kernels too short.
    """

    def __init__(  # noqa: PLR0913 - each is one fault or one property
        self,
        *,
        launch_s: float = 5e-6,
        event_s: float = 2e-6,
        num_queued: int = 1024,
        notice_s: float = 0.0,
        spin_share: float = 1.0,
        can_spin: bool = True,
    ) -> None:
        self.can_spin = can_spin
        self.notice_s, self._has_worked = notice_s, False
        self.launch_s, self.event_s, self.num_queued, self.spin_share = launch_s, event_s, num_queued, spin_share
        self.now_s = 0.0
        self.ends_s: dict[int, float] = {0: 0.0}  # when each stream has done all of its work
        self.spent_s = 0.0  # requested seconds of all spinning kernels
        self._queues: dict[int, deque[float]] = {}
        self._recorded: list[float] | None = None  # kernels of the call being captured
        self._cached = False  # whether the data of `touch` lies in the cache

    @contextmanager
    def current(self) -> Iterator[None]:
        """Provide a context in which this device is selected; it always is, since there is no other one."""
        yield

    def launch(self, seconds: float, stream: int = 0) -> None:
        """Queue a kernel of this duration, or add it to the graph that is being captured.

        Raises:
            RuntimeError: a graph is being captured, and `stream` is not 0.
        """
        if self._recorded is not None:
            if stream:
                raise RuntimeError("capturing stream has unjoined work")
            self._recorded.append(seconds)
            return
        queue = self._queues.setdefault(stream, deque())
        self.now_s += self.launch_s
        while queue and queue[0] <= self.now_s:
            queue.popleft()
        if len(queue) >= self.num_queued:
            self.now_s = queue.popleft()
        self.ends_s[stream] = max(self.now_s, self.ends_s.get(stream, 0.0)) + seconds
        self._has_worked = True
        queue.append(self.ends_s[stream])

    @property
    def is_capturing(self) -> bool:
        """Whether launches become part of a graph instead of running."""
        return self._recorded is not None

    def kernel(self, seconds: float, stream: int = 0) -> None:
        """Queue a kernel of exactly this duration; a subclass may add noise."""
        self.launch(seconds, stream)

    def captured(self, call: Callable[[], object]) -> Callable[[], None]:
        """Capture the launches of a call as a graph; return a function that replays the graph as one kernel.

        Raises:
            CaptureError: the call waits, or queues work on another stream.
        """
        self._recorded = []
        try:
            call()
            seconds = sum(self._recorded)
        except RuntimeError as error:
            raise CaptureError(f"it cannot be recorded as a graph: {error}") from error
        finally:
            self._recorded = None
        return lambda: self.kernel(seconds)

    def touch(self, cached_s: float, seconds: float) -> None:
        """Queue a kernel that reads data through the cache: it takes `cached_s` if they are there, else `seconds`."""
        self.launch(cached_s if self._cached else seconds)
        self._cached = True

    def flush(self, seconds: float = 100e-6) -> None:
        """Queue a kernel that empties the cache."""
        self.launch(seconds)
        self._cached = False

    def event(self) -> SimulatedEvent:
        """Create an event."""
        return SimulatedEvent(self)

    def spin(self, cycles: int) -> None:
        """Queue a kernel that spins for this many cycles, of one nanosecond each."""
        self.spent_s += cycles * 1e-9
        self.launch(cycles * 1e-9 * self.spin_share)

    def wait(self) -> None:
        """Make the host wait for the current stream, as a call that synchronises does.

        Raises:
            RuntimeError: a graph is being captured.
        """
        if self._recorded is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.now_s = max(self.now_s, self.ends_s[0])

    def synchronize(self) -> None:
        """Make the host wait for all streams."""
        self.now_s = max(self.now_s, *self.ends_s.values()) + 5e-6 + self.notice_s * self._has_worked
        self._has_worked = False

    def host_s(self) -> float:
        """Return the host's time in virtual seconds."""
        return self.now_s
