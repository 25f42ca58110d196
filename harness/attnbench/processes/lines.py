"""A module of the worker in a process of its own, which is asked by JSON and answers by lines, as they come."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

TICK_S = 0.05
LAST_LINES = 3


class Ended:
    """How a process ended: nothing, where it came to its end."""

    reason = ""


def lines(
    module: str,
    asked: msgspec.Struct,
    kind: Any,  # noqa: ANN401 - a type, or several
    ended: Ended,
    limit_of: Callable[[Any], float],
) -> Iterator[Any]:
    """The events, of that kind, of one process; it is killed where none comes for as long as the last one allows.

    `limit_of` says so, in seconds, of an event, and of None before the first.
    """
    with tempfile.TemporaryDirectory(prefix="attnbench-lines-") as folder:
        place, log = Path(folder) / "events", Path(folder) / "log"
        place.touch()
        command = [sys.executable, "-m", module, msgspec.json.encode(asked).decode(), str(place)]
        with log.open("wb") as output, place.open("rb") as found:
            process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)  # noqa: S603
            try:
                allowed_s, last_s, is_over = limit_of(None), time.monotonic(), False
                while not is_over:
                    is_over = process.poll() is not None  # before the last look: what it wrote is then all there
                    for line in found.read().splitlines():
                        event = msgspec.json.decode(line, type=kind)
                        yield event
                        allowed_s, last_s = limit_of(event), time.monotonic()
                    if not is_over and time.monotonic() > last_s + allowed_s:
                        ended.reason = f"it lasted longer than {allowed_s:g} s, and was ended"
                        return
                    time.sleep(0.0 if is_over else TICK_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.wait()
        if process.returncode:
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            name = f"signal {-process.returncode}" if process.returncode < 0 else f"code {process.returncode}"
            ended.reason = f"its process ended with {name}: {' / '.join(said[-LAST_LINES:]) or 'it said nothing'}"
