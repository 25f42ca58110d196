"""`python -m studies.trust.load`: is an honest function ever called invalid on a busy machine?

Repeats `attnbench run FILE:attention` for two honest functions next to processes that compute without a pause, and
counts how the runs end.
"""

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from attnbench.analysis.results import Results, read
from attnbench.processes.execution import execute
from attnbench.processes.planning import build_plan
from attnbench.storage.events import VisitFinished
from attnbench.storage.journal import JOURNAL, events
from attnbench.storage.records import Status
from attnbench.units import markdown_table

SOURCES = {
    "plain SDPA": """
from torch.nn import functional as F


def attention(query, key, value):
    return F.scaled_dot_product_attention(query, key, value)
""",
    "textbook": """
def attention(query, key, value):
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    return scores.softmax(dim=-1) @ value
""",
}
SETTINGS = ("seq_len=256", "num_heads=4", "mask=none", "scope=attention", "dtype=float32", "direction=inference")
BUSY = (sys.executable, "-c", "while True: pass")
NUM_ROUNDS = 4
FEWEST_VISITS = 3
"""A run of fewer visits compares no clocks."""


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Within: this many processes compute without a pause."""
    running = [subprocess.Popen(BUSY) for _ in range(number)]  # noqa: S603 - our own command
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


class Run(NamedTuple):
    """How one run ended, its visits, and the share of the processors' time that other programs had."""

    end: str
    num_visits: int
    others: float


def run(source: str, budget_s: float) -> Run:
    """One run of a function next to the baseline, as `attnbench run` does it, without reports."""
    with tempfile.TemporaryDirectory(prefix="attnbench-load-") as name:
        folder = Path(name)
        (folder / "mine.py").write_text(source, encoding="utf-8")
        implementations = (f"{folder / 'mine.py'}:attention",)
        selection = build_plan(
            sweep="quick",
            settings=SETTINGS,
            is_exact=True,
            implementations=implementations,
            budget_s=budget_s,
            metrics=("latency",),
            num_rounds=NUM_ROUNDS,
        )
        execute(selection, folder / "run", lambda _: None, stages=("check", "time"))
        num_visits = sum(isinstance(each, VisitFinished) for each in events(folder / "run" / JOURNAL))
        results = read(folder / "run")
        others = 0.0 if results.system_load is None else results.system_load.others
        return Run(outcome(results), num_visits, others)


def outcome(results: Results) -> str:
    """How the run ended for the function, in a word or two; what failed with its reason."""
    (record,) = (each for each in results.records if each.implementation == "attention")
    if record.status is not Status.ok:
        return f"{record.status}: {record.message}"
    return "doubtful" if record.key in results.doubts else "ok"


def study(
    *,
    runs: Annotated[int, typer.Option(help="Runs, of both functions in turn.")] = 40,
    busy: Annotated[int, typer.Option(help="Processes that compute meanwhile.")] = 3,
    budget_s: Annotated[float, typer.Option("--budget", help="Seconds of each run.")] = 1.5,
    at_once: Annotated[int, typer.Option(help="Runs at the same time, each of which keeps the others busy.")] = 1,
    to: Annotated[Path, typer.Option(help="The folder of the page.")] = Path("results/gallery/trust"),
) -> None:
    """Count the runs of honest functions that are invalid on a busy machine; exit 1 if any is."""
    start_s, ends = time.monotonic(), {name: Counter[str]() for name in SOURCES}
    ended: list[Run] = []
    with busy_processes(busy), ProcessPoolExecutor(at_once) as pool:
        names = [list(SOURCES)[number % len(SOURCES)] for number in range(runs)]
        for name, one in zip(
            names, pool.map(partial(run, budget_s=budget_s), [SOURCES[name] for name in names]), strict=True
        ):
            ends[name][one.end] += 1
            ended.append(one)
            print(f"{len(ended)} of {runs}, {name}: {one}", file=sys.stderr, flush=True)  # noqa: T201
    words = dict.fromkeys(["ok", "doubtful", *(end for counted in ends.values() for end in counted)])
    table = [{"function": name} | {end: str(counted[end]) for end in words} for name, counted in ends.items()]
    bad = sum(number for counted in ends.values() for end, number in counted.items() if end not in {"ok", "doubtful"})
    loads, visits = [one.others for one in ended], [one.num_visits for one in ended]
    took_s = time.monotonic() - start_s
    command = f"python -m studies.trust.load --runs {runs} --busy {busy} --budget {budget_s:g} --at-once {at_once}"
    page = f"""# Honest functions on a busy machine

Written by `{command}`.

With {busy} processes that compute without a pause, {bad} of {len(ended)} runs had no time. Other programs had
{min(loads):.0%} to {max(loads):.0%} of the processors' time. A run had {min(visits)} to {max(visits)} visits, and
clocks are compared from {FEWEST_VISITS} on. All took {took_s:.0f} s.

{markdown_table(table)}

A doubtful time is shown with a warning in the first line, and makes no verdict. Shapes: {", ".join(SETTINGS)}.
"""
    to.mkdir(parents=True, exist_ok=True)
    (to / "load.md").write_text(page, encoding="utf-8")
    typer.echo(page)
    raise typer.Exit(int(bad > 0))


if __name__ == "__main__":
    typer.run(study)
