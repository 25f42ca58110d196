"""Work on one host: it holds the machine for itself, measures a share into a journal there, and hands that back.

Nothing here knows of Ray. Messages are bytes of JSON, and are read as data.
"""

import fcntl
import hashlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

from attnbench.cluster.shares import Share, placed
from attnbench.devices import processor
from attnbench.processes.execution import execute
from attnbench.storage import events
from attnbench.storage.journal import JOURNAL
from attnbench.storage.journal import events as read_events

LOCK = Path("/tmp/attnbench-bench-slot")  # noqa: S108 - it holds nothing, and is the same whatever TMPDIR a job has
SLOT = "ATTNBENCH_BENCH_SLOT"
"""Set for all processes that a share starts, to find those that outlive the one that started them."""
POLL_S = 0.5
LEFT_S = 20.0
"""What a killed process has left behind is ended after this long: else no process could measure again."""
NAME = re.compile(r"\w[\w.-]{0,63}")
"""A host's name is a folder's, too."""
THREADS = "OMP_NUM_THREADS"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a share on a host: its journal, or why there is none."""

    host: str  # a name that identifies no person
    kind: str  # hosts of other kinds have other times
    journal: bytes = b""
    error: str = ""
    is_refused: bool = False  # this host can measure no share
    niceness: int = 0  # of its processes


def measure(asked: bytes, label: str = "") -> bytes:
    """Measure a Share, whose journal is continued if the host has begun one; returns an Answer.

    `label` is the host's name, if whoever started it chose one.
    """
    share = msgspec.json.decode(asked, type=Share)
    host = label if NAME.fullmatch(label) else own_name()
    answer = Answer(host=host, kind=own_kind(), niceness=os.nice(0))
    try:
        answer = msgspec.structs.replace(answer, journal=_journal(share, host))
    except (ValueError, OSError) as error:
        is_refused = share.attnbench != version("attnbench")
        answer = msgspec.structs.replace(answer, error=f"{type(error).__name__}: {error}", is_refused=is_refused)
    return msgspec.json.encode(answer)


def _journal(share: Share, host: str) -> bytes:
    """The journal of a share that this host has finished.

    Raises:
        ValueError: the share comes from another version, has no proper name, or cannot be measured.
        OSError: nothing can be written here.
    """
    if share.attnbench != (here := version("attnbench")):
        raise ValueError(f"it has attnbench {here}, and the driver {share.attnbench}")
    if not (NAME.fullmatch(share.run) and NAME.fullmatch(share.name)):
        raise ValueError(f"{share.run}/{share.name} is no name of a share")
    folder = folder_of_runs() / share.run / host / share.name
    if not is_finished(folder / JOURNAL):
        with bench_slot():
            if not is_finished(folder / JOURNAL):  # an earlier process of this host may have been at it
                execute(placed(share, folder.parent / "files"), folder, lambda _: None)
    return (folder / JOURNAL).read_bytes()


def examine() -> str:
    """The output of `attnbench doctor --json` on this host.

    Raises:
        ValueError: there is none.
    """
    with bench_slot():
        command = [sys.executable, "-P", "-m", "attnbench", "doctor", "--json"]
        ended = subprocess.run(command, capture_output=True, check=False, text=True)  # noqa: S603 - our own module
    if not ended.stdout:
        raise ValueError(" ".join(ended.stderr.strip().splitlines()[-1:]) or f"exit code {ended.returncode}")
    return ended.stdout


def own_name() -> str:
    """A name of this machine that gives away nothing of it; the same each time."""
    machine = ""
    with suppress(OSError):
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    return f"host-{hashlib.sha256(f'{machine}/{socket.gethostname()}'.encode()).hexdigest()[:6]}"


def own_kind() -> str:
    """Model of the processor, cores and version of torch, found without torch; of accelerators Ray knows."""
    parts = [processor(), f"{psutil.cpu_count(logical=False) or 0} cores"]
    with suppress(PackageNotFoundError):
        parts.append(f"torch {version('torch')}")
    return ", ".join(parts)


def folder_of_runs() -> Path:
    """Where a host keeps the journals of its shares, one folder for each run; nobody removes them."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "attnbench" / "cluster"


def is_finished(path: Path) -> bool:
    """Whether a journal is there and came to its end; one that is damaged is not."""
    last: events.Event | None = None
    with suppress(ValueError, OSError):
        for event in read_events(path):
            last = event
    return isinstance(last, events.RunFinished)


@contextmanager
def bench_slot() -> Iterator[None]:
    """Hold this machine, and not only a node of it: nothing else measures here meanwhile; waits until that is so.

    The process that held it before may have been killed: its children end within moments, or are ended after `LEFT_S`.
    """
    threads = os.environ.get(THREADS)
    try:
        file = os.open(LOCK, os.O_RDONLY)  # another user's, too: to create what is there may be refused
    except FileNotFoundError:
        file = os.open(LOCK, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        began_s = time.monotonic()
        while left := [process for process in psutil.process_iter() if SLOT in _environment_of(process.pid)]:
            for process in left if time.monotonic() - began_s > LEFT_S else ():
                with suppress(psutil.Error):
                    process.kill()  # without this lock nothing measures: a killed one has left it
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


def _environment_of(process: int) -> dict[str, str]:
    """The environment that a process was started with; empty if it is gone, or another user's."""
    try:
        return psutil.Process(process).environ()
    except (psutil.Error, OSError):
        return {}
