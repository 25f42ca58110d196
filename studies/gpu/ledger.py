"""The ledger: a line before and after each step, steps as processes with a time limit, and resuming.

A step is a process with its own session. A hang or a lost context costs only that step.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OK, LEFT_OUT, FAILED, HUNG, DIED, POISONED = "ok", "left out", "failed", "hung", "died", "poisoned"
MOST_STARTS = 2
"""A step interrupted by a crash is started once more; not again if it takes the machine down."""
CLOSING_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One process: its name, its function in studies/gpu/work.py, the arguments, and the time limit."""

    name: str
    work: str
    given: tuple[str, ...] = ()
    limit_s: float
    group: str = ""


class Ledger:
    """An append-only file of JSON lines."""

    def __init__(self, out: Path) -> None:
        """Create the folder of the ledger."""
        self.out, self.path = out, out / "ledger.jsonl"
        self._lock = threading.Lock()
        for name in ("logs", "found"):
            (out / name).mkdir(parents=True, exist_ok=True)

    def lines(self) -> list[dict[str, Any]]:
        """Read all whole lines; a truncated last line was being written at a crash."""
        found = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                with suppress(json.JSONDecodeError):
                    found.append(json.loads(line))
        return found

    def add(self, **line: Any) -> None:  # noqa: ANN401 - JSON
        """Append a line with the time, and sync it to disk."""
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        with self._lock, self.path.open("a+b") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            ends_a_line = file.read(1) in {b"", b"\n"}  # a truncated last line was being written at a crash
            file.write((b"" if ends_a_line else b"\n") + json.dumps({"time": moment, **line}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def ended(self) -> dict[str, dict[str, Any]]:
        """Return the end of each finished step, by name."""
        return {line["step"]: line for line in self.lines() if line["event"] == "end"}

    def num_starts(self, name: str) -> int:
        """Count the starts of a step."""
        return sum(line["event"] == "start" and line["step"] == name for line in self.lines())


def run_all(
    groups: Sequence[tuple[int, Sequence[Step]]],
    ledger: Ledger,
    say: Callable[[str], object],
    stop_after_s: float,
) -> bool:
    """Run the unfinished steps of each group, some at a time; return whether nothing is left to do.

    No step is begun that would not end within `stop_after_s`.
    """
    start, is_complete = time.monotonic(), True
    for at_once, steps in groups:
        done = ledger.ended()
        todo = [step for step in steps if step.name not in done]

        def run_one(step: Step) -> bool:
            if time.monotonic() - start + step.limit_s > stop_after_s:
                return False
            run(step, ledger, say)
            return True

        with ThreadPoolExecutor(at_once) as pool:
            is_complete &= all(list(pool.map(run_one, todo)))
    return is_complete


def run(step: Step, ledger: Ledger, say: Callable[[str], object]) -> None:
    """Run one step to its end or its limit, with a line before and after."""
    if ledger.num_starts(step.name) >= MOST_STARTS:
        ledger.add(
            event="end", step=step.name, outcome=DIED, reason=f"{MOST_STARTS} times all stopped with it", took_s=0
        )
        return
    ledger.add(event="start", step=step.name, limit_s=step.limit_s)
    start = time.monotonic()
    outcome, reason = _outcome(step, ledger)
    took_s = round(time.monotonic() - start, 3)
    ledger.add(event="end", step=step.name, group=step.group, outcome=outcome, reason=reason, took_s=took_s)
    say(f"{step.name}: {outcome}, {took_s:.1f} s{reason and f' ({reason})'}")


def _outcome(step: Step, ledger: Ledger) -> tuple[str, str]:
    """Describe the end of a step and its reason. Without a result file of its name, the step has found nothing."""
    file = ledger.out / "found" / f"{step.name}.json"
    file.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT / "harness"), str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", "studies.gpu.work", step.work, str(file), *step.given]
    log = ledger.out / "logs" / f"{step.name}.log"
    with log.open("wb") as printed:
        process = subprocess.Popen(  # noqa: S603 - our own module
            command,
            cwd=ledger.out,
            env=os.environ | {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "COLUMNS": "120"},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )
        try:
            code = process.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            return HUNG, f"killed after {step.limit_s:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a driver may hold it: it ends when the driver lets go
                process.wait(CLOSING_S)
    if code < 0:
        return DIED, signal.Signals(-code).name
    if not file.exists():
        return DIED, f"exit code {code}, and nothing found: see {log.relative_to(ledger.out)}"
    found = json.loads(file.read_bytes())
    return found["outcome"], found["reason"]


def found(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the results of all steps, by name."""
    for file in sorted((out / "found").glob("*.json")):
        yield file.stem, json.loads(file.read_bytes())
