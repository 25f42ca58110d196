"""The template: a process that has imported torch and computed nothing, from which every worker is forked.

processes/worker_client.py starts it as `python -m attnbench.processes.worker FD`, where FD is a socket. A fork takes a
tenth of a second, while starting Python with torch takes seconds. Where workers cannot be forked, the template starts
each worker as a new process with two arguments: the file descriptors of the worker's socket and heartbeat. The template
imports the modules in PRELOADED but never an implementation, so that every worker starts clean. When a worker ends,
processes that it has detached end, too.
"""

import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import get_type_hints

import msgspec
import psutil
import torch.fx.experimental.symbolic_shapes  # noqa: F401 - at the first gradient torch imports it, for half a second

from attnbench.devices import device, names
from attnbench.devices.cpu import limit_memory
from attnbench.processes import messages
from attnbench.processes.messages import FOLDERS, FORK, NUMBER, PRELOADED, Reply, Request, T
from attnbench.processes.worker.answers import Worker

OOM_SCORE = Path("/proc/self/oom_score_adj")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def main() -> None:
    """Serve the socket until it closes: for each FORK, fork a worker; for each process id, end the worker with that id.

    FORK comes with three file descriptors: those of the worker's socket, log and heartbeat. The reply to FORK is the
    worker's process id. The reply to an id is the worker's exit code, or minus the number of the signal that ended it.
    """
    line = socket.socket(fileno=int(sys.argv[1]))
    line.set_inheritable(False)  # so that no worker keeps the socket open
    if not messages.spawns():
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for name in filter(None, os.environ.get(PRELOADED, "").split(",")):
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that garbage collection in a worker does not copy the template's memory pages
    alive: set[int] = set()
    with suppress(ConnectionError):  # reset if the coordinator was killed before it had read a reply
        serve(line, alive)
    for worker in alive:
        end(worker)
    end_strays(set())


def serve(line: socket.socket, alive: set[int]) -> None:
    """Fork and end workers on request until the socket closes; `alive` are the process ids of running workers.

    Raises:
        ConnectionError: the socket was reset.
    """
    while True:
        message, files, *_ = socket.recv_fds(line, NUMBER.size, 3)
        if len(message) < NUMBER.size:  # the coordinator is gone
            break
        (number,) = NUMBER.unpack(message)
        if number == FORK:
            child = spawn(*files) if messages.spawns() else os.fork()
            if not child:
                line.close()
                with suppress(BaseException):
                    become_worker(*files)
                os._exit(1)  # after any exception, since only the template may continue the loop
            for file in files:
                os.close(file)
            alive.add(child)
            line.sendall(NUMBER.pack(child))
        else:
            is_ours = number in alive  # otherwise the worker belonged to an earlier template, and ended with that
            alive.discard(number)
            code, ended = end(number) if is_ours else (-signal.SIGKILL, set[int]())
            end_strays(alive, ended)
            line.sendall(NUMBER.pack(code))


def end(worker: int) -> tuple[int, set[int]]:
    """Kill a worker and its descendants, and remove its files; return its exit code and the descendants' process ids.

    If a signal ended the worker, the exit code is minus the number of the signal.
    """
    strays = psutil.Process(worker).children(recursive=True)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)  # a freshly started worker has no process group of its own yet
    for stray in strays:
        with suppress(psutil.Error):
            stray.kill()
    if folder := os.environ.get(messages.FILES):
        for file in Path(folder).glob(f"{worker}-*"):
            file.unlink(missing_ok=True)
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), {stray.pid for stray in strays}


def end_strays(alive: set[int], ended: AbstractSet[int] = frozenset()) -> None:
    """Kill processes that outlived their worker and are now children of the template.

    Running workers, whose process ids are in `alive`, are spared. While any worker is running, only processes whose ids
    are in `ended` are killed.
    """
    while strays := [
        child for child in psutil.Process().children() if child.pid not in alive and (not alive or child.pid in ended)
    ]:
        for stray in strays:
            stray.kill()
            os.waitpid(stray.pid, 0)


