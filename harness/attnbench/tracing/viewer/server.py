"""Serve a folder of traces with TensorBoard, on localhost only."""

import logging
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path
from queue import SimpleQueue

from tensorboard import default, program

HOST = "127.0.0.1"
POLL_S = 0.1


def launch(folder: Path, port: int) -> str:
    """Serve the traces below `folder`; return the address.

    This starts threads, and processes that import the main module: call it only below `if __name__ == "__main__"`.

    Raises:
        ValueError: the port cannot be used.
    """
    try:  # before starting anything that needs cleanup
        socket.create_server((HOST, port)).close()
    except OSError as error:
        why = f"port {port} cannot be used ({error.strerror})"
        raise ValueError(f"{why}: choose another with --port, or any that is free with --port 0") from None
    os.environ.setdefault("TORCH_PROFILER_LOG_LEVEL", "ERROR")  # read once, at import
    from attnbench.tracing.viewer.plugin import OfflinePlugin

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    board = program.TensorBoard(plugins=[*default.get_static_plugins(), OfflinePlugin])
    board.configure(logdir=str(folder), host=HOST, port=port, load_fast="false")
    return f"{board.launch()}#pytorch_profiler"


def stopping() -> SimpleQueue[int]:
    """Create a queue that receives the signals of Ctrl-C and SIGTERM from now on, even in a background script.

    A signal handler may fill a SimpleQueue at any moment. With threading.Event, a signal that arrives while wait()
    holds its lock would wait for that lock forever.
    """
    stopped: SimpleQueue[int] = SimpleQueue()
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, lambda number, _: stopped.put(number))
    return stopped


def wait(stopped: SimpleQueue[int]) -> None:
    """Wait for a signal; then end the plug-in's processes, which would outlive this one."""
    while stopped.empty():  # polls: Python may notice a signal only after a blocking wait
        time.sleep(POLL_S)
    for process in multiprocessing.active_children():
        process.kill()
