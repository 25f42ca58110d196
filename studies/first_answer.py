"""`python -m studies.first_answer`: time to the first answers, and the share that a quick sweep decides.

The machine must be idle, or its noise dominates; the A/A spread is also printed.
"""

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from attnbench.analysis.comparisons import comparisons, control_effects
from attnbench.analysis.results import read
from attnbench.processes.worker_client import ROOT, module_path
from attnbench.units import markdown_table
from studies import frame
from studies.frame import Piece, Row

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
QUICK = "the quick sweep"
FINDING = "WRONG"
CLASSES = {"beyond 1.2": (1.2, math.inf, 1.0), "beyond 1.1": (1.1, math.inf, 0.9), "within 1.05": (1.0, 1.05, 0.7)}
"""Groups of comparisons by their measured ratio in either direction, and the share that must be decided."""


def first_answer(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the table goes.")] = Path("results/first_answer"),
    sweeps: Annotated[int, typer.Option(min=0, help="Quick sweeps.")] = 2,
    checks: Annotated[int, typer.Option(min=0, help="Checks of each kind.")] = 5,
) -> None:
    """Time the commands that a new user tries first; exit code 1 if a stated limit is missed."""
    commands = {what: (command.split(), checks) for what, (command, _, _) in CHECKS.items()}
    commands[QUICK] = (["run", "--sweep", "quick"], sweeps)
    for what, (command, number) in commands.items():
        frame.complete([Piece(name=what, make=partial(timed, command), size=number)], to)
    rows = table(to)
    page = f"# The first answer\n\nMedians, with the smallest and the largest.\n\n{markdown_table(rows)}\n"
    frame.save(to / "first_answer.md", page)
    typer.echo(page)
    if missed := [row["what"] for row in rows if row["result"] == "missed"]:
        typer.echo("missed: " + "; ".join(missed))
        raise typer.Exit(1)


def timed(command: Sequence[str], number: int = 0) -> list[Row]:  # noqa: ARG001 - a piece's call
    """Run a command in an empty folder, and time its first diagnosis and its end."""
    environment = os.environ | {"PYTHONPATH": module_path(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    with tempfile.TemporaryDirectory(prefix="first-answer-") as name:
        folder = Path(name)
        (folder / "mine.py").write_text(MINE, encoding="utf-8")
        start, first_s = time.monotonic(), None
        with subprocess.Popen(  # noqa: S603 - our own commands
            [sys.executable, "-m", "attnbench", *command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if first_s is None and FINDING in line:
                    first_s = time.monotonic() - start
        row: Row = {"first_s": first_s, "total_s": time.monotonic() - start}
        if process.returncode not in {0, 1, 3}:
            raise RuntimeError(f"{' '.join(command)} ends with {process.returncode}")
        for run in map(read, folder.glob("results/runs/*")):
            logs = [each.log for each in control_effects(run).values()]
            row["verdicts"] = [(each.ratio, str(each.verdict)) for each in comparisons(run)]
            row["spread"] = math.sqrt(sum(log**2 for log in logs) / len(logs)) if logs else None
    return [row]


def table(folder: Path) -> list[dict[str, str]]:
    """Build the rows: command, limit, times, and whether the limit is kept."""
    rows = []
    for what, (command, field, limit_s) in (CHECKS | {QUICK: ("run", "total_s", 240)}).items():
        title = f"`{command.split()[0]}` of {what}"
        rows += _row(title, f"at most {limit_s} s", _values(folder, what, field), limit_s, unit=" s")
    spreads = [100 * spread for spread in _values(folder, QUICK, "spread")]
    rows += _row("spread of its A/A controls: identical code", "", spreads, math.inf, unit=" %")
    for name, (low, high, least) in CLASSES.items():
        limit = 100 * (1 - least)
        shares = _open_shares(folder, low, high)
        rows += _row(f"undecided, of ratios {name}", f"at most {limit:.0f} %", shares, limit, unit=" %")
    return rows


def _values(folder: Path, what: str, field: str) -> list[float]:
    return [row[field] for row in frame.rows(folder, what) if row.get(field) is not None]


def _open_shares(folder: Path, low: float, high: float) -> list[float]:
    """The percentage of undecided comparisons in each sweep, among those whose ratio lies between `low` and `high`."""
    shares = []
    for row in frame.rows(folder, QUICK):
        verdicts = [verdict for ratio, verdict in row["verdicts"] if low <= max(ratio, 1 / ratio) < high]
        shares += [100 * verdicts.count("undecided") / len(verdicts)] if verdicts else []
    return shares


def _row(what: str, limit: str, values: list[float], most: float, *, unit: str) -> list[dict[str, str]]:
    """A row for values whose median may be at most `most`; none without values."""
    if not values:
        return []
    text = f"{median(values):.3g}{unit} ({min(values):.3g} to {max(values):.3g}, n={len(values)})"
    is_kept = median(values) <= most
    return [
        {"what": what, "limit": limit, "found": text, "result": "" if not limit else "met" if is_kept else "missed"}
    ]


if __name__ == "__main__":
    typer.run(first_answer)
