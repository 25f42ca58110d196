"""What runs on a host: it holds the machine for itself, measures a share into a journal there, and hands that back.

Nothing here knows of Ray. Messages are bytes of JSON, and are read as data.
"""

import fcntl
import hashlib
import math
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import psutil

from attnbench.cluster.shares import Share, placed
from attnbench.devices import processor
from attnbench.processes.execution import execute
from attnbench.processes.stages import Progress, Watch
from attnbench.storage import events
from attnbench.storage.journal import JOURNAL
from attnbench.storage.journal import events as read_events

LOCK = Path("/tmp/attnbench-bench-slot")  # noqa: S108 - it holds nothing, and is the same whatever TMPDIR a job has
SLOT = "ATTNBENCH_BENCH_SLOT"
"""Set for all processes that a share starts: by it those are found that have outlived the one that started them."""
POLL_S = 0.5
REPORT_EVERY_S = 30.0
"""So often a host says how far it is, between two steps: a message costs it a millisecond."""
LEFT_S = 20.0
"""What a killed actor has left behind and has not ended by itself for so long is ended: else nobody measures again."""
NAME = re.compile(r"\w[\w.-]{0,63}")
"""A host's name is a folder's, too."""
THREADS = "OMP_NUM_THREADS"


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What a host says of itself when it joins."""

    host: str  # a name that identifies no person: from the machine's id and its host name
    attnbench: str
    python: str
    time_s: float  # by its clock
    niceness: int  # of its processes
    kind: str  # the model of its processor, its cores and the version of torch: what of it is known without torch
    held: dict[str, bool]  # the shares of the run whose journals it has, and whether they are finished


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """How a share ended on a host: its journal, or why there is none."""

    share: str
    journal: bytes = b""
    error: str = ""


class HowFar(msgspec.Struct, frozen=True, kw_only=True):
    """How far a host is with a share, as it says between two steps."""

    host: str
    share: str
    stage: str
    done: float
    total: float


class Receiver:
    """An actor next to the driver, to which hosts report how far they are: nobody asks them while they measure."""

    def __init__(self) -> None:
        """Nothing was received yet."""
        self.last: dict[str, bytes] = {}  # the last, by host

    def receive(self, host: str, said: bytes) -> None:
        """Take a HowFar."""
        self.last[host] = said

    def news(self) -> list[bytes]:
        """The last HowFar of each host since the time before."""
        found, self.last = list(self.last.values()), {}
        return found


class Host:
    """The actor of one host. It answers one call after the other."""

    def __init__(self, run: str, label: str) -> None:
        """Take the name of the run; `label` names the host where who started it gave it a name."""
        if not NAME.fullmatch(run):
            raise ValueError(f"{run!r} is not allowed as the name of a run: {NAME.pattern}")
        self.host = label or own_name()
        self.folder = folder_of_runs() / run / self.host

    def ready(self) -> str:
        """Its name, once it is there."""
        return self.host

    def known(self) -> bytes:
        """A Known."""
        held = {path.parent.name: _is_finished(path) for path in sorted(self.folder.glob(f"*/{JOURNAL}"))}
        return msgspec.json.encode(
            Known(
                host=self.host,
                attnbench=version("attnbench"),
                python=sys.version.split()[0],
                time_s=time.time(),
                niceness=os.nice(0),
                kind=own_kind(),
                held=held,
            )
        )

    def measure(self, asked: bytes, receiver: Any = None) -> bytes:  # noqa: ANN401 - a handle of an actor, if any
        """An Answer to a Share, whose journal is gone on with where there is one; `receiver` gets reports meanwhile."""
        share = msgspec.json.decode(asked, type=Share)
        if not NAME.fullmatch(share.name):
            return msgspec.json.encode(Answer(share="", error=f"{share.name!r} is no name of a share"))
        folder = self.folder / share.name
        try:
            if not _is_finished(folder / JOURNAL):
                with bench_slot():
                    if not _is_finished(folder / JOURNAL):  # an earlier actor of this host may have been at it
                        execute(placed(share, self.folder / "files"), folder, self._reporting(share, receiver))
            answer = Answer(share=share.name, journal=(folder / JOURNAL).read_bytes())
        except (ValueError, OSError) as error:
            answer = Answer(share=share.name, error=f"{type(error).__name__}: {error}")
        return msgspec.json.encode(answer)

    def _reporting(self, share: Share, receiver: Any) -> Watch:  # noqa: ANN401 - likewise
        """Reports to the receiver now and then, and waits for nothing."""
        said_s = -math.inf

        def report(progress: Progress) -> None:
            nonlocal said_s
            if receiver is None or time.monotonic() - said_s < REPORT_EVERY_S:
                return
            said_s = time.monotonic()
            far = HowFar(
                host=self.host, share=share.name, stage=progress.stage, done=progress.done, total=progress.total
            )
            receiver.receive.remote(self.host, msgspec.json.encode(far))

        return report


def own_name() -> str:
    """A name of this machine that gives away nothing of it; the same each time."""
    machine = ""
    with suppress(OSError):
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    return f"host-{hashlib.sha256(f'{machine}/{socket.gethostname()}'.encode()).hexdigest()[:6]}"


def own_kind() -> str:
    """What hosts have in common whose times may be put together; accelerators apart, of which Ray knows."""
    parts = [processor(), f"{psutil.cpu_count(logical=False) or 0} cores"]
    with suppress(PackageNotFoundError):
        parts.append(f"torch {version('torch')}")
    return ", ".join(parts)


def folder_of_runs() -> Path:
    """Where a host keeps the journals of its shares, one folder for each run; nobody removes them."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "attnbench" / "cluster"


@contextmanager
def bench_slot() -> Iterator[None]:
    """Within: nobody else measures on this machine; waits until that is so.

    It is of the machine, and not of a node of a cluster, of which there may be several on one machine. Who had it
    before may have been killed: what it had started ends within moments, and is waited for, or ended after `LEFT_S`.
    """
    threads = os.environ.get(THREADS)
    try:
        file = os.open(LOCK, os.O_RDONLY)  # another user's, too: to create what is there may be refused
    except FileNotFoundError:
        file = os.open(LOCK, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # whoever has waited is next, and not whoever asks most often
        began_s = time.monotonic()
        while left := [process for process in psutil.process_iter() if _has_slot(process)]:
            for process in left if time.monotonic() - began_s > LEFT_S else ():
                with suppress(psutil.Error):
                    process.kill()  # nobody who has not this lock measures: it is what a killed one has left
            time.sleep(POLL_S)
        os.environ[SLOT] = str(os.getpid())
        if THREADS not in _environment_of(os.getppid()):  # Ray sets it to the number of processors that it counts
            os.environ.pop(THREADS, None)
        yield
    finally:
        os.environ.pop(SLOT, None)
        if threads is not None:
            os.environ[THREADS] = threads
        os.close(file)


def _has_slot(process: psutil.Process) -> bool:
    """Whether a process was started by a share, which the caller has not begun yet."""
    return SLOT in _environment_of(process.pid)


def _environment_of(process: int) -> dict[str, str]:
    """What a process was started with; nothing where it is gone, or another user's."""
    try:
        return psutil.Process(process).environ()
    except (psutil.Error, OSError):
        return {}


def _is_finished(path: Path) -> bool:
    """Whether a journal is there and came to its end; one that is damaged is not."""
    last: events.Event | None = None
    with suppress(ValueError):
        for event in read_events(path):
            last = event
    return isinstance(last, events.RunFinished)
