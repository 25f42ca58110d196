"""Work on one host: reserve the machine, measure a share into a journal, and return the journal.

This module does not use Ray. A plan arrives as JSON and is read as data.
"""

import fcntl
import hashlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from attnbench.processes.execution import execute
from attnbench.storage.events import Plan
from attnbench.storage.journal import JOURNAL

LOCK = Path("/tmp/attnbench-bench-slot")  # noqa: S108 - an empty file, at the same path whatever TMPDIR a job has
NAME = re.compile(r"\w[\w.-]{0,63}")  # valid names of hosts, which also name folders
HOST = "ATTNBENCH_HOST"  # environment variable with the name of a host
THREADS = "OMP_NUM_THREADS"  # unset while measuring: Ray sets it to a task's CPU count, but the plan sets threads


def measure(share: bytes, attnbench: str, folder: str) -> tuple[str, bytes]:
    """Execute a whole plan, given as JSON, on this host; return the host's name and the journal.

    `attnbench` is the driver's version of attnbench, and `folder` is the driver's working folder: this host must have
    the plan's files there.

    Raises:
        ValueError: the driver has another version of attnbench, or the share cannot be measured.
        OSError: nothing can be written here.
    """
    host = own_name()
    if attnbench != (here := version("attnbench")):
        raise ValueError(f"{host} has attnbench {here}, and the driver {attnbench}: install the same version on both")
    there = chdir(folder) if Path(folder).is_dir() else nullcontext()
    with bench_slot(), there, TemporaryDirectory(prefix="attnbench-share-") as run:
        execute(msgspec.json.decode(share, type=Plan), Path(run), lambda _: None)
        return host, (Path(run) / JOURNAL).read_bytes()


def examine() -> str:
    """Return the output of `attnbench doctor --json` on this host.

    Raises:
        ValueError: the command printed no output; the message is the last line of its errors.
    """
    with bench_slot():
        command = [sys.executable, "-P", "-m", "attnbench", "doctor", "--json"]
        ended = subprocess.run(command, capture_output=True, check=False, text=True)  # noqa: S603 - our own module
    if not ended.stdout:
        raise ValueError(" ".join(ended.stderr.splitlines()[-1:]) or f"exit code {ended.returncode}")
    return ended.stdout


def own_name() -> str:
    """Return the name of this host: ATTNBENCH_HOST, or else a stable name that reveals nothing about the machine."""
    name = os.environ.get(HOST, "")
    if NAME.fullmatch(name):
        return name
    machine = socket.gethostname()
    with suppress(OSError):
        machine += Path("/etc/machine-id").read_text(encoding="ascii")
    return f"host-{hashlib.sha256(machine.encode()).hexdigest()[:6]}"


@contextmanager
def bench_slot() -> Iterator[None]:
    """Reserve the whole machine: wait until no other process measures here. THREADS is unset inside the context."""
    try:
        file = os.open(LOCK, os.O_RDONLY)  # without O_CREAT, which can fail if the file belongs to another user
    except FileNotFoundError:
        file = os.open(LOCK, os.O_RDONLY | os.O_CREAT, 0o644)
    threads = os.environ.pop(THREADS, None)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
        if threads is not None:
            os.environ[THREADS] = threads
