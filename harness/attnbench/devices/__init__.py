"""Devices: one interface to all hardware that a workload can name.

A file here that defines an upper-case DEVICE is a device: its stem is the device's name, and DEVICE makes a `Device`
from the workload's text, such as "cuda:1". Such a file imports torch only inside its methods, so that devices can be
listed and described without torch. The other files serve several devices.
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
    """A call cannot be replayed as a graph of its launches; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Times of the calls of a sample, as a clock read them."""

    elapsed_s: float  # of all calls together
    call_s: float = 0.0  # of a typical call; 0: use the mean
    host_s: float = 0.0  # in which the host issued all calls, on a device with queues; elsewhere 0
    flags: int = 0  # bits of `Flag` in storage/records.py


class Clock(Protocol):
    """A source of time."""

    resolution_s: float  # smallest difference of times that the clock can show
    sample_s: float = 1e-3  # shortest sample

    def now(self) -> float:
        """Seconds since a fixed moment, by default on the host's monotonic timer."""
        return perf_counter()

    def elapsed(self, call: Callable[[], object], num_calls: int) -> float:
        """Seconds of `num_calls` calls, back to back. A clock must define this or `read`."""
        return self.read(call, num_calls).elapsed_s

    def read(self, call: Callable[[], object], num_calls: int, flush: Callable[[], object] | None = None) -> Reading:
        """Time the calls of a sample; `flush` empties the caches before each call, outside of the measured time."""
        if flush is None:
            return Reading(elapsed_s=self.elapsed(call, num_calls))
        elapsed_s = 0.0
        for _ in range(num_calls):
            flush()
            elapsed_s += self.elapsed(call, 1)
        return Reading(elapsed_s=elapsed_s)

    def inspect(self, call: Callable[[], object]) -> int:  # noqa: ARG002 - for devices that can inspect calls
        """Check that this call can be timed; return problems as bits of `Flag`, or 0. May make a few calls."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a device for the environment of a run (storage/records.py)."""

    accelerator: str = ""  # name, memory and generation; "" for the processor, or without the device
    versions: Mapping[str, str] = field(default_factory=dict)  # of the device's libraries, by name
    flags: Mapping[str, str] = field(default_factory=dict)  # flags of torch that affect the device's speed, by name
    settings: tuple[str, ...] = ()  # names of environment variables that affect the device's speed; may end with *
    clocks: Mapping[str, str] = field(default_factory=dict)  # limits and modes of the device, such as power, by name


