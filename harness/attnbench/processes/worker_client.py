"""The coordinator's end of its connections to workers: send requests, wait, and attribute failures to an arm.

This module does not import torch. If a worker crashes or hangs, only its current request fails; the next request starts
a fresh worker. An arm is an implementation, on one side if two states of the code are compared.
"""

import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, Protocol, Self

import msgspec
import psutil

from attnbench.processes import messages
from attnbench.processes.messages import Failed, Reply, Request, Started, T
from attnbench.storage.records import PROBE, Status
from attnbench.units import sanitize_line

START_TIMEOUT_S = 120.0  # time limit of a start, in seconds
POLL_S = 1.0  # seconds between two looks at the heartbeat
CHUNK = 2**20  # most bytes to read at once
ENDING_S, WATCH_S = 1.0, 0.01
"""Seconds to wait for the end of a process that has closed its socket, and seconds between two looks at it."""
CLOSING_S = 10.0  # seconds to wait for the end of a template after its socket was closed
LONGEST_ANSWER = 2**27  # bytes
MOST_STEPS = 20  # a request may last this many timeouts for each of its arms
JUDGED = ("check", "judge_output")  # functions that the judge executes
COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Environment variable for the number of Inductor's compiling processes. Workers use one, unless the user sets another
number: several would run during timed calls."""
LONGEST_LOG, KEPT_LOG = 2**26, 2**20
"""A log of more than LONGEST_LOG bytes is cut to its first KEPT_LOG bytes."""
NUM_STARTS = 2  # attempts to start a process
LONGEST_LINE = 300  # most characters that a message quotes from the last output of a process
ROOT = Path(__file__).parents[2]
PACKAGE = "attnbench"
"""Name of this package. Workers import it from this harness even if a compared state of the code contains it, too."""


def module_path(*folders: Path) -> str:
    """Return the PYTHONPATH of a process that searches `folders` first, and then the PYTHONPATH of this process."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))


