"""`python -m studies.trust.neighbours`: with a busy neighbour, is each time right, or the first thing said a warning?

Times a function next to the baseline by the command and by the pytest fixture, on one thread and on two, alone and next
to processes that compute without a pause. Each call adds its rows to those that the page has already, so that the parts
can be measured one after the other.
"""

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from attnbench.analysis.comparisons import comparisons, doubts, waiting
from attnbench.analysis.results import Results, read
from attnbench.processes.execution import execute
from attnbench.processes.planning import build_plan
from attnbench.pytest_plugin import AttentionBench
from attnbench.reports import story
from attnbench.storage.records import LATENCY
from attnbench.units import markdown_table, percent, show
from studies.trust.load import SOURCES, busy_processes

SETTINGS = {"seq_len": 128, "num_heads": 4, "mask": "none", "direction": "inference"}
NAME, SOURCE = "attention", SOURCES["textbook"]
ALLOWED = 0.10
BUSY, NUM_THREADS = (0, 1, 2), (1, 2)
WAYS = ("command", "fixture")


class Row(NamedTuple):
    """One session: how it was measured, its time of a call, what it said, and the share of samples that waited."""

    way: str
    num_threads: int
    busy: int
    seconds: float
    verdict: str
    is_doubtful: bool
    first: str
    waited: float


def by_command(folder: Path, num_threads: int, budget_s: float) -> Results:
    """A run as `attnbench run FILE:attention` does it, without reports."""
    settings = [f"{axis}={value}" for axis, value in (SETTINGS | {"num_threads": num_threads}).items()]
    file = folder / "mine.py"
    file.write_text(SOURCE, encoding="utf-8")
    selection = build_plan(
        sweep="quick",
        settings=(*settings, "scope=attention", "dtype=float32"),
        is_exact=True,
        implementations=(f"{file}:{NAME}",),
        budget_s=budget_s,
        metrics=(LATENCY,),
    )
    execute(selection, folder / "run", lambda _: None, stages=("check", "time"))
    return read(folder / "run")


def by_fixture(num_threads: int, budget_s: float) -> Results:
    """The same by the pytest fixture, in this process."""
    namespace: dict[str, object] = {}
    exec(SOURCE, namespace)  # noqa: S102 - our own source
    bench = AttentionBench(seed=0)
    return bench(namespace[NAME], budget_s=budget_s, num_threads=num_threads, **SETTINGS).results  # type: ignore[arg-type]


def measured(way: str, num_threads: int, busy: int, budget_s: float) -> Row:
    """One session, with that many processes that keep the machine busy."""
    with busy_processes(busy), tempfile.TemporaryDirectory(prefix="attnbench-neighbours-") as name:
        results = (
            by_command(Path(name), num_threads, budget_s) if way == "command" else by_fixture(num_threads, budget_s)
        )
    (record,) = (each for each in results.records if each.implementation == NAME)
    seconds = [sample.value for sample in record.samples(LATENCY)]
    verdicts = ", ".join(str(each.verdict) for each in comparisons(results)) or str(record.status)
    said = next(iter(story.troubles(results)), "")
    time_s = statistics.median(seconds) if seconds else float("nan")
    return Row(
        way,
        num_threads,
        busy,
        time_s,
        verdicts,
        bool(doubts(results)),
        said,
        max(waiting(results).values(), default=0.0),
    )


def page(rows: list[Row]) -> tuple[str, bool]:
    """The page, and whether every time is right, or doubtful and without a verdict."""
    quiet = {(row.way, row.num_threads): row.seconds for row in rows if not row.busy}
    table, is_fine = [], True
    for row in rows:
        factor = row.seconds / quiet.get((row.way, row.num_threads), row.seconds)
        is_right = abs(factor - 1) <= ALLOWED
        is_silent = row.is_doubtful and row.verdict == "undecided"
        is_fine &= is_right or is_silent
        table.append({
            "measured by": row.way,
            "threads": str(row.num_threads),
            "busy neighbours": str(row.busy),
            "time of a call": show(row.seconds, "s"),
            "to the quiet time": f"{factor:.2f}",
            "samples that waited": percent(row.waited),
            "verdict": row.verdict,
            "as asked": "yes" if is_right or is_silent else "NO",
            "said first": row.first or "nothing",
        })  # fmt: skip
    text = f"""# A busy neighbour

Written by `python -m studies.trust.neighbours` on {os.cpu_count()} processors. The true verdict is "slower": a
textbook function next to `sdpa`. A session is as asked if its time is within {percent(ALLOWED)} of the quiet
one, or if a warning is the first thing said and there is no verdict.

{markdown_table(table)}
"""
    return text, is_fine


def study(
    *,
    way: Annotated[str, typer.Option(help="command or fixture; default: both.")] = "",
    threads: Annotated[int, typer.Option(help="Threads of the workload; default: one, and two.")] = 0,
    budget_s: Annotated[float, typer.Option("--budget", help="Seconds of each session.")] = 6.0,
    to: Annotated[Path, typer.Option(help="The folder of the page.")] = Path("results/gallery/trust"),
) -> None:
    """Measure next to 0, 1 and 2 busy processes; exit 1 if a time is wrong without a warning."""
    ways, numbers = [way] if way else WAYS, [threads] if threads else NUM_THREADS
    kept = to / "neighbours.json"
    rows = [Row(*each) for each in json.loads(kept.read_text(encoding="utf-8"))] if kept.exists() else []
    rows = [row for row in rows if row.way not in ways or row.num_threads not in numbers]
    rows += [measured(each, number, busy, budget_s) for each in ways for number in numbers for busy in BUSY]
    rows.sort(key=lambda row: row[:3])
    to.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    text, is_fine = page(rows)
    (to / "neighbours.md").write_text(text, encoding="utf-8")
    typer.echo(text)
    raise typer.Exit(int(not is_fine))


if __name__ == "__main__":
    typer.run(study)