def spawn(line: int, log: int, heartbeat: int) -> int:
    """Start a worker as a new process; return its process id."""
    for file in (line, heartbeat):
        os.set_inheritable(file, True)  # noqa: FBT003 - the function takes it by position
    files = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    command = [sys.executable, "-P", "-m", "attnbench.processes.worker", str(line), str(heartbeat)]
    into_log = [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=[*files, *into_log])


def become_worker(line: int, log: int, heartbeat: int) -> None:
    """Leave the template's process group, print into `log`, and answer until the socket `line` closes."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # end even if the template is killed
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # detached processes stay descendants of the worker
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, place in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(file, place)
    answer(line, heartbeat)


def answer(line: int, heartbeat: int) -> None:
    """Reply to each request on the socket `line`, one at a time, and exit when the socket closes."""
    answers, requests = os.fdopen(os.dup(line), "wb", buffering=0), os.fdopen(line, "rb")

    def watch() -> None:
        """Exit as soon as the coordinator is gone, because the result in progress is not needed then.

        On macOS, poll does not report this; a worker ends there at its next read.
        """
        closing = select.poll()
        closing.register(requests, 0)  # 0: only the end of the connection, not data
        closing.poll()
        os._exit(0)

    def next_line() -> bytes:
        text = b""
        with suppress(OSError):  # the coordinator ended before it had read a reply
            text = requests.readline()
        if not text.endswith(b"\n"):  # it ended, perhaps while writing
            os._exit(0)
        return text

    threading.Thread(target=watch, daemon=True).start()
    with suppress(OSError):
        OOM_SCORE.write_text("1000", encoding="utf-8")  # if memory runs out, the system should kill this process
    is_limited = all(each.is_host or each.missing() for each in map(device, names()))  # GPU drivers map too much memory

    def consult(function: str, result: type[T], /, **arguments: object) -> T | messages.Failed:
        answers.write(messages.line(messages.request(function, arguments)))
        return msgspec.json.decode(next_line(), type=Reply).value(result)

    worker = Worker(messages.Heartbeat(heartbeat), consult)
    try:
        while True:
            request = msgspec.json.decode(next_line(), type=Request)
            if is_limited and request.function not in messages.LEAN:
                limit_memory()  # again, because other processes may have taken memory meanwhile
            kinds = types(getattr(Worker, request.function))
            arguments = {name: decoded(bytes(raw), kinds[name]) for name, raw in request.arguments.items()}
            reply = worker.answer(request.function, **arguments)
            answers.write(messages.line(messages.reply(reply, ends=worker.is_broken)))
    except BaseException:
        signal.setitimer(signal.ITIMER_REAL, 0)  # a timer that the implementation has set would interrupt the print
        traceback.print_exc()
        raise


types = cache(get_type_hints)  # types of a function's parameters, by name


@lru_cache(maxsize=4)  # most requests of a check concern the same cell
def decoded(raw: bytes, kind: type[T]) -> T:
    """Decode a JSON text as type `kind`. The value is cached, so callers must not change it.

    Raises:
        msgspec.DecodeError: the text has another type.
    """
    return msgspec.json.decode(raw, type=kind)


def search_folders() -> None:
    """Insert the folders of FOLDERS into sys.path, after Python's own modules and before installed packages."""
    own = {*map(sysconfig.get_path, ("stdlib", "platstdlib")), f"{sysconfig.get_path('platstdlib')}/lib-dynload"}
    after = 1 + max((place for place, folder in enumerate(sys.path) if folder in own), default=-1)
    sys.path[after:after] = filter(None, os.environ.get(FOLDERS, "").split(os.pathsep))


if __name__ == "__main__":
    search_folders()
    if len(sys.argv) > 2:  # noqa: PLR2004 - two arguments, socket and heartbeat: this is a worker that is not forked
        os.setsid()
        answer(*map(int, sys.argv[1:]))
    main()
