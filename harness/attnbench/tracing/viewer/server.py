"""TensorBoard on this machine's own address, over a folder of traces."""

import logging
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path
from queue import SimpleQueue

from tensorboard import default, program

from attnbench.tracing import folders

HOST = "127.0.0.1"
POLL_S = 0.1
DEPTH = 3  # of a trace in its run: WORKLOAD/IMPLEMENTATION/FILE


def launch(folder: Path, port: int) -> tuple[str, list[str]]:
    """Serve the traces below `folder`: the address, and the faults of those that cannot be shown.

    Starts threads, and processes that read the traces and import the main module: guard it.

    Raises:
        ValueError: the port is taken, or none of the traces can be read.
    """
    try:  # before anything is started that would have to be ended
        socket.create_server((HOST, port)).close()
    except OSError as error:
        why = f"port {port} cannot be used ({error.strerror})"
        raise ValueError(f"{why}: choose another with --port, or any that is free with --port 0") from None
    os.environ.setdefault("TORCH_PROFILER_LOG_LEVEL", "ERROR")  # before the import: it is read once
    from attnbench.tracing.viewer.plugin import OfflinePlugin, readable

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    good, damaged = readable(folders.trace_files(folder))
    if not good:
        raise ValueError("; ".join(damaged))
    board = program.TensorBoard(plugins=[*default.get_static_plugins(), OfflinePlugin])
    board.configure(logdir=str(folder), host=HOST, port=port, load_fast="false")
    return f"{board.launch()}#pytorch_profiler", damaged


def stopping() -> SimpleQueue[int]:
    """A queue that receives Ctrl-C and SIGTERM from now on, even in a script that runs in the background.

    A queue of this kind may be filled by a signal at any moment. threading.Event may not: a signal that comes while
    wait() holds its lock waits for that lock for ever.
    """
    stopped: SimpleQueue[int] = SimpleQueue()
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, lambda number, _: stopped.put(number))
    return stopped


def wait(stopped: SimpleQueue[int]) -> None:
    """Wait for a signal; then end the plug-in's processes, which would outlive this one."""
    while stopped.empty():  # no wait without an end: Python may notice a signal only after it
        time.sleep(POLL_S)
    for process in multiprocessing.active_children():
        process.kill()


def shown_folder(run: Path) -> Path:
    """The folder to serve: the only workload in a folder of traces, so that names stay short, or all of it."""
    paths = [file.relative_to(run).parts for file in folders.trace_files(run)]
    workloads = {path[0] for path in paths}
    return run / workloads.pop() if len(workloads) == 1 and all(len(path) == DEPTH for path in paths) else run
