"""A simulated GPU on virtual time, with noise, heat and a cache.

It has the methods of CudaGpu (studies/acceptance/gpus.py), so that the tests G1 to G5 (on_cuda.py) can use it, too.
"""

import math
import random
from collections.abc import Callable
from functools import partial

from attnbench.devices.queued import QueuedClock
from attnbench.storage.records import DeviceState
from studies.simulated.timeline import SimulatedRuntime

Call = Callable[[], object]

NOISE = 0.003
"""Standard deviation of the log of a kernel's time."""
SLOWEST, COOLS_S = 0.15, 2.0
"""Relative slowdown of a hot device, and the seconds in which the slowdown falls by a factor of e."""
CARRY_S = 10e-3
"""Seconds in which the effect of an interference probe falls by a factor of e."""
COPIED_BYTES, CACHED_S, COLD_S, PEAK = 25 * 2**20, 8e-6, 20e-6, 4.8e12
POISONED = "CUDA error: an illegal memory access was encountered"


class SimulatedGpu(SimulatedRuntime):
    """A GPU on virtual time.

    `drift(now_s)` multiplies the time of every kernel, as a changing clock frequency does. Right after the interference
    probe (a fixed kernel), other kernels are slower by the share `carry`, as after work that takes much power. After
    each kernel the device idles for `gap_s` seconds. Planted faults: if `flushes` is false, a flush does not empty the
    cache; if `spin_share` is below 1, spinning kernels are shorter than the clock's calibration predicts.
    """

    def __init__(  # noqa: PLR0913 - each is one fault or one property
        self,
        *,
        seed: int = 0,
        drift: Callable[[float], float] = lambda _: 1.0,
        carry: float = 0.0,
        flushes: bool = True,
        spin_share: float = 1.0,
        event_s: float = 2e-6,
        gap_s: float = 0.0,
    ) -> None:
        """Calibrate the clock before any fault is active."""
        super().__init__(event_s=event_s)
        self.drift, self.carry, self.flushes, self.gap_s = drift, carry, flushes, gap_s
        self.clock = QueuedClock(self, self.host_s)
        _ = self.clock.cycles_per_s, self.clock.floor_s
        self.spin_share = spin_share
        self.work: dict[str, Call] = {
            "one long kernel": partial(self.kernel, 1e-3),
            "one short kernel": partial(self.kernel, 60e-6),
            "sixteen kernels": self.many(16, 4e-6),
        }
        self.is_poisoned, self.slowed_by = False, 0
        self._draws = random.Random(seed)
        self._heat, self._heated_s, self._probed_s = 0.0, 0.0, -math.inf
        self._seen_s: float | None = None  # seconds in kernels while a profiler runs, else None
        self._num_kernels = 0

    def many(self, number: int, seconds: float) -> Call:
        """Return a call that queues `number` kernels of `seconds` each; the device waits if launches take longer."""

        def call() -> None:
            for _ in range(number):
                self.kernel(seconds)

        return call

    def kernel(self, seconds: float, stream: int = 0) -> None:
        """Queue a kernel that takes `seconds` on an undisturbed device.

        Raises:
            RuntimeError: the device's context is lost (`is_poisoned`).
        """
        if self.is_poisoned:
            raise RuntimeError(POISONED)
        if self.is_capturing:
            self.launch(seconds, stream)
            return
        lasts_s = seconds * self._slower() + self.gap_s  # a profiler sees no gap
        self._num_kernels += 1
        if self._seen_s is not None:
            self._seen_s += lasts_s - self.gap_s
        self.launch(lasts_s, stream)

    def spin(self, cycles: int) -> None:
        """Queue a kernel that spins for this many cycles, at the current clock frequency."""
        super().spin(int(cycles * self.drift(max(self.now_s, self.ends_s[0]))))

    def state(self) -> DeviceState:
        """Return `slowed_by`, and the clock frequency measured by the spinning kernels since the last reading."""
        return DeviceState(clock_mhz=self.clock.clock_hz() / 1e6, slowed_by=self.slowed_by)

    def _slower(self) -> float:
        now_s = max(self.now_s, self.ends_s[0])
        hot = self._heat * math.exp(-(now_s - self._heated_s) / COOLS_S)
        after = self.carry * math.exp(-(now_s - self._probed_s) / CARRY_S)
        return self.drift(now_s) * (1 + SLOWEST * hot) * (1 + after) * math.exp(self._draws.gauss(0.0, NOISE))

    def calls(self) -> dict[str, Call]:
        """Return a copy of `work`: calls by name."""
        return dict(self.work)

    def fixed_work(self) -> Call:
        """Return a call that queues a kernel of 300 microseconds."""
        return partial(self.kernel, 300e-6)

    def short_work(self) -> Call:
        """Return a call that queues a kernel of 5 microseconds."""
        return partial(self.kernel, 5e-6)

    def copy(self) -> tuple[Call, int]:
        """Return a call that copies data (faster from the cache), and the number of bytes that it moves."""
        return partial(self.touch, CACHED_S, COLD_S), COPIED_BYTES

    def flush(self, seconds: float = 100e-6) -> None:
        """Queue a flush of the cache; if `flushes` is false, it takes the same time, but the cache keeps its data."""
        if self.flushes:
            super().flush(seconds)
        else:
            self.launch(seconds)

    def busy(self, seconds: float) -> Call:
        """Return a call that queues a kernel of this duration, without noise."""
        return partial(self.launch, seconds)

    def kernel_seconds(self, call: Call, num_calls: int) -> float:
        """Make `num_calls` calls; return their seconds in kernels, without the gap after each kernel."""
        self._seen_s = 0.0
        for _ in range(num_calls):
            call()
        self.synchronize()
        seen_s, self._seen_s = self._seen_s, None
        return seen_s

    def num_kernels(self, call: Call) -> int:
        """Count the kernels that a call queues."""
        before = self._num_kernels
        call()
        return self._num_kernels - before

    def heat(self, seconds: float) -> None:
        """Advance the time by `seconds`, and make the device hot; 0 seconds do nothing."""
        if seconds:
            self.synchronize()
            self.now_s += seconds
            self._heat, self._heated_s = 1.0, self.now_s

    def interference_probe(self) -> Call:
        """Return a call that queues the interference probe, a kernel after which others are slower by `carry`."""

        def probe() -> None:
            self.kernel(200e-6)
            self._probed_s = self.ends_s[0]

        return probe

    def peak_bytes_per_s(self) -> float:
        """Return the simulated peak bandwidth of the memory."""
        return PEAK
