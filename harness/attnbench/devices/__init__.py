"""Devices: one interface to all hardware that a workload can name.

A file in this folder that defines DEVICE describes a device. Its stem is the device's name, and DEVICE creates a
`Device` from the name in a workload, such as "cuda:1". The file imports torch only inside methods, so that devices can
be listed and described without torch. The other files serve several devices.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from attnbench.plugins import require_known

if TYPE_CHECKING:  # devices can be listed without these
    from collections.abc import Callable

    from attnbench.devices.loads import Load
    from attnbench.devices.recording import Recording
    from attnbench.storage.records import Counters, DeviceState

T = TypeVar("T")


class CaptureError(Exception):
    """A call cannot be recorded and replayed as a graph of its kernel launches; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Times of the calls of one sample, as a clock measured them."""

    elapsed_s: float  # time of all calls together
    call_s: float = 0.0  # time of a typical call; 0: use the mean
    host_s: float = 0.0  # time that the host took to issue all calls, on a device with queues; 0 on others
    flags: int = 0  # bits of `Flag` in storage/records.py


class Clock(Protocol):
    """A clock that times calls on a device."""

    resolution_s: float  # smallest difference of times that the clock can measure
    sample_s: float = 1e-3  # shortest duration of a sample

    def now(self) -> float:
        """Return the seconds since a fixed moment, by default on the host's monotonic timer."""
        return perf_counter()

    def elapsed(self, call: Callable[[], object], num_calls: int) -> float:
        """Return the seconds of `num_calls` calls, back to back. Each clock defines this method or `read`."""
        return self.read(call, num_calls).elapsed_s

    def read(self, call: Callable[[], object], num_calls: int, flush: Callable[[], object] | None = None) -> Reading:
        """Time `num_calls` calls; `flush` empties the caches before each call, outside of the measured time."""
        if flush is None:
            return Reading(elapsed_s=self.elapsed(call, num_calls))
        elapsed_s = 0.0
        for _ in range(num_calls):
            flush()
            elapsed_s += self.elapsed(call, 1)
        return Reading(elapsed_s=elapsed_s)

    def inspect(self, call: Callable[[], object]) -> int:  # noqa: ARG002 - for devices that can inspect calls
        """Look for problems in timing this call, perhaps by a few calls; return them as bits of `Flag`, 0 for none."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a device for the environment of a run (storage/records.py)."""

    accelerator: str = ""  # name, memory and generation; "" for the processor, or for a missing device
    versions: Mapping[str, str] = field(default_factory=dict)  # versions of the device's libraries, by name
    flags: Mapping[str, str] = field(default_factory=dict)  # flags of torch that affect the device's speed, by name
    settings: tuple[str, ...] = ()  # names of environment variables that affect the device's speed; may end with *
    clocks: Mapping[str, str] = field(default_factory=dict)  # limits and modes of the device, such as power, by name


