"""`attnbench history`: a metric over stored runs, with its change points."""

import json
from pathlib import Path
from typing import Annotated

import typer

from attnbench.commands import Command
from attnbench.commands.options import AsJson, ResultsFolder


def history(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PATH]...", help="Run folders, journals, or folders of them. Default: --results."),
    ] = None,
    *,
    metric: Annotated[
        str,
        typer.Option(metavar="NAME", help="ratio (to the baseline of the run), latency, error_ratio, peak_memory, ..."),
    ] = "ratio",
    implementation: Annotated[
        list[str] | None, typer.Option("--implementation", "-i", metavar="NAME", help="May be repeated. Default: all.")
    ] = None,
    workload: Annotated[str, typer.Option(metavar="GLOB", help="Ids of workloads, as in *-t512-*.")] = "*",
    smallest: Annotated[
        float, typer.Option(min=0.0, metavar="PERCENT", help="A change of level by less does not matter.")
    ] = 2.0,
    results: ResultsFolder = Path("results"),
    as_json: AsJson = False,
) -> None:
    """Follow a metric over stored runs, on each machine, and say where its level changed. Needs no torch."""
    from attnbench.analysis.history import follow
    from attnbench.commands import terminal
    from attnbench.reports import history as report
    from attnbench.units import plain

    series, notes = follow(
        paths or [results], metric, implementations=implementation or (), workload=workload, smallest=smallest / 100
    )
    for note in notes:
        typer.echo(f"note: {plain(note)}", err=True)
    if as_json:
        entries = [
            {name: each.cell[name] for name in ("workload", "fingerprint")} | {"metric": metric, **report.row(each)}
            for each in series
        ]
        typer.echo(json.dumps(entries, indent=2))
        return
    for heading, rows in report.headings(series).items():
        typer.echo(f"\n{metric}: {heading}")
        terminal.print_table(tuple(report.row(rows[0])), [tuple(report.row(each).values()) for each in rows])


COMMAND = Command(
    function=history,
    order=70,
    examples=(
        "attnbench history",
        "attnbench history --metric peak_memory_bytes results/runs",
    ),
)
