"""Checks inside a model run in a process of their own: one that dies costs only the attention that it was trying."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from attnbench.storage.model_events import AnyEvent, Asked, Built, Impossible, Judged, Timed, Trying

MODULE = "attnbench.processes.worker.in_model"
TICK_S = 0.05
LAST_LINES = 3
Say = Callable[[AnyEvent], object]


class Outcome(msgspec.Struct, kw_only=True):
    """All that was found out."""

    built: Built | None = None
    judged: dict[str, Judged] = {}
    timed: list[Timed] = []
    trouble: str = ""  # why nothing was timed, where something agreed


def run(asked: Asked, say: Say, timeout_s: float) -> Outcome:
    """Ask until every attention is judged; a process that dies or hangs is started again without its culprit.

    Raises:
        ValueError: there is no model for the configuration, or it cannot be built.
    """
    found = Outcome()
    while True:
        right = tuple(name for name, each in found.judged.items() if each.is_right)
        again = msgspec.structs.replace(asked, checked=tuple(found.judged), timed=right)
        last, ended = Trying(step="building"), _Ended()
        for event in _events(again, timeout_s, ended):
            say(event)
            match event:
                case Built():
                    found.built = event
                case Judged():
                    found.judged[event.attention] = event
                case Timed():
                    found.timed.append(event)
                case Trying():
                    last = event
                case Impossible():
                    raise ValueError(event.reason)
        if not ended.reason:
            return found
        if last.step == "building":
            raise ValueError(f"the model cannot be built: {ended.reason}")
        if last.step == "timing":
            found.trouble = ended.reason
            return found
        found.judged[last.attention] = Judged(attention=last.attention, reason=ended.reason)


class _Ended:
    """How a process ended: nothing, where it came to its end."""

    reason = ""


def _events(asked: Asked, timeout_s: float, ended: _Ended) -> Iterator[AnyEvent]:
    """The events of one process, as they come; it is killed where one step lasts longer than it may."""
    with tempfile.TemporaryDirectory(prefix="attnbench-model-") as folder:
        place, log = Path(folder) / "events", Path(folder) / "log"
        place.touch()
        command = [sys.executable, "-m", MODULE, msgspec.json.encode(asked).decode(), str(place)]
        with log.open("wb") as output, place.open("rb") as lines:
            process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)  # noqa: S603 - ours
            try:
                limit = time.monotonic() + timeout_s
                is_over = False
                while not is_over:
                    is_over = process.poll() is not None  # before the last look: what it wrote is then all there
                    for line in lines.read().splitlines():
                        event: AnyEvent = msgspec.json.decode(line, type=AnyEvent)
                        yield event
                        is_timing = isinstance(event, Trying) and event.step == "timing"
                        limit = time.monotonic() + timeout_s + is_timing * asked.budget_s
                    if not is_over and time.monotonic() > limit:
                        ended.reason = f"it lasted longer than {timeout_s:g} s, and was ended"
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
