"""Work on one host: reserve the machine, measure a share into a journal, and return the journal.

Independent of Ray. Messages are JSON bytes, and are read as data.
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
"""Set for all processes of a share, to find those that outlive the share."""
POLL_S = 0.5
LEFT_S = 20.0
"""Seconds until leftover processes of a killed share are ended: they would block every later measurement."""
NAME = re.compile(r"\w[\w.-]{0,63}")
"""A host's name is also a folder name."""
THREADS = "OMP_NUM_THREADS"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a share on a host: its journal, or an error."""

    host: str  # a name that identifies no person
    kind: str  # hosts of another kind have other times
    journal: bytes = b""
    error: str = ""
    is_refused: bool = False  # this host cannot measure shares
    niceness: int = 0  # of its processes


def measure(asked: bytes, label: str = "") -> bytes:
    """Measure a Share, continuing the journal if this host has begun one; return an Answer.

    `label` is the host's name, if the administrator set one.
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
        ValueError: the share is from another version, has a bad name, or cannot be measured.
        OSError: nothing can be written here.
    """
    if share.attnbench != (here := version("attnbench")):
        raise ValueError(f"it has attnbench {here}, and the driver {share.attnbench}")
    if not (NAME.fullmatch(share.run) and NAME.fullmatch(share.name)):
        raise ValueError(f"{share.run}/{share.name} is no name of a share")
    folder = folder_of_runs() / share.run / host / share.name
    if not is_finished(folder / JOURNAL):
        with bench_slot():
            if not is_finished(folder / JOURNAL):  # an earlier process of this host may have finished it
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
    """A stable name of this machine that reveals nothing about it."""
    machine = ""
    with suppress(OSError):
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    return f"host-{hashlib.sha256(f'{machine}/{socket.gethostname()}'.encode()).hexdigest()[:6]}"


def own_kind() -> str:
    """Processor model, cores and version of torch, found without importing torch; Ray reports accelerators."""
    parts = [processor(), f"{psutil.cpu_count(logical=False) or 0} cores"]
    with suppress(PackageNotFoundError):
        parts.append(f"torch {version('torch')}")
    return ", ".join(parts)


def folder_of_runs() -> Path:
    """The folder for journals of shares on a host, with one folder for each run; they are never removed."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "attnbench" / "cluster"


def is_finished(path: Path) -> bool:
    """Whether a journal exists and is complete; a damaged one is not."""
    last: events.Event | None = None
    with suppress(ValueError, OSError):
        for event in read_events(path):
            last = event
    return isinstance(last, events.RunFinished)


@contextmanager
def bench_slot() -> Iterator[None]:
    """Reserve the whole machine, not only a node: wait until no other process measures here.

    The previous holder may have been killed: its children end within moments, or are ended after `LEFT_S`.
    """
    threads = os.environ.get(THREADS)
    try:
        file = os.open(LOCK, os.O_RDONLY)  # it may belong to another user, who may forbid creating it again
    except FileNotFoundError:
        file = os.open(LOCK, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        began_s = time.monotonic()
        while left := [process for process in psutil.process_iter() if SLOT in _environment_of(process.pid)]:
            for process in left if time.monotonic() - began_s > LEFT_S else ():
                with suppress(psutil.Error):
                    process.kill()  # it measures without holding the lock, so its starter was killed
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
    """The initial environment of a process; empty if it is gone or belongs to another user."""
    try:
        return psutil.Process(process).environ()
    except (psutil.Error, OSError):
        return {}
