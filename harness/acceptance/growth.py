"""What planning and journalling cost for many cells: a run whose worker answers at once, of growing size."""

import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import run
from harness.acceptance.outcome import Outcome
from harness.crew import Crew
from harness.environment import collect
from harness.messages import Check, Checked, Ready, Reply, Request
from harness.records import Status
from harness.selection import Selection, plan

SIZES = (1_000, 10_000, 100_000)
LIMIT_S = 60.0
"""At the largest size: seconds, not minutes."""
IMPLEMENTATIONS = 10


class Stub(Crew):
    """A worker that refuses every cell without a look at it."""

    def __init__(self) -> None:
        """Needs no process."""
        self.environment = collect()

    @property
    def is_at_work(self) -> bool:
        """Always."""
        return True

    def hello(self, layout: int = 0) -> Ready:  # noqa: ARG002 - as the real one has it
        """Where it runs."""
        return Ready(environment=self.environment)

    def ask(self, request: Request, timeout_s: float | None = None) -> Reply:  # noqa: ARG002 - as the real one has it
        """No."""
        assert isinstance(request, Check)
        return Checked(status=Status.unsupported, message="no")

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""


def seconds(num_cells: int, folder: Path) -> float:
    """Plan a sweep of that many cells, walk it to its end and read its journal."""
    lengths = ", ".join(str(length) for length in range(1, num_cells // IMPLEMENTATIONS + 1))
    sweep = folder / "growth.toml"
    sweep.write_text(f'summary = "many"\n[[grid]]\nseq_len = [{lengths}]\n', encoding="utf-8")
    start = time.perf_counter()
    chosen = plan(Selection(sweep=str(sweep)))
    found = run.execute(chosen, folder / "run", lambda _: None, stages=("check",), crew=Stub())
    assert len(found.records) == len(chosen.workloads) * len(chosen.implementations)
    return time.perf_counter() - start


def c1(sizes: tuple[int, ...] = SIZES, *, short: bool = False) -> Outcome:
    """Each size once; the growth from one to the next beside it."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"num_cells": float(size), "spent_s": seconds(size, Path(folder))})
    growth = [later["spent_s"] / earlier["spent_s"] for earlier, later in pairwise(rows)]
    told = ", ".join(f"{row['spent_s']:.3g} s for {row['num_cells']:,.0f}" for row in rows)
    return Outcome(
        id="C1",
        title="planning, journalling and reading of many cells",
        limit=f"at most {LIMIT_S:g} s for {sizes[-1]:,} cells",
        found=f"{told}; each size costs {', '.join(f'{each:.3g}' for each in growth)} times the one before",
        passes=rows[-1]["spent_s"] <= LIMIT_S,
        is_short=short and sizes != SIZES,
        rows=tuple(rows),
    )
