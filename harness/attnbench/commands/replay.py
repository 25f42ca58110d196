"""The check of captured inputs for `attnbench check --replay FILE`, as results that the other parts can show."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attnbench.analysis.results import Results
from attnbench.checking import replay
from attnbench.checking.reference import Reference
from attnbench.commands.repro import run_module
from attnbench.plugins import name_of
from attnbench.storage.events import SCHEMA, Plan, RunStarted
from attnbench.storage.records import Agreement, Grade, Record, Status


def checked(plan: Plan, file: Path, folder: Path) -> Results:
    """Call each function once on the inputs in the file, each in a process of its own, and judge its answers here.

    Raises:
        ValueError: these are no inputs of attention, or it overflows in their dtype.
    """
    saved = replay.load(file)
    right = replay.reference(saved)
    time = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    started = RunStarted(schema=SCHEMA, run=folder.name, time=time, commit="", plan=plan)
    records = []
    for spec in plan.implementations:
        request = replay.Request(spec=spec, file=str(file), answers=str(folder / f"{name_of(spec)}.pt"))
        status, message = run_module("attnbench.checking.replay", request, plan.timeout_s)
        agreement = None
        if status is Status.ok:
            agreement, status, message = _judged(saved, right, Path(request.answers))
        fields: dict[str, Any] = {"run": started.run, "time": started.time, "commit": "", "environment": None}
        fields |= {"workload": plan.workloads[0], "implementation": name_of(spec)}
        records.append(Record(**fields, status=status, message=message, agreement=agreement))
    return Results(folder=folder, started=started, records=tuple(records), elapsed_s=0.0, num_visits={}, check_s=0.0)


def _judged(saved: dict[str, Any], right: Reference, answers: Path) -> tuple[Agreement | None, Status, str]:
    try:
        agreement = replay.judge(saved, right, answers)
    except ValueError as error:
        return None, Status.error, str(error)
    if agreement.grade is not Grade.wrong:
        return agreement, Status.ok, ""
    if agreement.broken_rules:
        return agreement, Status.disagrees, agreement.broken_rules[0].found
    worst = next(each for _, each in agreement.tensors() if not each.agrees)
    actual = "not finite" if worst.actual is None else f"{worst.actual:.3g}"
    place = ", ".join(map(str, worst.worst))
    where = f"at [{place}] it is {actual}, the oracle says {worst.expected:.3g}"
    return agreement, Status.disagrees, f"{worst.tensor} is wrong on the captured inputs: {where}"
