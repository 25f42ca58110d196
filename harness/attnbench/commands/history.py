"""`attnbench history`: follow a metric over stored runs, and find its change points."""

from pathlib import Path

import typer

from attnbench.analysis.history import metric_series
from attnbench.commands import Command, terminal
from attnbench.commands.frame import present
from attnbench.reports import history as report
from attnbench.units import sanitize_line


def history(
    paths: list[Path] | None = None,
    *,
    metric: str = "ratio",
    implementation: list[str] | None = None,
    workload: str = "*",
    results: Path = Path("results"),
) -> None:
    """Follow a metric over stored runs, on each machine, and find where its level changed. Needs no torch.

    Options:
        paths ([PATH]...): Run folders, journals, or folders of them. Default: --results.
        metric (NAME): ratio (to the baseline of the run), latency, error_ratio, peak_memory, ...
        implementation (--implementation -i NAME): May be repeated. Default: all.
        workload (GLOB): Ids of workloads, as in *-t512-*.
    """
    series, notes = metric_series(paths or [results], metric, implementations=implementation or (), workload=workload)
    for note in notes:
        typer.echo(f"note: {sanitize_line(note)}", err=True)
    entries = []
    for each in series:
        cell = {"workload": each.cell["workload"], "fingerprint": each.cell["fingerprint"]}
        entries.append({**cell, "metric": metric, **report.row(each)})

    def show() -> None:
        for heading, rows in report.headings(series).items():
            typer.echo(f"\n{metric}: {heading}")
            terminal.print_table(tuple(report.row(rows[0])), [tuple(report.row(each).values()) for each in rows])

    present(lambda: entries, show)


COMMAND = Command(history, order=120)