class Device(Protocol):
    """A device that runs workloads. If it is missing, only the members from `name` to `facts` may be used."""

    name: str  # name as in a workload: "cpu", "cuda:1"
    torch_device: str  # device for its tensors, as for torch.device()
    is_single: bool = False  # there is only one such device, so that its name has no number
    is_host: bool  # the device uses the host's memory: the profiler sees every allocation, and torch caches none
    clock: Clock  # the clock of all measurements
    alignment_bytes: int = 1  # in layouts that a check tries, tensors and rows start at multiples of this
    has_float64: bool = True  # the device supports float64: right answers are computed there, otherwise on the CPU
    activities: tuple[str, ...] = ("CPU",)  # activities for the profiler, as in torch.profiler.ProfilerActivity
    has_graphs: bool = False  # the launches of a call can be recorded and replayed as one graph
    counts_energy: bool = False  # the driver may count the device's energy
    untried: str = ""  # if this kind of device was never tried: what should work, for the first line of any output

    def seems_present(self) -> bool:
        """Return whether `device=all` includes this device, without importing torch."""
        return True

    def missing(self) -> str | None:
        """Return why the device is not available here; None if it is."""
        return None

    def missing_compiler(self) -> str | None:
        """Return what torch.compile lacks to compile for the device; None if nothing is missing."""

    def facts(self) -> Facts:
        """Return the facts for the environment of a run."""
        return Facts()

    def synchronize(self) -> None:
        """Wait for all queued work.

        Raises:
            RuntimeError: some queued work has failed.
        """

    def apply_first_use_changes(self) -> None:
        """Trigger the changes to this process that torch makes at the first use of the device."""

    def is_broken(self) -> bool:
        """Return whether all further calls in this process would fail, as after an illegal memory access."""
        return False

    collectives: str = "gloo"  # backend of torch.distributed

    def compute_capability(self) -> tuple[int, int] | None:
        """Return the compute capability of an Nvidia GPU, such as (9, 0) for Hopper; None for any other device."""
        return None

    def select(self) -> None:
        """Make this the current device of the process; some code, such as Triton's, launches kernels only there."""

    def generators(self) -> Mapping[str, Any]:
        """Return torch's random generators for this kind of device, by name; there may be none before its first use."""
        return {}

    def record(self, call: Callable[[], object]) -> Recording:
        """Make one call under the profiler.

        Raises:
            Exception: any exception of the call.
        """

    def captured(self, make: Callable[[], Callable[[], T]]) -> Callable[[], T]:  # noqa: ARG002 - for devices with graphs
        """Record the call that `make` creates as a graph of kernel launches, and return a function that replays it.

        A replay returns the result of the recorded call, in the same memory.

        Raises:
            CaptureError: the device has no graphs, or the call does something that a graph cannot contain, such as
                waiting for the device; the process is unusable afterwards.
        """
        raise CaptureError(f"{self.name} has no graphs of launches")

    def state(self) -> DeviceState | None:
        """Return the current clock, temperature and power as the driver reports them; None if it reports nothing."""
        return None

    def energy_j(self) -> float | None:
        """Return the joules that the device has used since its driver was loaded; None if nothing counts them."""
        return None

    def cache_bytes(self) -> int:
        """Return the bytes of the device's largest cache."""

    def flush(self) -> object:
        """Empty the caches by writing twice the bytes of the largest one."""

    def interference_probe(self, num_threads: int = 1) -> Callable[[], object]:
        """Return a function that does a small, fixed task, which takes longer while other processes use the device.

        On the host, the task uses `num_threads` threads, as the workload does, because a process that does not delay
        one thread may delay two threads that wait for each other. statistics/interference.py judges the times.
        """

    def loads(self, dtype: str) -> list[Load]:
        """Return matrix products and copies to measure the device's highest rates, each kind from small to large."""

    def outside_bytes(self) -> int:
        """Return the bytes of device memory in use outside of torch's caching allocator; 0 if they cannot be read."""
        return 0


@cache
def processor() -> str:
    """Return the processor model, as the system reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return model[1].strip() if model else platform.processor() or platform.machine()


@cache
def names() -> tuple[str, ...]:
    """Return the names of all devices that have a file, sorted, without importing the files."""
    files = sorted(Path(__file__).parent.glob("[a-z]*.py"))
    return tuple(file.stem for file in files if re.search(r"^DEVICE\b", file.read_text(encoding="utf-8"), re.MULTILINE))


@cache
def device(text: str) -> Device:
    """Return the device that a workload names: NAME, or NAME:N for one of several; it need not be available here.

    Raises:
        ValueError: there is no such device, and the message lists the known ones; or the device takes no number.
    """
    name = text.partition(":")[0]
    require_known("device", [name], names())
    kind = importlib.import_module(f"{__name__}.{name}").DEVICE
    if kind.is_single and text != name:
        raise ValueError(f"device={text} is not allowed: there is one {name}; give no number")
    made: Device = kind(text)
    return made


def read_counters() -> Counters:
    """Read the free memory, and the processor time so far of the system and of this process with its descendants."""
    import psutil

    from attnbench.devices import containers
    from attnbench.storage.records import Counters

    spent: Any = psutil.cpu_times()  # fields differ between systems
    counted_twice = getattr(spent, "guest", 0.0) + getattr(spent, "guest_nice", 0.0)  # also counted in user and nice
    this = psutil.Process()
    own_s = sum(os.times()[:4])  # includes finished children
    for child in this.children(recursive=True):
        with suppress(psutil.Error):  # the child has just ended
            own_s += sum(child.cpu_times()[:4])
    return Counters(
        began_s=this.create_time(),
        total_s=sum(spent) - counted_twice,
        idle_s=spent.idle + getattr(spent, "iowait", 0.0),
        stolen_s=getattr(spent, "steal", 0.0),
        own_s=own_s,
        free_bytes=containers.memory()[0],
    )
