"""A Python that starts at once: it forks from a process that has imported torch and other packages already.

Starting Python and importing torch takes seconds of processor time, and tests start hundreds of processes. `python()`
returns a program that is called as `python` is: with `-P`, `-W`, `-m`, `-c`, `-` or a script. It passes its arguments,
environment, folder and open files to a server, which forks a child, and it ends with the exit code of the child. If it
is killed, the child's whole process group is killed, too. Each child imports the project again from its own PYTHONPATH:
the server imports only other packages.

A child differs from a separate process in one way: variables that a library reads during its import, such as
OMP_NUM_THREADS, are the server's. Other options of Python start a real one.
"""

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from functools import cache
from pathlib import Path

import coverage

IMPORTED = (
    *("coverage", "jinja2", "msgspec", "numpy", "psutil", "pytest", "rich.table", "rich.progress"),
    *("pydantic", "scipy.special", "scipy.stats", "statistics", "typer.testing"),
    *("pandas", "matplotlib.figure", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg"),
    *("torch.fx.experimental.symbolic_shapes", "torch.nn.attention.flex_attention"),
    *("torch.profiler", "torch.utils.flop_counter"),
)
"""Modules of other packages that the project's commands import."""
MAX_FILES = 64
CLIENT = """#!{python} -IS
import array, json, os, signal, socket, struct, sys

if sys.argv[1][0] == "-" and sys.argv[1] not in ("-P", "-W", "-m", "-c", "-"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
files = [int(name) for name in os.listdir("/proc/self/fd")]
files = [file for file in files if file < 3 or os.path.exists(f"/proc/self/fd/{{file}}") and os.get_inheritable(file)]
line = socket.socket(socket.AF_UNIX)
line.connect({address!r})
ignores = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
asked = json.dumps([files, sys.argv[1:], dict(os.environ), os.getcwd(), sys.argv[0], ignores]).encode()
line.sendmsg([struct.pack("<I", len(asked))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
line.sendall(asked)
child, = struct.unpack("<i", line.recv(4, socket.MSG_WAITALL))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(child, number))
for file in files:
    os.close(file)
code, = struct.unpack("<i", line.recv(4, socket.MSG_WAITALL))
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@cache
def python() -> str:
    """Return the path of the program. Its server starts with the first call, and ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    client, address = folder / "python", str(folder / "socket")
    client.write_text(CLIENT.format(python=sys.executable, address=address), encoding="utf-8")
    client.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        server = subprocess.Popen(
            [sys.executable, "-I", __file__, str(listening.fileno()), str(folder)],
            env={"OMP_NUM_THREADS": "1"} | environment | {"MPLBACKEND": "agg"},
            pass_fds=[listening.fileno()],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
    atexit.register(server.communicate)  # closes its input, and so ends the server
    return str(client)


def serve(listening: socket.socket) -> None:
    """Fork for each call, until standard input ends."""
    while sys.stdin not in (ready := select.select([listening, sys.stdin], [], [])[0]):
        assert ready
        line, _ = listening.accept()
        if not os.fork():
            listening.close()
            attend(line)
        line.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def attend(line: socket.socket) -> None:
    """Run one command in a child of this process; report its end, or kill it if its caller is gone."""
    files = array.array("i")
    head, ancillary, *_ = line.recvmsg(4, socket.CMSG_SPACE(MAX_FILES * files.itemsize), socket.MSG_WAITALL)
    for _, _, data in ancillary:
        files.frombytes(data)
    numbers, *asked = json.loads(line.recv(*struct.unpack("<I", head), socket.MSG_WAITALL))
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        line.close()
        place(list(files), numbers)
        os._exit(become(*asked))
    for file in (0, 1, 2, *files):
        os.close(file)
    with contextlib.suppress(OSError):
        line.sendall(struct.pack("<i", child))
    process = os.pidfd_open(child)
    ready, _, _ = select.select([line, process], [], [])
    if process not in ready:
        with contextlib.suppress(ProcessLookupError):  # it has not created its group yet
            os.killpg(child, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        line.sendall(struct.pack("<i", os.waitstatus_to_exitcode(status)))
    os._exit(0)


def place(files: list[int], numbers: list[int]) -> None:
    """Give the received files the numbers that they have in the caller."""
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD, 512) for file in files]
    for file, number in zip(aside, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    for file in set(files) - set(numbers):
        os.close(file)


def become(
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    client: str,
    ignores: bool,  # noqa: FBT001 - from a list
) -> int:
    """Run a command to its end, as `python` would; return its exit code. It `ignores` SIGINT if its caller does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignores else signal.default_int_handler)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # type: ignore[misc]  # noqa: SIM115
        2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
    )
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    code = 1
    try:
        run(arguments, client)
        code = 0
    except SystemExit as ending:
        if isinstance(ending.code, str):
            sys.stderr.write(f"{ending.code}\n")
        else:
            code = ending.code or 0
    except BaseException:  # noqa: BLE001 - as Python does
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def run(arguments: list[str], client: str) -> None:
    """Run a module, a text or a script, as `python` does with these arguments.

    A worker of the harness gets the real Python as `sys.executable`, since torch starts compilers with it. All other
    programs get the client, so that their workers are forked, too.
    """
    given = list(arguments)
    with_folder = True
    while given[0] in {"-P", "-W"}:
        if given.pop(0) == "-W":
            warnings.simplefilter(given.pop(0))  # type: ignore[arg-type]
        else:
            with_folder = False
    what = given.pop(0)
    named = given.pop(0) if what in {"-m", "-c"} else ""
    if named != "attnbench.processes.worker":
        sys.executable = client
    sys.argv = [what, *given]
    first = str(Path(what).resolve().parent) if what[0] != "-" else str(Path.cwd()) if what == "-m" else ""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [*([first] if with_folder else []), *filter(None, path)]
    importlib.invalidate_caches()
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        coverage.process_startup()
    if what == "-m":
        runpy.run_module(named, run_name="__main__", alter_sys=True)
    elif what[0] == "-":
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(named or sys.stdin.read(), "<string>", "exec"), module.__dict__)  # noqa: S102 - as Python does
    else:
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    gc.disable()
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    serve(socket.socket(fileno=int(sys.argv[1])))
    shutil.rmtree(sys.argv[2])
