"""The template: a process that has imported torch and computed nothing, from which every worker is forked.

Started by processes/worker_client.py as `python -m attnbench.processes.worker FD`, a socket. A fork takes a tenth of a
second, where a start of Python with torch takes seconds. The template never loads an implementation, so that every
worker begins clean; it imports the packages that PRELOADED names, which take seconds, too. All that its workers leave
behind becomes its own, and it ends that with them.
"""

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from queue import SimpleQueue

import msgspec
import psutil
import torch.fx.experimental.symbolic_shapes  # noqa: F401 - at the first gradient torch imports it, for half a second

from attnbench.devices import device, names
from attnbench.devices.cpu import limit_memory
from attnbench.processes.messages import FORK, NUMBER, PRELOADED, Consulted, Envelope, Heartbeat, Reply, Request
from attnbench.processes.worker.answers import Worker

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def main() -> None:
    """Fork a worker for each FORK with its three files, end the worker that a process id names, and go with the line.

    The answer to the one is the worker's process id, and to the other its exit code, or minus its signal.
    """
    line = socket.socket(fileno=int(sys.argv[1]))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for name in filter(None, os.environ.get(PRELOADED, "").split(",")):
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that a worker's collections copy none of our pages
    alive: set[int] = set()
    with suppress(ConnectionError):  # it is reset where the coordinator was killed before it had read an answer
        serve(line, alive)
    for worker in alive:
        end(worker)
    end_strays(set())


def serve(line: socket.socket, alive: set[int]) -> None:
    """Fork and end workers as the line asks, until it ends; those that are `alive` are kept there.

    Raises:
        ConnectionError: the line was reset.
    """
    while True:
        asked, files, *_ = socket.recv_fds(line, NUMBER.size, 3)
        if len(asked) < NUMBER.size:  # the coordinator is gone
            break
        (number,) = NUMBER.unpack(asked)
        if number == FORK:
            child = os.fork()
            if not child:
                line.close()
                with suppress(BaseException):
                    become_worker(*files)
                os._exit(1)  # whatever was raised and printed: the loop is the template's
            for file in files:
                os.close(file)
            alive.add(child)
            line.sendall(NUMBER.pack(child))
        else:
            is_ours = number in alive  # else it was a template's before this one, and has ended with that
            alive.discard(number)
            code = end(number) if is_ours else -signal.SIGKILL
            end_strays(alive)
            line.sendall(NUMBER.pack(code))


def end(worker: int) -> int:
    """End a worker with its whole group; its exit code, or minus the signal that had ended it before."""
    with suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)  # one that was forked a moment ago has no group of its own yet
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


def end_strays(alive: set[int]) -> None:
    """End what workers that are gone have left behind: it is our child now, and so are its children once it is gone."""
    while strays := [child for child in psutil.Process().children() if child.pid not in alive]:
        for stray in strays:
            stray.kill()
            os.waitpid(stray.pid, 0)


def become_worker(line: int, log: int, heartbeat: int) -> None:
    """Answer each line of `line`, one at a time, and leave at once when it ends; what is printed goes to `log`."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a template that is killed ends nobody itself
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, place in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(file, place)
    answers, lines = os.fdopen(os.dup(line), "wb", buffering=0), SimpleQueue[bytes]()

    def listen() -> None:
        try:
            for asked in os.fdopen(line, "rb"):
                if asked.endswith(b"\n"):  # else the coordinator ended as it wrote
                    lines.put(asked)
        finally:  # the line is at its end, or was reset since an answer was not read
            os._exit(0)  # the coordinator is gone: nobody waits for what is under way

    threading.Thread(target=listen, daemon=True).start()
    if all(each.is_host or each.missing() for each in map(device, names())):
        limit_memory()  # a driver of another device maps far more than it uses
    decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)

    def send(reply: Reply, *, ends: bool = False) -> None:
        answers.write(msgspec.json.encode(Envelope(reply=reply, ends=ends)) + b"\n")

    def consult(asked: Consulted) -> Request:
        send(asked)
        return decoder.decode(lines.get())

    worker = Worker(Heartbeat(heartbeat), consult)
    try:
        while True:
            reply = worker.answer(decoder.decode(lines.get()))
            send(reply, ends=worker.is_broken)
    except BaseException:
        traceback.print_exc()
        raise


if __name__ == "__main__":
    main()
