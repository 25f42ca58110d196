"""Measure how long `attnbench check` takes for right and wrong functions and modules.

Command: `python -m studies.first_answer`. Run it on an idle machine.
"""

import math
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from attnbench.processes.worker_client import ROOT, module_path
from attnbench.units import markdown_table
from studies import frame
from studies.frame import Piece, Row

MINE = '''"""Right attention and wrong attention, as functions and as modules."""

import torch
from torch import nn

from attnbench.contract.adapters import adapt, packed

def right(query, key, value, *, mask=None, scale=None):
    scores = query @ key.transpose(-2, -1) * scale
    return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ value if mask is not None else (
        scores.softmax(dim=-1) @ value)

def mistaken(query, key, value, *, mask=None, scale=None):
    scores = query @ key.transpose(-2, -1) * scale
    return (scores.masked_fill(~mask, -1e9) if mask is not None else scores).softmax(dim=-2) @ value

def paged(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q):
    outputs = []
    for request, length in enumerate(seq_lens.tolist()):
        tokens = query[cu_seqlens_q[request] : cu_seqlens_q[request + 1]]
        pages = block_table[request, : -(-length // key_cache.shape[1])].long()
        key, value = (pool[pages].flatten(0, 1)[:length] for pool in (key_cache, value_cache))
        seen = torch.ones(len(tokens), length, dtype=torch.bool).tril(length - len(tokens))
        heads = (each.transpose(0, 1) for each in (tokens, key, value))
        output = nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)

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
    "a right function": ("mine.py:right", "total_s", 15),
    "a right module": ("mine.py:module", "total_s", 15),
    "fused, a bundled function": ("fused", "total_s", 15),
    "torch_mha, a bundled module": ("torch_mha", "total_s", 15),
    "a right function over pages": ("mine.py:paged", "total_s", 10),
    "a wrong function, until its sentence": ("mine.py:mistaken", "first_s", 5),
    "a wrong module, until its sentence": ("mine.py:wrong_module", "first_s", 5),
}
"""Checks by title: the implementation, the field of the duration that is judged, and its limit in seconds."""


def first_answer(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the table goes.")] = Path("results/first_answer"),
    checks: Annotated[int, typer.Option(min=1, help="Checks of each kind; one of each takes a minute.")] = 5,
    before: Annotated[Path | None, typer.Option(metavar="DIR", help="An earlier checkout, timed in turn.")] = None,
) -> None:
    """Time `attnbench check`, a new user's first command; exit with 1 if a median is above its limit."""
    trees = {"after": ROOT} | ({} if before is None else {"before": before.resolve() / "harness"})
    frame.complete(
        [
            Piece(name=f"{what}, {when}", make=partial(timed, name, tree), size=checks)
            for what, (name, _, _) in CHECKS.items()
            for when, tree in trees.items()
        ],
        to,
    )
    table = []
    for what, (_, field, limit_s) in CHECKS.items():
        before_rows, after_rows = (frame.rows(to, f"{what}, {when}") for when in ("before", "after"))
        result = "met" if median(each[field] for each in after_rows) <= limit_s else "missed"
        found = {"before": show(before_rows, field), "after": show(after_rows, field), "result": result}
        table.append({"what": f"check of {what}", "limit": f"at most {limit_s} s", **found})
    page = f"# The first answer\n\nMedians, with the smallest and the largest.\n\n{markdown_table(table)}\n"
    frame.save(to / "first_answer.md", page)
    typer.echo(page)
    raise typer.Exit(int(any(each["result"] == "missed" for each in table)))


def timed(name: str, tree: Path, number: int = 0) -> list[Row]:  # noqa: ARG001 - a piece's call
    """Check `name` with the package below `tree`; return one row with its durations and its exit code.

    `first_s` is the time to the first line with WRONG, or infinite; `total_s` is the time to the end.
    """
    environment = os.environ | {"PYTHONPATH": module_path(tree), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    with tempfile.TemporaryDirectory(prefix="first-answer-") as folder:
        Path(folder, "mine.py").write_text(MINE, encoding="utf-8")
        start, first_s = time.monotonic(), math.inf
        with subprocess.Popen(  # noqa: S603 - our own commands
            [sys.executable, "-m", "attnbench", "check", name],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if "WRONG" in line:
                    first_s = min(first_s, time.monotonic() - start)
        if process.returncode not in {0, 1, 3}:
            raise RuntimeError(f"attnbench check {name} ends with {process.returncode}")
    return [{"first_s": first_s, "total_s": time.monotonic() - start, "exit_code": process.returncode}]


def show(rows: list[Row], field: str) -> str:
    """Format median, smallest and largest of the duration `field`, and the exit codes; "-" if there are no rows."""
    seconds, codes = [row[field] for row in rows], sorted({row["exit_code"] for row in rows})
    if not rows:
        return "-"
    low, high = min(seconds), max(seconds)
    return f"{median(seconds):.3g} s ({low:.3g} to {high:.3g}, n={len(rows)}), exit code {' or '.join(map(str, codes))}"


if __name__ == "__main__":
    typer.run(first_answer)
