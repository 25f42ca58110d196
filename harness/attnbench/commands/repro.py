"""Scripts of wrong answers for `attnbench check --repro DIR`: DIR/NAME/repro.py, which needs only torch."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from attnbench.analysis.results import Results
from attnbench.storage.events import Plan
from attnbench.storage.records import Grade, Record, TensorError


def scripts(results: Results, plan: Plan, folder: Path, timeout_s: float) -> Iterator[str]:
    """Write a script for the first wrong tensor of each implementation; yield a line for each.

    Implementations without a wrong tensor have no line; a line says why there is no script.
    """
    done: set[str] = set()
    reasons: dict[str, str] = {}
    for record in results.records:
        name = record.arm.implementation
        if name in done or (found := _worst(record)) is None:
            continue
        text = _written(record, *found, plan, folder / name, timeout_s)
        if text.endswith(".py"):
            done.add(name)
            yield f"{name}: python {text}"
        else:
            reasons.setdefault(name, text)
    yield from (f"{name}: no script: {text}" for name, text in reasons.items() if name not in done)


def _worst(record: Record) -> tuple[str, TensorError] | None:
    """The probe and the first tensor that is wrong or imprecise; outputs come before gradients."""
    if record.agreement is None or record.agreement.grade is Grade.right:
        return None
    return next(((probe, each) for probe, each in record.agreement.tensors() if not each.agrees), None)


def _written(record: Record, probe: str, error: TensorError, plan: Plan, folder: Path, timeout_s: float) -> str:  # noqa: PLR0917 - a cell, its error, and where to write
    """The script's path, or why there is none; the implementation is called in a process of its own."""
    assert record.agreement is not None
    request = {
        "spec": plan.specs[record.arm],
        "workload": record.workload,
        "probe": probe,
        "seed": plan.seed,
        "error": error,
        "words": record.agreement.diagnosis,
        "folder": str(folder),
    }
    command = [sys.executable, "-P", "-m", "attnbench.checking.repro"]
    try:
        ended = subprocess.run(  # noqa: S603 - our own module
            command, input=msgspec.json.encode(request), capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {timeout_s:g} s"
    lines = (ended.stdout if ended.returncode == 0 else ended.stderr).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"the process ended with exit code {ended.returncode}"
