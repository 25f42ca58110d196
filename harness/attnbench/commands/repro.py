"""Scripts of wrong answers for `attnbench check --repro DIR`: DIR/NAME/repro.py, which needs only torch."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from attnbench.analysis.results import Results
from attnbench.storage.records import Grade, Record, Status, TensorError


def scripts(results: Results, folder: Path) -> Iterator[str]:
    """Write a script for the first wrong tensor of each implementation; yield a line for each.

    Implementations without a wrong tensor have no line; a line says why there is no script.
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
        status, line = run_module("attnbench.checking.repro", request, results.plan.timeout_s)
        if status is Status.ok:
            done.add(name)
            yield f"{name}: python {line}"
        else:
            reasons.setdefault(name, line)
    yield from (f"{name}: no script: {line}" for name, line in reasons.items() if name not in done)


def _worst(record: Record) -> tuple[str, TensorError] | None:
    """The probe and the first tensor that is wrong or imprecise; outputs come before gradients."""
    if record.agreement is None or record.agreement.grade is Grade.right:
        return None
    return next(((probe, each) for probe, each in record.agreement.tensors() if not each.agrees), None)


def run_module(module: str, request: object, timeout_s: float) -> tuple[Status, str]:
    """Run one of our modules with a request as JSON in a process; return how it ended, and its last line."""
    command = [sys.executable, "-P", "-m", module]
    encoded = msgspec.json.encode(request)
    try:
        ended = subprocess.run(command, input=encoded, capture_output=True, timeout=timeout_s, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return Status.timeout, f"it took longer than {timeout_s:g} s"
    lines = (ended.stderr if ended.returncode else ended.stdout).decode(errors="replace").strip().splitlines()
    line = lines[-1] if lines else f"its process ended with exit code {ended.returncode}"
    return Status.ok if not ended.returncode else Status.crashed if ended.returncode < 0 else Status.error, line
