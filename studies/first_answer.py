"""`python -m studies.first_answer`: time to the first answers, and the share that a quick sweep decides.

With `--old FOLDER`, another working tree of the project, both trees run everything in turns: before and after. The
machine must be idle, or its noise dominates; the A/A spread is printed, too.
"""

import csv
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
import typer

from attnbench.analysis.comparisons import control_effects
from attnbench.analysis.results import read
from attnbench.processes.worker_client import module_path

ROOT = Path(__file__).parents[1]
MINE = '''"""Right attention and wrong attention, as functions and as modules."""

from torch import nn

from attnbench.contract.adapters import adapt, packed

def right(query, key, value, *, mask=None, scale=None):
    scores = query @ key.transpose(-2, -1) * scale
    return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ value if mask is not None else (
        scores.softmax(dim=-1) @ value)

def mistaken(query, key, value, *, mask=None, scale=None):
    scores = query @ key.transpose(-2, -1) * scale
    return (scores.masked_fill(~mask, -1e9) if mask is not None else scores).softmax(dim=-2) @ value

class Heads(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.num_heads = sizes.num_heads
        self.qkv = nn.Linear(sizes.embed_dim, 3 * sizes.embed_dim)
        self.out = nn.Linear(sizes.embed_dim, sizes.embed_dim)

    def forward(self, x, mask=None, hides=True):
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        attended = right(q, k, v, mask=mask if hides else None, scale=q.shape[-1] ** -0.5)
        return self.out(attended.transpose(1, 2).flatten(2))

def call(module, x, context, mask):
    return module(x, mask.visible)

def unmasked(module, x, context, mask):
    return module(x, mask.visible, hides=False)

layout = packed("qkv", out="out")
module = adapt(Heads, layout, call=call)
wrong_module = adapt(Heads, layout, call=unmasked)
'''
CHECKS = {
    "a right function": ("check mine.py:right", "total_s", 15),
    "a right module": ("check mine.py:module", "total_s", 15),
    "fused, which is bundled": ("check fused", "total_s", 15),
    "torch_mha, which is bundled": ("check torch_mha", "total_s", 15),
    "a wrong function, until its sentence": ("check mine.py:mistaken", "first_s", 5),
    "a wrong module, until its sentence": ("check mine.py:wrong_module", "first_s", 5),
}
"""Timed checks: the command, the duration that counts, and the limit in seconds."""
MISSING = {"", "NA", "baseline"}
FINDING = ("WRONG",)
CLASSES = {
    "beyond 1.2": (1.2, math.inf),
    "1.1 to 1.2": (1.1, 1.2),
    "1.05 to 1.1": (1.05, 1.1),
    "within 1.05": (1, 1.05),
}
"""Groups of comparisons by their measured ratio, in either direction."""


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """Timing of one command in one tree."""

    tree: str
    what: str
    first_s: float | None  # until the first diagnosis
    total_s: float
    comparisons: tuple[tuple[float, str], ...] = ()  # of a sweep: ratio and verdict
    spread: float | None = None  # of the A/A controls: the standard deviation of the logarithms of their ratios


def first_answer(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the table goes.")] = Path("results/first_answer"),
    old: Annotated[Path | None, typer.Option(metavar="DIR", help="Another working tree, to compare with.")] = None,
    sweeps: Annotated[int, typer.Option(min=0, help="Quick sweeps of each tree.")] = 2,
    checks: Annotated[int, typer.Option(min=0, help="Checks of each kind and tree.")] = 5,
) -> None:
    """Time the commands that a new user tries first; exit code 1 if a stated limit is missed."""
    trees = {"after": ROOT} if old is None else {"before": old.resolve(), "after": ROOT}
    to.mkdir(parents=True, exist_ok=True)
    kept = to / "first_answer.json"  # resumes an interrupted study
    runs = msgspec.json.decode(kept.read_bytes(), type=list[Timed]) if kept.exists() else []
    with tempfile.TemporaryDirectory(prefix="first-answer-") as name:
        folder = Path(name)
        (folder / "mine.py").write_text(MINE, encoding="utf-8")
        todo = [(what, command.split()) for what, (command, _, _) in CHECKS.items() for _ in range(checks)]
        todo += [("quick", ["run", "--sweep", "quick"])] * sweeps
        done = Counter((run.tree, run.what) for run in runs)
        for what, args in todo:
            for tree, root in trees.items():
                if done[tree, what]:
                    done[tree, what] -= 1
                    continue
                runs.append(timed(tree, root, what, args, folder))
                kept.write_bytes(msgspec.json.format(msgspec.json.encode(runs)))
                typer.echo(f"{tree}, {what}: {runs[-1].total_s:.1f} s", err=True)
    (to / "first_answer.md").write_text(markdown(runs), encoding="utf-8")
    typer.echo(markdown(runs))
    if missed := [row[0] for row in table(runs) if row[-1] == "missed"]:
        typer.echo("missed: " + "; ".join(missed))
        raise typer.Exit(1)


