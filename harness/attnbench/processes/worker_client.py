"""The parent's end of the line to a worker process: ask, wait, and say whose fault it was when no answer comes.

Knows nothing of torch. A worker that crashes or hangs costs the request in flight; the next request starts a fresh one.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Self

import msgspec

from attnbench.processes.heartbeat import HARNESS, Flight
from attnbench.processes.messages import Checked, Failed, Hello, Ready, Reply, Request
from attnbench.storage.records import Status

START_TIMEOUT_S = 120.0
POLL_S = 1.0
ROOT = Path(__file__).parents[2]


class WorkerLostError(Exception):
    """The worker ended or was ended without an answer, while it tried the arm with this index."""

    def __init__(self, status: Status, arm: int, message: str) -> None:
        """Keep all three."""
        super().__init__(message)
        self.status = status
        self.arm = arm


class Crew:
    """One worker at a time, started when it is needed. Use it as a context manager."""

    def __init__(
        self,
        log: Path,
        timeout_s: float,
        settings: Mapping[str, str] | None = None,
        *,
        python: str = "",
        folders: Sequence[Path] = (ROOT,),
    ) -> None:
        """Keep `log` for what the worker prints, and how long a step may last without a sign of life.

        `settings` are variables of the worker's environment beside our own, `python` its interpreter where it is not
        ours, and `folders` where it looks for modules first, our own among them.
        """
        self.log = log
        self.settings = settings or {}
        self.python, self.folders = python or sys.executable, folders
        self.timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: SimpleQueue[bytes] = SimpleQueue()
        self._decoder = msgspec.json.Decoder(Reply)
        handle, name = tempfile.mkstemp(prefix="attnbench-flight-")
        os.close(handle)
        self._flight_path = Path(name)
        self._flight = Flight(self._flight_path)

    def hello(self, layout: int = 0) -> Ready:
        """Start a fresh worker, with another memory layout for each number, and hear where it runs.

        Source: Mytkowicz et al., Producing Wrong Data Without Doing Anything Obviously Wrong, 2009,
        https://doi.org/10.1145/1508244.1508275: the size of the environment alone shifts the stack, and times with it.

        Raises:
            ValueError: it cannot start; the message quotes the last line that it printed.
        """
        self.dismiss()
        # -P and our own root first: a folder called harness where the user stands must not take our place
        command = [self.python, "-P", "-m", "attnbench.processes.worker", str(self._flight_path)]
        path = os.pathsep.join(filter(None, [*map(str, self.folders), os.environ.get("PYTHONPATH")]))
        shift = random.Random(layout).randrange(4096)
        environment = {**os.environ, **self.settings, "PYTHONPATH": path, "ATTNBENCH_LAYOUT": "x" * shift}
        pipe = subprocess.PIPE
        with self.log.open("ab") as log:
            process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=log)  # noqa: S603 - our own module, by this interpreter
        self._process, self._answers = process, SimpleQueue()
        threading.Thread(target=_listen, args=(process, self._answers), daemon=True).start()
        try:
            ready = self.ask(Hello(layout=layout), START_TIMEOUT_S)
        except WorkerLostError as lost:
            printed = self.log.read_text(errors="replace").strip().splitlines()
            last = printed[-1] if printed else "it printed nothing"
            raise ValueError(f"the worker process cannot start ({lost}): {last}") from None
        assert isinstance(ready, Ready)
        return ready

    def ask(self, request: Request, timeout_s: float | None = None) -> Reply:
        """The answer to a request.

        Raises:
            WorkerLostError: the worker crashed, or one of its steps lasted longer than the timeout; it is gone now.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        self._flight.take_off(HARNESS)
        with contextlib.suppress(BrokenPipeError):  # a dead worker is noticed below
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
        line = self._wait(timeout_s or self.timeout_s)
        if line:
            reply: Reply = self._decoder.decode(line)
            if isinstance(reply, Checked | Failed) and reply.ends:
                self.dismiss()
            return reply
        code = self._process.wait()
        _, arm = self._flight.position()
        self.dismiss()
        raise WorkerLostError(Status.crashed, arm, f"the process {_how_it_ended(code)}")

    def _wait(self, timeout_s: float) -> bytes:
        """The next line from the worker, b"" once it has ended; a step without progress for too long ends it."""
        step, waited_s = self._flight.position()[0], 0.0
        while True:
            try:
                return self._answers.get(timeout=POLL_S)
            except Empty:
                waited_s += POLL_S
            count, arm = self._flight.position()
            if count != step:
                step, waited_s = count, 0.0
            elif waited_s >= timeout_s:
                self.dismiss()
                raise WorkerLostError(Status.timeout, arm, f"no end in sight after {timeout_s:g} s: killed") from None

    @property
    def is_at_work(self) -> bool:
        """Whether a worker is there to be asked."""
        return self._process is not None

    def dismiss(self) -> None:
        """End the worker, at once."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process = None

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the worker and clean up."""
        self.dismiss()
        self._flight.close()
        self._flight_path.unlink(missing_ok=True)


def _listen(process: subprocess.Popen[bytes], answers: SimpleQueue[bytes]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # closed by dismiss
        for line in process.stdout:
            answers.put(line)
    answers.put(b"")


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name
    hint = ", perhaps by the system for want of memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
