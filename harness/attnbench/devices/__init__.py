"""Devices: everything that the harness asks of the hardware which a workload names, behind one interface.

A file here that holds an upper-case DEVICE is a device: its stem is the device's name, and DEVICE makes a `Device` of
the text that a workload gives, such as "cuda:1". Such a file imports torch inside its methods only, so that devices can
be listed, and asked for what needs no torch, where torch is missing. The other files serve several devices.
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

from attnbench.plugins import unknown

if TYPE_CHECKING:  # some import this module
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from attnbench.devices.loads import Load
    from attnbench.devices.recording import Recording
    from attnbench.storage.records import Counters, DeviceState, Environment
    from attnbench.workloads.workload import Workload

NOT_NATIVE = "has no hardware here and may run reference loops"
"""How the note on a dtype ends that the device computes without instructions of its own."""

T = TypeVar("T")
CROWDED_SHARE = 0.25
"""Of a device's memory: a process that holds more should let go of what it can make again."""


class CaptureError(Exception):
    """A call cannot be replayed as a graph of its launches; says why."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a clock saw of some calls."""

    elapsed_s: float
    host_s: float = 0.0  # what the host needed to issue them, where that is something else; 0: it is not
    flags: int = 0  # of storage/records.py, `Flag`


class Clock(Protocol):
    """A source of time."""

    resolution_s: float

    def now(self) -> float:
        """Seconds since some fixed moment; where nothing else is said, of the host's monotonic timer."""
        return perf_counter()

    def elapsed(self, call: Callable[[], object], num_calls: int) -> float:
        """Seconds that `num_calls` calls take, back to back."""

    def read(self, call: Callable[[], object], num_calls: int, flush: Callable[[], object] | None = None) -> Reading:
        """Time the calls for a sample; a flush, where given, empties the caches before each, outside of the time."""
        if flush is None:
            return Reading(elapsed_s=self.elapsed(call, num_calls))
        elapsed_s = 0.0
        for _ in range(num_calls):
            flush()
            elapsed_s += self.elapsed(call, 1)
        return Reading(elapsed_s=elapsed_s)

    def inspect(self, call: Callable[[], object]) -> int:  # noqa: ARG002 - for who can see something
        """What is wrong with timing this call here, as flags; it may be called a few times."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a device adds to the environment that a run stores (storage/records.py)."""

    accelerator: str = ""  # name, memory and generation; "" for the processor, and where the device is missing
    versions: Mapping[str, str] = field(default_factory=dict)  # of its libraries
    flags: Mapping[str, str] = field(default_factory=dict)  # of torch, that change how fast it computes
    settings: tuple[str, ...] = ()  # names of environment variables that do
    clocks: Mapping[str, str] = field(default_factory=dict)  # clocks, power and the like, as they are and may become