def harness_folder(folder: Path) -> Path:
    """Create a link to this package in `folder`, for use in a search path; return the folder's full path.

    The folder in which this package is installed is not used, because it may contain other packages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / PACKAGE
    link.unlink(missing_ok=True)  # a killed run may have linked another one
    link.symlink_to(ROOT / PACKAGE, target_is_directory=True)
    return folder.resolve()


class WorkerClient(Protocol):
    """A session's interface to one worker, to several, or to a simulated one. Leaving its context stops all workers."""

    @property
    def is_running(self) -> bool:
        """Whether a worker is running."""

    def start(self, layout: int = 0) -> Started:
        """Start a fresh worker in place of the current one; return its environment. `layout` seeds its memory layout.

        Raises:
            ValueError: the worker cannot start.
        """

    def ask(self, function: str, result: type[T], /, **arguments: Any) -> T | Failed:  # noqa: ANN401 - their types depend on the function
        """Call a function of the worker; return the result as type `result`.

        If the worker crashes, or one of its steps exceeds the timeout, the worker is ended, and the reply is Failed
        with the arm that was running.
        """

    def stop(self) -> object:
        """Stop the worker at once."""

    def abandon(self) -> None:
        """Make the request in progress fail, and start no more processes; another thread may call this."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Template:
    """The process that forks or spawns workers (processes/worker/__main__.py); it starts at the first request.

    `settings` are additional environment variables, `python` is the path of another interpreter, and `home` is the
    folder that contains this package. `folders` are searched for modules before installed packages. The template and
    its workers print into `log`.
    """

    def __init__(
        self,
        log: Path,
        settings: Mapping[str, str] | None = None,
        *,
        python: str = "",
        home: Path = ROOT,
        folders: Sequence[Path] = (),
    ) -> None:
        self.log, self.folders, self.python = log, tuple(folders), python or sys.executable
        path = {"PYTHONPATH": module_path(home), messages.FOLDERS: os.pathsep.join(map(str, folders))}
        self.environment = {COMPILERS: "1", **os.environ, **(settings or {}), **path}
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._files: tempfile.TemporaryDirectory[str] | None = None
        self._has_forked = False
        self.is_over = threading.Event()  # set after an interruption: no more processes are started
        self.judge: ProcessClient | None = None  # started at the first check

    def fork(self, line: socket.socket, heartbeat: int) -> int:
        """Start a worker that listens to the socket `line`; return its process id. `heartbeat` is a file descriptor.

        Raises:
            OSError: the template cannot start, has ended, or was interrupted.
        """
        if self.is_over.is_set():
            raise InterruptedError("interrupted")
        if self._process is None or self._process.poll() is not None:
            self.start()
        self._has_forked = True
        with self.log.open("ab") as log:
            return self._ask(messages.FORK, [line.fileno(), log.fileno(), heartbeat])

    def end(self, worker: int) -> int:
        """End a worker and all its descendants; return its exit code, or minus the number of the signal that ended it.

        Raises:
            OSError: the template has ended, so the exit code is unknown; the worker is killed nevertheless.
        """
        try:
            return self._ask(worker)
        except OSError:
            for kill in (os.killpg, os.kill):  # a freshly forked worker has no process group of its own yet
                with suppress(ProcessLookupError):
                    kill(worker, signal.SIGKILL)
            raise

    def forget_code(self) -> None:
        """Make the judge forget results about earlier code, because the code under test has changed.

        Processes may start again, even if an earlier check was abandoned, for example after an error in one of two
        parallel lanes of checks.
        """
        self.is_over.clear()
        if self.judge is not None and self.judge.is_running:
            self.judge.ask("forget_code", NoneType)

    def close(self) -> None:
        """End the template and all its workers."""
        judge, self.judge = self.judge, None
        if judge is not None:
            judge.close()
        self._end()

    def _end(self) -> None:
        """End the template's process and all its workers; a worker's client notices this at its next request."""
        if self._process is None:
            return
        assert self._line is not None
        self._line.close()
        self._line = None
        if not self._has_forked:  # it may still be importing
            self._process.kill()
        try:
            self._process.wait(CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        if self._files is not None:
            self._files.cleanup()
            self._files = None

    def start(self) -> None:
        """Start the template's process without waiting until it is ready; `fork` calls this if necessary.

        Raises:
            OSError: the process cannot start.
        """
        self._end()
        if messages.spawns():
            self._files = tempfile.TemporaryDirectory(prefix="attnbench-tensors-")
            self.environment[messages.FILES] = self._files.name
        # -P, and our own root first, so that a folder attnbench in the working folder does not replace this package
        self._line, theirs = socket.socketpair()
        with self.log.open("ab") as log, theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, by this interpreter
                [self.python, "-P", "-m", "attnbench.processes.worker", str(theirs.fileno())],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
            )
        self._line.settimeout(START_TIMEOUT_S)

    def log_size(self) -> int:
        """Return the size of the log in bytes, after cutting it if it is too long; 0 if there is no log."""
        with suppress(OSError):
            size = os.stat(self.log).st_size  # noqa: PTH116 - called for every message, and much faster than Path.stat
            if size > LONGEST_LOG:
                os.truncate(self.log, KEPT_LOG)
            return KEPT_LOG if size > LONGEST_LOG else size
        return 0

    def printed_since(self, start: int) -> str:
        """Return the last non-empty line in the log after its first `start` bytes; "" if there is none."""
        with suppress(OSError), self.log.open("rb") as log:
            log.seek(max(start, self.log_size() - LONGEST_LINE))
            lines = [sanitize_line(line, LONGEST_LINE) for line in log.read().decode(errors="replace").splitlines()]
            return next((line for line in reversed(lines) if line), "")
        return ""

    def _ask(self, number: int, files: Sequence[int] = ()) -> int:
        """Send a request to the template, and return the reply.

        After a failure the template is ended, because a late reply would be taken for the reply to the next request.
        """
        if self._line is None:
            raise ConnectionResetError("it was closed")
        try:
            socket.send_fds(self._line, [messages.NUMBER.pack(number)], files)
            answer = self._line.recv(messages.NUMBER.size, socket.MSG_WAITALL)
            if len(answer) < messages.NUMBER.size:
                raise ConnectionResetError("it ended")
        except OSError:  # the template may have been killed, although its process still seems to run
            self._end()
            raise
        return int(messages.NUMBER.unpack(answer)[0])


class ProcessClient(WorkerClient):
    """The client of one process, which loads implementations and handles one request at a time.

    `start` replaces the process. Checks go through the template's judge: a process that loads no implementation,
    computes the right answers and compares. `timeout_s` limits the seconds between two heartbeats. Leaving the client's
    context stops the process and, if the client owns its template, the template, too.
    """

    def __init__(self, template: Template, timeout_s: float, *, owns_template: bool = True) -> None:
        self.template, self.timeout_s, self.owns_template = template, timeout_s, owns_template
        self.is_spent = False  # the process must be replaced: its device has failed, or shared state was changed
        self._heartbeat = messages.Heartbeat()
        self._line: socket.socket | None = None
        self._arrivals = select.poll()  # of the line
        self._log_start = 0
        self._worker = 0  # its process id

    def sibling(self) -> "ProcessClient":
        """Create a client of another process from the same template (the process that starts workers).

        The new client does not own the template. The client that owns it must exit last, because its exit stops it.
        """
        return ProcessClient(self.template, self.timeout_s, owns_template=False)

    @property
    def process_id(self) -> int:
        """The id of the process; 0 if none is running."""
        return self._worker if self.is_running else 0

    @property
    def is_running(self) -> bool:
        """Whether the process is running."""
        return self._line is not None

    @property
    def processor_s(self) -> float:
        """CPU seconds that the process and its descendants have used; 0 if the process has ended."""
        total_s = 0.0
        with suppress(psutil.Error):
            for each in (process := psutil.Process(self.process_id), *process.children(recursive=True)):
                total_s += sum(each.cpu_times()[:2])
        return total_s

    def start(self, layout: int = 0) -> Started:
        """Start a fresh process, whose memory layout depends on the seed `layout`, and return its environment.

        A process that ends during its start is started once more. Source of different layouts: Mytkowicz et al.,
        Producing Wrong Data Without Doing Anything Obviously Wrong, 2009, https://doi.org/10.1145/1508244.1508275.

        Raises:
            ValueError: the process cannot start; the message quotes the last line that it printed.
        """
        for _ in range(NUM_STARTS):
            self.stop()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    self._worker = self.template.fork(theirs, self._heartbeat.file)
                except OSError as error:
                    ours.close()
                    reply: Started | Failed | Request = Failed(status=Status.crashed, message=f"its template: {error}")
                    continue
            self._line, self._arrivals = ours, select.poll()
            self._arrivals.register(ours, select.POLLIN)
            reply = self.exchange(messages.request("start", {"layout": layout}), Started, START_TIMEOUT_S)
            if isinstance(reply, Started):
                return reply
        assert isinstance(reply, Failed)
        last = self.template.printed_since(0) or "it printed nothing"
        raise ValueError(f"the worker process cannot start ({reply.message}): {last}")

    def ask(self, function: str, result: type[T], /, **arguments: Any) -> T | Failed:  # noqa: ANN401 - their types depend on the function
        """Call a function; start the process first if necessary. Functions in JUDGED go to the template's judge."""
        if not self.is_running:
            self.start()
        request = messages.request(function, arguments)
        visit = arguments.get("visit")
        num_steps = MOST_STEPS * (1 if visit is None else len(visit.arms))
        reply = (
            self._judged(request, result) if function in JUDGED else self.exchange(request, result, num_steps=num_steps)
        )
        if self.is_spent:
            self.stop()
        assert not isinstance(reply, Request)
        return reply

    def _judged(self, request: Request, result: type[T]) -> T | Failed | Request:
        """Send a request to the judge; return its reply. The judge's own requests go to this client's process."""
        judge = self.template.judge = self.template.judge or self.sibling()
        if not judge.is_running:
            judge.start()
        reply = judge.exchange(request, result, may_ask=True)
        while isinstance(reply, Request):
            answer = self.exchange(reply, messages.CONSULTED[reply.function], num_steps=MOST_STEPS)
            reply = judge.exchange(messages.reply(answer), result, may_ask=True)
        if judge.is_spent:  # for example if the judge's own device has failed
            judge.stop()
        if isinstance(reply, Failed) and not judge.is_running:
            return msgspec.structs.replace(reply, message=f"while the harness checked: {reply.message}")
        return reply

    def exchange(
        self,
        message: Request | Reply,
        result: type[T],
        timeout_s: float = 0.0,
        *,
        may_ask: bool = False,
        num_steps: float = math.inf,
    ) -> T | Failed | Request:
        """Send a message to this process; return the reply, or Failed if it ends, sends no valid reply or is too slow.

        Too slow means `timeout_s` seconds without a heartbeat (0: the client's own `timeout_s`), or `num_steps` times
        that in all. If `may_ask` is set, the process may send a request of its own instead of a reply.
        """
        timeout_s = timeout_s or self.timeout_s
        if self._line is None:
            return Failed(status=Status.crashed, message="the process has ended", is_lost=True)
        self._heartbeat.beat(messages.Heartbeat.HARNESS)
        self._log_start = self.template.log_size()
        try:
            self._line.settimeout(timeout_s)
            self._send(message)
            kind = Reply | Request if may_ask else Reply
            reply = msgspec.json.decode(self._read_line(timeout_s, num_steps), type=kind)
            value: T | Failed | Request = reply if isinstance(reply, Request) else reply.value(result)
        except TimeoutError:
            return self._lost(message, Status.timeout, f"no end in sight after {timeout_s:g} s: killed")
        except msgspec.DecodeError:
            return self._lost(message, Status.crashed, "the process wrote no valid answer")
        except OSError:
            return self._lost(message, Status.crashed, "")
        self.is_spent |= isinstance(reply, Reply) and reply.ends
        return value

    def _send(self, message: Request | Reply) -> None:
        assert self._line is not None
        if self._arrivals.poll(0) and self._line.recv(1, socket.MSG_PEEK):
            raise msgspec.DecodeError("the process sent an answer before its request")
        self._line.sendall(messages.line(message))

    def _read_line(self, timeout_s: float, num_steps: float) -> bytearray:
        """Read one line, which is a complete reply, because the worker handles one request at a time.

        A process could announce steps forever, so the whole time is limited to `num_steps` timeouts.
        """
        assert self._line is not None
        until_s = time.monotonic() + num_steps * timeout_s
        step, waited_s, text = self._heartbeat.read()[0], 0.0, bytearray()
        while not text.endswith(b"\n"):
            if ready := self._arrivals.poll(POLL_S * 1000):
                if not (part := self._line.recv(CHUNK)):
                    raise ConnectionResetError("the line was closed")
                text += part
                if len(text) > LONGEST_ANSWER:
                    raise msgspec.DecodeError("the answer is too long")
            elif self.template.is_over.is_set() or self._has_ended():
                raise ConnectionResetError("the process ended, or was interrupted")
            else:
                self.template.log_size()  # cuts the log if it is too long
            count, _ = self._heartbeat.read()
            waited_s = waited_s + POLL_S if not ready and count == step else 0.0
            step = count
            if waited_s >= timeout_s or time.monotonic() > until_s:
                raise TimeoutError
        return text

    def _lost(self, sent: Request | Reply, status: Status, message: str) -> Failed:
        """End the worker; return the failure of its current arm, with `message` or, if that is empty, how it ended."""
        _, index = self._heartbeat.read()
        ended_itself = self._has_ended(ENDING_S)
        code = self.stop()
        if not message and (not ended_itself or code is None):
            message = "the process closed its line, or ended together with its template"
        elif not message and code is not None and code < 0:
            name = signal.Signals(-code).name
            why = ", perhaps by the system because memory ran out" * (name == "SIGKILL")
            message = f"the process was killed by {name}{why}"
        elif not message:
            printed = self.template.printed_since(self._log_start)
            message = f"the process exited with code {code}" + f": {printed}" * bool(printed)
        visit = sent.arguments.get("visit") if isinstance(sent, Request) else None
        arms = () if visit is None else msgspec.json.decode(visit, type=messages.SampleBlocks).arms
        return Failed(
            arm=arms[index][0] if index < len(arms) else PROBE,
            status=status,
            message=f"{message} while it was loaded" if index == messages.Heartbeat.LOADING else message,
            is_lost=status is Status.crashed,
            is_unloadable=index == messages.Heartbeat.LOADING,
        )

    def _has_ended(self, within_s: float = 0.0) -> bool:
        """Return whether the process has ended, or ends within `within_s` seconds; its children do not count."""
        until_s = time.monotonic() + within_s
        while True:
            try:
                if psutil.Process(self._worker).status() == psutil.STATUS_ZOMBIE:
                    return True
            except psutil.NoSuchProcess:
                return True
            if time.monotonic() >= until_s:
                return False
            time.sleep(WATCH_S)

    def abandon(self) -> None:
        """Make the request in progress fail, and start no more processes."""
        self.template.is_over.set()

    def stop(self) -> int | None:
        """Stop the worker and all its descendants at once; return its exit code, if known."""
        if self._line is None:
            return None
        self._line.close()
        self._line, self.is_spent = None, False
        with suppress(OSError):
            return self.template.end(self._worker)
        return None

    def close(self) -> None:
        """Stop the process, and release the heartbeat; the template keeps running."""
        self.stop()
        self._heartbeat.close()

    def __exit__(self, *_: object) -> None:
        self.close()
        if self.owns_template:
            self.template.close()
