"""The check of captured inputs for `attnbench check --replay FILE`, as results that the other parts can show."""

import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attnbench.analysis.results import Results
from attnbench.checking import replay
from attnbench.checking.diagnosis import describe
from attnbench.checking.reference import Reference
from attnbench.plugins import name_of
from attnbench.storage.events import SCHEMA, Plan, RunStarted
from attnbench.storage.records import Agreement, Grade, Record, Status


def checked(plan: Plan, specs: Iterable[str], file: Path, folder: Path) -> Results:
    """Call each function once on the inputs in the file, each in a process of its own, and judge its answers here.

    Raises:
        ValueError: these are no inputs of attention, or it overflows in their dtype.
    """
    saved = replay.load(file)
    right = replay.reference(saved)
    started = RunStarted(
        schema=SCHEMA, run=folder.name, time=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", commit="", plan=plan
    )
    records = []
    for spec in specs:
        agreement, status, message = _judged(spec, file, folder / f"{name_of(spec)}.pt", saved, right, plan.timeout_s)
        fields: dict[str, Any] = {"run": started.run, "time": started.time, "commit": "", "environment": None}
        fields |= {"workload": plan.workloads[0], "implementation": name_of(spec)}
        records.append(Record(**fields, status=status, message=message, agreement=agreement))
    return Results(folder=folder, started=started, records=tuple(records), elapsed_s=0.0, num_visits={}, check_s=0.0)


def _judged(  # noqa: PLR0917 - a function, its files, and what is known of the inputs
    spec: str, file: Path, answers: Path, saved: dict[str, Any], right: Reference, timeout_s: float
) -> tuple[Agreement | None, Status, str]:
    command = [sys.executable, "-P", "-m", "attnbench.checking.replay", spec, str(file), str(answers)]
    try:
        ended = subprocess.run(  # noqa: S603 - our own module
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return None, Status.timeout, f"it took longer than {timeout_s:g} s"
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        crashed = Status.crashed if ended.returncode < 0 else Status.error
        return None, crashed, lines[-1] if lines else f"its process ended with exit code {ended.returncode}"
    try:
        agreement = replay.judge(saved, right, answers)
    except ValueError as error:
        return None, Status.error, str(error)
    if agreement.grade is not Grade.wrong:
        return agreement, Status.ok, ""
    if agreement.broken_rules:
        return agreement, Status.disagrees, agreement.broken_rules[0].found
    return agreement, Status.disagrees, describe(agreement)
