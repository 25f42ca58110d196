"""The check of captured inputs for `attnbench check --replay FILE`, as results that the other parts can show."""

import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from attnbench.analysis.results import Results
from attnbench.checking import replay
from attnbench.checking.reference import Reference
from attnbench.plugins import name_of
from attnbench.storage.events import SCHEMA, Plan, RunStarted
from attnbench.storage.records import Agreement, Grade, Record, Status, TensorError


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
        answers = folder / f"{name_of(spec)}.pt"
        request = replay.Request(spec=spec, file=str(file), answers=str(answers))
        agreement, status, message = _judged(request, saved, right, plan.timeout_s)
        fields: dict[str, Any] = {"run": started.run, "time": started.time, "commit": "", "environment": None}
        fields |= {"workload": plan.workloads[0], "implementation": name_of(spec)}
        records.append(Record(**fields, status=status, message=message, agreement=agreement))
    return Results(folder=folder, started=started, records=tuple(records), elapsed_s=0.0, num_visits={}, check_s=0.0)


def _judged(
    request: replay.Request, saved: dict[str, Any], right: Reference, timeout_s: float
) -> tuple[Agreement | None, Status, str]:
    command = [sys.executable, "-P", "-m", "attnbench.checking.replay"]
    encoded = msgspec.json.encode(request)
    try:
        ended = subprocess.run(command, input=encoded, capture_output=True, timeout=timeout_s, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return None, Status.timeout, f"it took longer than {timeout_s:g} s"
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        crashed = Status.crashed if ended.returncode < 0 else Status.error
        return None, crashed, lines[-1] if lines else f"its process ended with exit code {ended.returncode}"
    try:
        agreement = replay.judge(saved, right, Path(request.answers))
    except ValueError as error:
        return None, Status.error, str(error)
    if agreement.grade is not Grade.wrong:
        return agreement, Status.ok, ""
    if agreement.broken_rules:
        return agreement, Status.disagrees, agreement.broken_rules[0].found
    worst = next(each for _, each in agreement.tensors() if not each.agrees)
    return agreement, Status.disagrees, _words(worst)


def _words(error: TensorError) -> str:
    """The worst place of a tensor."""
    off, allowed = error.decisive
    place = ", ".join(map(str, error.worst))
    actual = "not finite" if error.actual is None else f"{error.actual:.3g}"
    size = "" if off is None else f" (error {off:.3g}, tolerance {allowed:.3g})"
    where = f"at [{place}] it is {actual}, the oracle says {error.expected:.3g}"
    return f"{error.tensor} is wrong on the captured inputs: {where}{size}"
