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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import psutil

from attnbench.cluster.shares import Share
from attnbench.processes.execution import execute
from attnbench.storage.journal import JOURNAL

LOCK = Path("/tmp/attnbench-bench-slot")  # noqa: S108 - it holds nothing, and is the same whatever TMPDIR a job has
SLOT = "ATTNBENCH_BENCH_SLOT"
"""Set for all processes of a share, to find those that outlive it."""
ENDED_S = 20.0
NAME = re.compile(r"\w[\w.-]{0,63}")
"""A host's name is also a folder name."""
HOST = "ATTNBENCH_HOST"
"""Environment variable with the name of a host."""
THREADS = "OMP_NUM_THREADS"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The journal of a share, and the host that measured it."""

    host: str  # a name that identifies no person
    journal: bytes


def measure(message: bytes) -> bytes:
    """Measure a Share from its beginning; return an Answer.

    Raises:
        ValueError: the share is from another version, or cannot be measured.
        OSError: nothing can be written here.
    """
    share, host = msgspec.json.decode(message, type=Share), own_name()
    if share.attnbench != (here := version("attnbench")):
        raise ValueError(f"{host} has attnbench {here}, and the driver {share.attnbench}")
    with bench_slot(), TemporaryDirectory(prefix="attnbench-share-") as folder:
        execute(share.plan, Path(folder), lambda _: None)
        return msgspec.json.encode(Answer(host=host, journal=(Path(folder) / JOURNAL).read_bytes()))


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
    """The name of this host that its environment sets, or a stable one that reveals nothing about the machine."""
    name = os.environ.get(HOST, "")
    if NAME.fullmatch(name):
        return name
    machine = socket.gethostname()
    with suppress(OSError):
        machine += Path("/etc/machine-id").read_text(encoding="ascii")
    return f"host-{hashlib.sha256(machine.encode()).hexdigest()[:6]}"


@contextmanager
def bench_slot() -> Iterator[None]:
    """Reserve the whole machine, not only a node: wait until no other process measures here.

    The previous holder may have been killed: its children, which still measure without holding the lock, are ended.
    """
    threads = os.environ.get(THREADS)
    try:
        file = os.open(LOCK, os.O_RDONLY)  # it may belong to another user, who may forbid creating it again
    except FileNotFoundError:
        file = os.open(LOCK, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        orphans = [process for process in psutil.process_iter() if SLOT in _environment_of(process.pid)]
        for process in orphans:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(orphans, timeout=ENDED_S)
        os.environ[SLOT] = str(os.getpid())
        if THREADS not in _environment_of(os.getppid()):  # Ray sets it to the number of processors of the task
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