class Device(Protocol):
    """One device. Where it is missing, only what describes it may be asked, down to `facts`."""

    name: str  # as a workload gives it: "cpu", "cuda:1"
    torch_device: str  # where torch puts its tensors, as for torch.device()
    is_host: bool  # its memory is this process's: the profiler sees every allocation, and fresh pages cost time
    has_caching_allocator: bool  # torch keeps what it has taken of the memory, so that it may hold more than tensors do
    clock: Clock  # of record
    alignment_bytes: int = 1  # in a layout that is tried, tensors and their rows start at multiples of so many
    has_float64: bool = True  # torch computes in float64 there: the right answers are computed on it
    activities: tuple[str, ...] = ("CPU",)  # what the profiler has to watch, as torch.profiler.ProfilerActivity has it
    has_graphs: bool = False  # the launches of a call can be recorded once and replayed as one

    def seems_present(self) -> bool:
        """Whether the device `all` includes it, by what can be seen without torch."""
        return True

    def missing(self) -> str | None:
        """Why it is not available here, in words, or None."""
        return None

    def missing_compiler(self) -> str | None:
        """Why torch.compile can make no kernels for it, in words, or None."""

    def notes(self, workload: Workload, environment: Environment | None) -> tuple[str, ...]:  # noqa: ARG002
        """What a reader should know of the workload's dtype and precision here, in words. Needs no torch."""
        return ()

    def facts(self) -> Facts:
        """What the environment of a run says of it."""
        return Facts()

    def synchronize(self) -> None:
        """Wait until all that was queued is done.

        Raises:
            RuntimeError: something that was queued has failed.
        """

    def is_broken(self) -> bool:
        """Whether every call fails from now on in this process, as after an illegal memory access."""
        return False

    collectives: str = "gloo"  # with what its processes speak to one another, as torch.distributed names it

    def compute_capability(self) -> tuple[int, int] | None:
        """Of a GPU, (9, 0) for Hopper's; None where there is none to ask."""
        return None

    def number(self) -> int | None:
        """How many devices of its kind there are; None where every process can have it."""
        return None

    def use(self, number: int) -> None:
        """Compute on the device of that number from now on, in this process."""

    def generators(self) -> Mapping[str, Any]:
        """Torch's global random generators of its own, by a name for messages; none before it is used."""
        return {}

    def record(self, call: Callable[[], object]) -> Recording:
        """Call once under the profiler.

        Raises:
            Exception: whatever the call raises.
        """

    def captured(self, make: Callable[[], Callable[[], T]]) -> Callable[[], T]:  # noqa: ARG002 - for who has graphs
        """The call that `make` makes, recorded once: what is returned replays its launches as one graph.

        A replay returns what the recorded call returned, in the same memory.

        Raises:
            CaptureError: the call does something that no graph can hold, such as waiting for the device; the process is
                of no more use. Or the device has no graphs.
        """
        raise CaptureError(f"{self.name} has no graphs of launches")

    def state(self) -> DeviceState | None:
        """Clock, temperature and power at this moment, as the driver says; None where nothing says it."""
        return None

    def cache_bytes(self) -> int:
        """The size of its largest cache."""

    def flush(self) -> object:
        """Empty the caches: write twice as much as the largest one holds."""

    def interference_probe(self, num_threads: int = 1) -> Callable[[], object]:
        """Fixed small work, which takes longer while others use the device (statistics/interference.py).

        On the host it has as many threads as the workload: other work that one thread never notices stops two threads,
        which wait for one another.
        """

    def loads(self, dtype: str) -> list[Load]:
        """Matrix products and copies that show its ceilings for a dtype; those of one kind and dtype smallest first."""

    def free_bytes(self) -> int:
        """Memory that it could still give."""

    def outside_bytes(self) -> int:
        """Memory of the device that is taken, and not by torch's caching allocator; 0 where there is none."""
        return 0

    def is_capturing(self) -> bool:
        """Whether what is launched now is recorded for a graph, and cannot be waited for."""
        return False

    def is_crowded(self) -> bool:
        """Whether this process holds so much of its memory that it should let go of what it can make again."""

    def capped(self, limit_bytes: int) -> AbstractContextManager[None]:
        """Within: taking more than `limit_bytes` beyond what is held now fails, as out of memory."""


@cache
def processor() -> str:
    """The model of this machine's processor, in the system's words."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return model[1].strip() if model else platform.processor() or platform.machine()


@cache
def names() -> tuple[str, ...]:
    """The devices that there are files for, sorted; none is imported. Every watched call asks for them twice."""
    files = sorted(Path(__file__).parent.glob("[a-z]*.py"))
    return tuple(file.stem for file in files if re.search(r"^DEVICE\b", file.read_text(encoding="utf-8"), re.MULTILINE))


@cache
def device(text: str) -> Device:
    """The device that a workload names: NAME, or NAME:N for one of several. It need not be available here.

    Raises:
        ValueError: there is no such device; the message says which there are.
    """
    name = text.partition(":")[0]
    if name not in names():
        raise ValueError(unknown("device", name, names()))
    made: Device = importlib.import_module(f"{__name__}.{name}").DEVICE(text)
    return made


def read_counters() -> Counters:
    """Who uses the processors: the system's counters at this moment, and those of this process and all it started."""
    import psutil

    from attnbench.storage.records import Counters

    spent: Any = psutil.cpu_times()  # its fields differ from system to system
    counted_twice = getattr(spent, "guest", 0.0) + getattr(spent, "guest_nice", 0.0)  # they are in user and nice, too
    this = psutil.Process()
    own_s = sum(os.times()[:4])  # with those that it started and that have ended
    for child in this.children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            own_s += sum(child.cpu_times()[:4])
    return Counters(
        began_s=this.create_time(),
        total_s=sum(spent) - counted_twice,
        idle_s=spent.idle + getattr(spent, "iowait", 0.0),
        stolen_s=getattr(spent, "steal", 0.0),
        own_s=own_s,
        free_bytes=psutil.virtual_memory().available,
    )