def timed(tree: str, root: Path, what: str, args: Sequence[str], folder: Path) -> Timed:
    """Run a command of a tree in an empty results folder, and time its first diagnosis."""
    results = folder / "results"
    shutil.rmtree(results, ignore_errors=True)
    place = ["--results", str(results)] if what == "quick" else []
    environment = os.environ | {"PYTHONPATH": module_path(root / "harness"), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    start, first_s = time.monotonic(), None
    with subprocess.Popen(  # noqa: S603 - our own commands
        [sys.executable, "-m", "attnbench", *args, *place],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if first_s is None and any(each in line for each in FINDING):
                first_s = time.monotonic() - start
    total_s = time.monotonic() - start
    if process.returncode not in {0, 1, 3}:
        raise RuntimeError(f"{' '.join(args)} of {root} ends with {process.returncode}")
    rows = [row for path in results.glob("runs/*/records.csv") for row in csv.DictReader(path.open(encoding="utf-8"))]
    compared = [row for row in rows if row["ratio"] not in MISSING and row["verdict"] not in MISSING]
    controls = [each.log for run in results.glob("runs/*") for each in control_effects(read(run)).values()]
    return Timed(
        tree=tree,
        what=what,
        first_s=first_s,
        total_s=total_s,
        comparisons=tuple((float(row["ratio"]), row["verdict"]) for row in compared),
        spread=math.sqrt(sum(each**2 for each in controls) / len(controls)) if controls else None,
    )


def table(runs: Sequence[Timed]) -> list[tuple[str, str, str, str, str]]:
    """Build the rows: command, limit, before, after, and whether the limit is kept."""
    rows = []

    def add(
        text: str, limit: str, values: dict[str, list[float]], *, is_met: bool | None = None, unit: str = " s"
    ) -> None:
        before, after = (
            f"{median(own):.3g}{unit} ({min(own):.3g} to {max(own):.3g}, n={len(own)})" if own else "none"
            for own in (values["before"], values["after"])
        )
        rows.append((text, limit, before, after, "" if is_met is None else "met" if is_met else "missed"))

    def of(what: str, field: str) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {"before": [], "after": []}
        for run in runs:
            if run.what == what and getattr(run, field) is not None:
                found[run.tree].append(getattr(run, field))
        return found

    times = {
        what: (f"`{command.split()[0]}` of {what}", field, limit) for what, (command, field, limit) in CHECKS.items()
    }
    for what, (text, field, limit_s) in {**times, "quick": ("the quick sweep", "total_s", 240)}.items():
        values = of(what, field)
        if values["after"]:
            add(text, f"at most {limit_s} s", values, is_met=median(values["after"]) <= limit_s)
    spreads = {tree: [100 * each for each in own] for tree, own in of("quick", "spread").items()}
    if spreads["after"]:
        add("spread of its A/A controls: identical code", "", spreads, unit=" %")
    limits = {"beyond 1.2": 1.0, "beyond 1.1": 0.9, "within 1.05": 0.7}
    for name, (low, high) in {**CLASSES, "beyond 1.1": (1.1, math.inf), "all": (1.0, math.inf)}.items():
        shares: dict[str, list[float]] = {"before": [], "after": []}
        for run in runs:
            apart = [(max(ratio, 1 / ratio), verdict) for ratio, verdict in run.comparisons]
            own = [verdict for ratio, verdict in apart if low <= ratio < high]
            if own:
                shares[run.tree].append(100 * sum(verdict != "undecided" for verdict in own) / len(own))
        if shares["after"]:
            least = limits.get(name)
            is_met = None if least is None else median(shares["after"]) >= 100 * least
            add(
                f"decided, of ratios {name}" if name != "all" else "decided, of all",
                "" if least is None else f"at least {least:.0%}",
                shares,
                is_met=is_met,
                unit=" %",
            )
    return rows


def markdown(runs: Sequence[Timed]) -> str:
    """Format the table as a page."""
    head = ("what", "limit", "before", "after", "")
    lines = ["# The first answer", "", "Medians, with the smallest and the largest.", ""]
    lines += ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *table(runs))]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    typer.run(first_answer)
