"""Run each step in a process with a time limit, so that a hang or a broken CUDA context ends only that step.

This module needs only Python. The outcome of each step is stored (studies/frame.py), so that a later call continues
with the others.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from studies import frame
from studies.frame import Piece, Row

ROOT = Path(__file__).parents[2]
OK, LEFT_OUT, FAILED, HUNG, DIED = "ok", "left out", "failed", "hung", "died"
CLOSING_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One process: its name, its function in studies/gpu/work.py, the arguments, and the time limit."""

    name: str
    work: str
    given: tuple[str, ...] = ()
    limit_s: float


def run_all(steps: Sequence[Step], out: Path, stop_after_s: float) -> bool:
    """Run the steps that have no result yet; return whether all steps now have one.

    A step is left for later if its time limit would end more than `stop_after_s` seconds after the start of this call.
    """
    start, is_complete = time.monotonic(), True
    for step in steps:
        if frame.rows(out, step.name):
            continue
        if time.monotonic() - start + step.limit_s > stop_after_s:
            is_complete = False
            continue
        frame.complete([Piece(name=step.name, make=partial(run, step, out))], out)
    return is_complete


def ended(steps: Sequence[Step], out: Path) -> Iterator[tuple[str, Row]]:
    """Yield the name and the result row of each step that has ended."""
    for step in steps:
        for row in frame.rows(out, step.name):
            yield step.name, row


def run(step: Step, out: Path, _: int) -> list[Row]:
    """Run one step to its end or its time limit; return one row with outcome, reason, duration and answer."""
    for folder in ("logs", "found"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    end = _outcome(step, out)
    return [{"took_s": round(time.monotonic() - start, 3), **end}]


def _outcome(step: Step, out: Path) -> Row:
    """Run a step's process; return its outcome, its reason and, if it wrote a result file, its answer.

    If the process ends by a signal or without a result file, the outcome is DIED; after the time limit, it is HUNG.
    """
    file, log = out / "found" / f"{step.name}.json", out / "logs" / f"{step.name}.log"
    file.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT / "harness"), str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", "studies.gpu.work", step.work, str(file), *step.given]
    with log.open("wb") as printed:
        process = subprocess.Popen(  # noqa: S603 - our own module
            command,
            cwd=out,
            env=os.environ | {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "COLUMNS": "120"},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )
        try:
            code = process.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            return {"outcome": HUNG, "reason": f"killed after {step.limit_s:g} s"}
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a driver may keep the process for a while
                process.wait(CLOSING_S)
    if code < 0:
        return {"outcome": DIED, "reason": signal.Signals(-code).name}
    if not file.exists():
        return {"outcome": DIED, "reason": f"exit code {code}, and nothing found: see {log.relative_to(out)}"}
    end: Row = json.loads(file.read_bytes())
    return {name: end[name] for name in ("outcome", "reason", "answer")}
