"""The worker: a process that answers requests one at a time (processes/worker/answers.py).

Started by processes/worker_client.py as `python -m attnbench.processes.worker PATH`, the heartbeat's. Requests
come on standard input, answers leave on what was standard output; what an implementation prints goes to standard error.
"""

import os
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import msgspec

from attnbench.devices import device, names
from attnbench.devices.cpu import limit_memory
from attnbench.processes.messages import Envelope, Heartbeat, Request
from attnbench.processes.worker.answers import Worker


def main() -> None:
    """Take over standard output, answer each line of standard input, and leave at once when it ends."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    lines: SimpleQueue[bytes] = SimpleQueue()

    def listen() -> None:
        for line in os.fdopen(os.dup(0), "rb"):  # sys.stdin would hold a lock that the interpreter wants when it ends
            lines.put(line)
        os._exit(0)  # the coordinator is gone: nobody waits for what is under way

    threading.Thread(target=listen, daemon=True).start()
    if all(each.is_host or each.missing() for each in map(device, names())):
        limit_memory()  # a driver of another device maps far more than it uses
    decoder = msgspec.json.Decoder(Request)
    worker = Worker(Heartbeat(Path(sys.argv[1])))
    while True:
        reply = worker.answer(decoder.decode(lines.get()))
        answers.write(msgspec.json.encode(Envelope(reply=reply, ends=worker.is_broken)) + b"\n")


if __name__ == "__main__":
    main()
