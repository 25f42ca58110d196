"""`attnbench check --repro DIR` writes scripts of wrong answers, and `--replay FILE` checks captured inputs."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from attnbench.analysis.results import Results
from attnbench.captured import replay, repro
from attnbench.checking.diagnosis import describe
from attnbench.checking.reference import Reference
from attnbench.plugins import name_of
from attnbench.storage.events import SCHEMA, Plan, RunStarted, now
from attnbench.storage.records import Agreement, CheckVerdict, Record, Status, TensorError


def scripts(results: Results, folder: Path) -> Iterator[str]:
    """Write a script for the first wrong or imprecise tensor of each implementation; yield a line for each script.

    If no script could be written for an implementation, its line says why.
    """
    done: set[str] = set()
    reasons: dict[str, str] = {}
    for record in results.records:
        name = record.arm.implementation
        if name in done or record.agreement is None or (worst := _worst(record)) is None:
            continue
        request = {
            "spec": results.plan.specs[record.arm],
            "workload": record.workload,
            "probe": worst[0],
            "seed": results.plan.seed,
            "error": worst[1],
            "words": record.agreement.diagnosis,
            "folder": str(folder / name),
        }
        status, line = run_module("attnbench.captured.repro", (), results.plan.timeout_s, request)
        if status is Status.ok:
            done.add(name)
            yield f"{name}: python {line}"
        else:
            reasons.setdefault(name, line)
    yield from (f"{name}: no script: {line}" for name, line in reasons.items() if name not in done)


def _worst(record: Record) -> tuple[str, TensorError] | None:
    """Return (probe, tensor) for the first wrong or imprecise tensor, if possible one that a script can compare.

    The result is None if there is none, or the check passed.
    """
    if record.agreement is None or record.agreement.grade is CheckVerdict.right:
        return None
    bad = [(probe, each) for probe, each in record.agreement.tensors() if not each.agrees]
    known = repro.compared(record.workload)
    return next((each for each in bad if each[1].tensor in known), next(iter(bad), None))


def run_module(module: str, arguments: Sequence[str], timeout_s: float, request: object = None) -> tuple[Status, str]:
    """Run a module of attnbench in a new process, with `request` as JSON on its input; return (status, line).

    The line is the last one of standard output or, after a failure, of standard error. The status is ok, error, crashed
    (by a signal) or timeout.
    """
    command, encoded = [sys.executable, "-P", "-m", module, *arguments], msgspec.json.encode(request)
    try:
        ended = subprocess.run(command, input=encoded, capture_output=True, timeout=timeout_s, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return Status.timeout, f"it took longer than {timeout_s:g} s"
    lines = (ended.stderr if ended.returncode else ended.stdout).decode(errors="replace").strip().splitlines()
    line = lines[-1] if lines else f"its process ended with exit code {ended.returncode}"
    return Status.ok if not ended.returncode else Status.crashed if ended.returncode < 0 else Status.error, line


def checked_captured(plan: Plan, file: Path) -> Results:
    """Call each function once on the inputs in `file`, in a process of its own; judge its answers in this process.

    Raises:
        ValueError: the file does not hold inputs of attention, or attention overflows in their dtype.
    """
    saved = replay.load(file)
    right = replay.reference(saved)
    started = RunStarted(schema=SCHEMA, run=plan.sweep, time=now(), commit="", plan=plan)
    records = []
    for spec in plan.implementations:
        with TemporaryDirectory(prefix="attnbench-replay-") as folder:
            answers = Path(folder) / "answers.pt"
            arguments = (spec, str(file), str(answers))
            status, message = run_module("attnbench.captured.replay", arguments, plan.timeout_s)
            agreement = None
            if status is Status.ok:
                agreement, status, message = _judged(saved, right, answers)
        fields: dict[str, Any] = {"run": started.run, "time": started.time, "commit": "", "environment": None}
        fields |= {"workload": plan.workloads[0], "implementation": name_of(spec)}
        records.append(Record(**fields, status=status, message=message, agreement=agreement))
    return Results(folder=Path(plan.sweep), started=started, records=tuple(records), elapsed_s=0.0, num_visits={})


def _judged(saved: dict[str, Any], right: Reference, answers: Path) -> tuple[Agreement | None, Status, str]:
    try:
        agreement = replay.judge(saved, right, answers)
    except ValueError as error:
        return None, Status.error, str(error)
    if agreement.grade is not CheckVerdict.wrong:
        return agreement, Status.ok, ""
    if agreement.broken_rules:
        return agreement, Status.disagrees, agreement.broken_rules[0].found
    return agreement, Status.disagrees, describe(agreement)
