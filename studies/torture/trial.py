"""The result of one trial, and the folder in which the trial runs attnbench."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

TINY = [
    *("-i", "fused", "--set", "seq_len=16,32", "--set", "num_heads=2", "--set", "head_dim=8", "--set", "batch_size=1"),
    *("--set", "dtype=float32", "--set", "mask=none", "--set", "direction=inference", "--budget", "0", "--seed", "7"),
]
"""Options of a run that takes a few seconds."""
LIMIT_S = 120.0
LONGEST_NOTE = 160
ATTNBENCH = [sys.executable, "-P", "-m", "attnbench"]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One trial and its failures, in words: crashes, lost work, unclear messages."""

    subject: str
    what: str
    died: str = ""  # a traceback, a hang, an unexpected exit code
    lost: str = ""  # finished work that is gone, or a number that changed
    unclear: str = ""  # a message that lacks the input, the allowed values, or a fix
    skipped: str = ""  # why the trial could not be made here

    @property
    def is_good(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.died or self.lost or self.unclear)


class TrialFolder:
    """A folder for one trial, including one for temporary files."""

    def __init__(self, folder: Path) -> None:
        """Create `folder`, and in it a folder for temporary files."""
        self.folder, self.temporary = folder, folder / "temporary"
        self.temporary.mkdir(parents=True)

    def start(
        self, *arguments: str, limit: str = "", user: int | None = None, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start attnbench in this folder, as the first process of a new process session.

        `limit` is a `ulimit` command of the shell, and `user` the id of the user who runs it. `variables` are
        environment variables to set; one with the value "" is removed.
        """
        command = [*ATTNBENCH, *arguments]
        given = {"TMPDIR": str(self.temporary), "COLUMNS": "120", "OMP_NUM_THREADS": "1", **(variables or {})}
        environment = {name: value for name, value in (os.environ | given).items() if value or name not in given}
        return subprocess.Popen(  # noqa: S603 - our own command
            ["bash", "-c", f"{limit}; exec {shlex.join(command)}"] if limit else command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            user=user,
            group=user,
            start_new_session=True,
        )

    def run(self, *arguments: str, **more: str) -> tuple[int | None, str]:
        """Run attnbench with the environment variables `more`; return its exit code (None if it hung) and output."""
        return ended(self.start(*arguments, variables=more))

    def left(self) -> list[str]:
        """List remaining temporary files, except those that PyTorch's compiler keeps for other runs."""
        return sorted(file.name for file in self.temporary.iterdir() if not file.name.startswith("torchinductor"))


def ended(process: subprocess.Popen[bytes], limit_s: float = LIMIT_S) -> tuple[int | None, str]:
    """Wait for a process; return its exit code (None if it hung and was killed) and its output."""
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        return None, printed.decode(errors="replace")
    return process.returncode, printed.decode(errors="replace")


def wrong_end(code: int | None, printed: str, due: Sequence[int]) -> str:
    """Describe a hang, a traceback, or an exit code that is not in `due`; return "" if the end is right."""
    if code is None:
        return "it hung"
    if "Traceback (most recent call last)" in printed:
        return f"a traceback: {note(printed)}"
    return "" if code in due else f"exit code {code}: {note(printed)}"


def note(printed: str) -> str:
    """Return the last nonempty line of an output, cut to LONGEST_NOTE characters, or "nothing was printed"."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return lines[-1][:LONGEST_NOTE] if lines else "nothing was printed"


def wait_until(is_so: Callable[[], bool], limit_s: float = 10.0) -> bool:
    """Wait until a condition is true, for `limit_s` seconds at most; return whether it became true."""
    end_s = time.monotonic() + limit_s
    while not (found := is_so()) and time.monotonic() < end_s:
        time.sleep(0.05)
    return found