class Device(Protocol):
    """A device. If it is missing, only the members down to `facts` may be used."""

    name: str  # as in a workload: "cpu", "cuda:1"
    torch_device: str  # device for its tensors, as for torch.device()
    is_single: bool = False  # there is only one such device, so that its name has no number
    is_host: bool  # the device uses the host's memory: the profiler sees every allocation, and torch caches none
    clock: Clock  # the clock of all measurements
    alignment_bytes: int = 1  # in layouts that a check tries, tensors and rows start at multiples of this
    has_float64: bool = True  # the device supports float64, so right answers are computed there; else on the CPU
    activities: tuple[str, ...] = ("CPU",)  # activities for the profiler, as in torch.profiler.ProfilerActivity
    has_graphs: bool = False  # the launches of a call can be recorded and replayed as one graph
    counts_energy: bool = False  # the driver may count the device's energy
    untried: str = ""  # what should work on a kind of device that was never tried, for the first line of any output

    def seems_present(self) -> bool:
        """Whether `device=all` includes this device. Does not import torch."""
        return True

    def missing(self) -> str | None:
        """Why the device is not available here; None if it is."""
        return None

    def missing_compiler(self) -> str | None:
        """Why torch.compile has no compiler for the device; None if it has one."""

    def facts(self) -> Facts:
        """Facts for the environment of a run."""
        return Facts()

    def synchronize(self) -> None:
        """Wait for all queued work.

        Raises:
            RuntimeError: some queued work has failed.
        """

    def apply_first_use_changes(self) -> None:
        """Trigger the changes to this process that torch makes at the first use of the device."""

    def is_broken(self) -> bool:
        """Whether all further calls in this process would fail, as after an illegal memory access."""
        return False

    collectives: str = "gloo"  # backend of torch.distributed

    def compute_capability(self) -> tuple[int, int] | None:
        """Compute capability of an Nvidia GPU, such as (9, 0) for Hopper; None for any other device."""
        return None

    def select(self) -> None:
        """Make this the current device of the process: some code, such as Triton's, launches only there."""

    def generators(self) -> Mapping[str, Any]:
        """Torch's global random generators for this kind of device, by a name for messages; may be empty before use."""
        return {}

    def record(self, call: Callable[[], object]) -> Recording:
        """Make one call under the profiler.

        Raises:
            Exception: any exception of the call.
        """

    def captured(self, make: Callable[[], Callable[[], T]]) -> Callable[[], T]:  # noqa: ARG002 - for devices with graphs
        """Record the call that `make` creates as a graph, and return a function that replays it.

        A replay returns the result of the recorded call, in the same memory.

        Raises:
            CaptureError: the device has no graphs, or the call does something that a graph cannot hold, such as waiting
                for the device; the process is unusable afterwards.
        """
        raise CaptureError(f"{self.name} has no graphs of launches")

    def state(self) -> DeviceState | None:
        """Current clock, temperature and power as the driver reports them; None without a report."""
        return None

    def energy_j(self) -> float | None:
        """Joules that the device has used since its driver was loaded; None if nothing counts them."""
        return None

    def cache_bytes(self) -> int:
        """Bytes of the device's largest cache."""

    def flush(self) -> object:
        """Empty the caches by writing twice the size of the largest one."""

    def interference_probe(self, num_threads: int = 1) -> Callable[[], object]:
        """A function with small, fixed work that takes longer while others use the device (statistics/interference.py).

        On the host it uses as many threads as the workload, because work of others that does not delay a single thread
        may stall two threads that wait for each other.
        """

    def loads(self, dtype: str) -> list[Load]:
        """Matrix products and copies that show the ceilings for a dtype; smallest first for each kind and dtype."""

    def outside_bytes(self) -> int:
        """Bytes of device memory in use outside of torch's caching allocator; 0 where they cannot be read."""
        return 0


@cache
def processor() -> str:
    """The processor model, as the system reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return model[1].strip() if model else platform.processor() or platform.machine()


@cache
def names() -> tuple[str, ...]:
    """Names of all devices that have a file, sorted; imports no such file. Cached, because it is called often."""
    files = sorted(Path(__file__).parent.glob("[a-z]*.py"))
    return tuple(file.stem for file in files if re.search(r"^DEVICE\b", file.read_text(encoding="utf-8"), re.MULTILINE))


@cache
def device(text: str) -> Device:
    """The device that a workload names: NAME, or NAME:N for one of several. It need not be available here.

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
    """Counters of processor use at this moment, of the system and of this process with its descendants; free memory."""
    import psutil

    from attnbench.devices import containers
    from attnbench.storage.records import Counters

    spent: Any = psutil.cpu_times()  # fields differ between systems
    counted_twice = getattr(spent, "guest", 0.0) + getattr(spent, "guest_nice", 0.0)  # also counted in user and nice
    this = psutil.Process()
    own_s = sum(os.times()[:4])  # includes finished children
    for child in this.children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            own_s += sum(child.cpu_times()[:4])
    return Counters(
        began_s=this.create_time(),
        total_s=sum(spent) - counted_twice,
        idle_s=spent.idle + getattr(spent, "iowait", 0.0),
        stolen_s=getattr(spent, "steal", 0.0),
        own_s=own_s,
        free_bytes=containers.memory()[0],
    )
