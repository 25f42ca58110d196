"""The coordinator's side of a worker: ask, wait, and say whose fault it was when no answer comes.

Knows nothing of torch. A worker that crashes or hangs costs the request that it was working on; whoever asks next
starts a fresh one.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol, Self

import msgspec

from attnbench.processes.messages import Envelope, Heartbeat, Reply, Request, Start, Started, Work
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


class WorkerClient(Protocol):
    """What a session asks its questions: a worker process, a pair of them, or a simulated one.

    Use it as a context manager, which stops the worker in the end.
    """

    @property
    def is_running(self) -> bool:
        """Whether a worker is there to be asked."""

    def start(self, layout: int = 0) -> Started:
        """Start a fresh worker in place of the one that is there, with another memory layout for each number.

        Raises:
            ValueError: it cannot start.
        """

    def ask(self, request: Work) -> Reply:
        """The worker's answer.

        Raises:
            WorkerLostError: the worker crashed, or one of its steps lasted longer than the timeout; it is gone now.
        """

    def stop(self) -> None:
        """End the worker, at once."""

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the worker and clean up."""
        self.stop()


class ProcessClient(WorkerClient):
    """A worker process (processes/worker), one at a time."""

    def __init__(
        self,
        log: Path,
        timeout_s: float,
        settings: Mapping[str, str] | None = None,
        *,
        python: str = "",
        folders: Sequence[Path] = (ROOT,),
    ) -> None:
        """Keep `log` for what the worker prints, and how long a step may last without a heartbeat.

        `settings` are variables that the worker's environment has in addition to ours, `python` is its interpreter
        where that is not ours, and `folders` are where it looks for modules first, our own among them.
        """
        self.log = log
        self.settings = settings or {}
        self.python, self.folders = python or sys.executable, folders
        self.timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: SimpleQueue[bytes] = SimpleQueue()
        self._decoder = msgspec.json.Decoder(Envelope)
        self._heartbeat = Heartbeat()

    @property
    def is_running(self) -> bool:
        """Whether a worker is there to be asked."""
        return self._process is not None

    def start(self, layout: int = 0) -> Started:
        """Start a fresh worker, with another memory layout for each number, and return where it runs.

        Source: Mytkowicz et al., Producing Wrong Data Without Doing Anything Obviously Wrong, 2009,
        https://doi.org/10.1145/1508244.1508275: the size of the environment alone shifts the stack, and times with it.

        Raises:
            ValueError: it cannot start; the message quotes the last line that it printed.
        """
        self.stop()
        # -P and our own root first: a folder called attnbench in the current folder must not take our place
        command = [self.python, "-P", "-m", "attnbench.processes.worker", str(self._heartbeat.path)]
        path = os.pathsep.join(filter(None, [*map(str, self.folders), os.environ.get("PYTHONPATH")]))
        shift = random.Random(layout).randrange(4096)
        environment = {**os.environ, **self.settings, "PYTHONPATH": path, "ATTNBENCH_LAYOUT": "x" * shift}
        pipe = subprocess.PIPE
        with self.log.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - our own module, by this interpreter
                command, env=environment, stdin=pipe, stdout=pipe, stderr=log
            )
        self._process, self._answers = process, SimpleQueue()
        answers = self._answers

        def listen() -> None:
            assert process.stdout is not None
            with contextlib.suppress(ValueError):  # closed by stop
                for line in process.stdout:
                    answers.put(line)
            answers.put(b"")

        threading.Thread(target=listen, daemon=True).start()
        try:
            started = self._exchange(Start(layout=layout), START_TIMEOUT_S)
        except WorkerLostError as lost:
            printed = self.log.read_text(errors="replace").strip().splitlines()
            last = printed[-1] if printed else "it printed nothing"
            raise ValueError(f"the worker process cannot start ({lost}): {last}") from None
        assert isinstance(started, Started)
        return started

    def ask(self, request: Work) -> Reply:
        """The worker's answer; WorkerLostError where there is none."""
        return self._exchange(request, self.timeout_s)

    def _exchange(self, request: Request, timeout_s: float) -> Reply:
        assert self._process is not None
        assert self._process.stdin is not None
        self._heartbeat.beat(Heartbeat.HARNESS)
        with contextlib.suppress(BrokenPipeError):  # a dead worker is noticed below
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
        line = self._next_line(timeout_s)
        if line:
            answer = self._decoder.decode(line)
            if answer.ends:
                self.stop()
            return answer.reply
        code = self._process.wait()
        _, arm = self._heartbeat.read()
        self.stop()
        how = f"exited with code {code}"
        if code < 0:
            name = signal.Signals(-code).name
            how = f"was killed by {name}{', perhaps by the system because memory ran out' * (name == 'SIGKILL')}"
        raise WorkerLostError(Status.crashed, arm, f"the process {how}")

    def _next_line(self, timeout_s: float) -> bytes:
        """The next line from the worker, b"" once it has ended; a step without progress for too long ends it."""
        step, waited_s = self._heartbeat.read()[0], 0.0
        while True:
            try:
                return self._answers.get(timeout=POLL_S)
            except Empty:
                waited_s += POLL_S
            count, arm = self._heartbeat.read()
            if count != step:
                step, waited_s = count, 0.0
            elif waited_s >= timeout_s:
                self.stop()
                raise WorkerLostError(Status.timeout, arm, f"no end in sight after {timeout_s:g} s: killed") from None

    def stop(self) -> None:
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

    def __exit__(self, *_: object) -> None:
        """Stop the worker and let go of the heartbeat."""
        self.stop()
        self._heartbeat.close()
