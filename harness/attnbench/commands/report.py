"""`attnbench report`: the reports of stored runs, or their cells in the format of another tool."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from attnbench.commands import Command, ExitCode
from attnbench.commands.options import AsJson, OpenPage, ResultsFolder

if TYPE_CHECKING:
    from collections.abc import Sequence


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Names or folders; of several, one page of all. Default: newest."),
    ] = None,
    *,
    results: ResultsFolder = Path("results"),
    to: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write to this folder, with a copy of the journal; with --format, a file."),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="No reports, but cells for another tool, or pictures. csv: a row for each. pytest-benchmark: for its "
            "`compare`. customSmallerIsBetter: for github-action-benchmark. "
            "flashinfer-trace: for flashinfer-bench, a trace in each line. latency_plot, memory_plot, "
            "ratio_plot: SVG and PNG, in the run or the folder --to.",
        ),
    ] = None,
    is_salvaged: Annotated[
        bool, typer.Option("--salvage", help="Write the intact parts of a damaged RUN into a new one, RUN-salvaged.")
    ] = False,
    open_page: OpenPage = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild the reports of a stored run, or write one page that shows several side by side. Needs no torch."""
    from attnbench.analysis.results import read
    from attnbench.commands import running
    from attnbench.reports import story
    from attnbench.storage.files import put
    from attnbench.storage.journal import copy_journal, find_run, newest_run

    if (is_salvaged or kind is not None) + open_page + (is_salvaged and kind is not None) > 1:
        raise ValueError("--salvage, --format and --open exclude one another: give one of them")
    if is_salvaged:
        if len(runs or ()) != 1:
            raise ValueError("--salvage takes one damaged run: name it, as in attnbench report RUN --salvage")
        _salvage((runs or [])[0], results, to, as_json=as_json)
    if kind is not None:
        _export(runs or [], results, kind, to, as_json=as_json)
    first, *others = [find_run(name, results) for name in runs or ()] or [newest_run(results)]
    stored, more = read(first), [read(other) for other in others]
    target = to or (stored.folder / TOGETHER if more else stored.folder)
    failed = False
    if more:
        target.mkdir(parents=True, exist_ok=True)
        put(target / PAGE, story.page(stored, more))
    else:
        if to is not None and to.resolve() != stored.folder.resolve():
            copy_journal(stored.folder, to)
        with running.finished(stored.folder):
            failed = running.write_reports(stored, target)
    page = target / PAGE
    if as_json:
        typer.echo(json.dumps({"folders": [str(target)], "failed": failed}, indent=2))
    else:
        typer.echo(f"Report, complete in one file: {page}")
    if open_page:
        typer.launch(str(page.resolve()))
    raise typer.Exit(ExitCode.finding if failed else ExitCode.passed)


def _export(runs: "Sequence[str]", results: Path, kind: str, to: Path | None, *, as_json: bool) -> NoReturn:
    """Write the cells of runs in the format of another tool, to a file or the terminal."""
    from attnbench.analysis.results import read
    from attnbench.plugins import plugs, unknown
    from attnbench.reports.exports import WRITERS
    from attnbench.storage.files import put, writing_to
    from attnbench.storage.journal import find_run, newest_run

    drawn = {name: each for name, each in plugs("attnbench.reports", "REPORT").items() if not each.is_usual}
    if kind not in {*WRITERS, *drawn}:
        raise ValueError(unknown("format", kind, [*WRITERS, *drawn]))
    folders = [find_run(name, results) for name in runs] or [newest_run(results)]
    if len(folders) > 1 and kind in {"pytest-benchmark", *drawn}:
        raise ValueError(f"--format {kind} holds one run: name a single RUN")
    if kind in drawn:
        target = to or folders[0]
        with writing_to(target):
            paths = [str(path) for path in drawn[kind].write(read(folders[0]), target)]
        typer.echo(json.dumps({"format": kind, "files": paths}) if as_json else "\n".join(paths or ["nothing to draw"]))
        raise typer.Exit(ExitCode.passed)
    text = WRITERS[kind]([read(folder) for folder in folders])
    if to is not None:
        with writing_to(to.parent):
            put(to, text)
    written = {"format": kind, "num_bytes": len(text.encode()), "file": None if to is None else str(to)}
    if as_json:
        typer.echo(json.dumps(written | ({"text": text} if to is None else {}), indent=2))
    elif to is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"{to} has {written['num_bytes']:,} bytes", err=True)
    raise typer.Exit(ExitCode.passed)


def _salvage(run: str, results: Path, to: Path | None, *, as_json: bool) -> NoReturn:
    """Copy the intact lines of a damaged run into a new one, and print the dropped ones. The damaged run is kept."""
    from attnbench.storage import salvage as storage
    from attnbench.storage.journal import find_run

    given = Path(run)
    saved = storage.salvage(given if given.is_file() else find_run(run, results), to)
    if as_json:
        shown = {
            "folder": str(saved.folder) if saved.is_damaged else None,
            "num_kept": saved.num_kept,
            "dropped": {str(number): wrong for number, wrong in saved.dropped.items()},
            "gaps": list(saved.gaps),
        }
        typer.echo(json.dumps(shown, indent=2))
        raise typer.Exit(ExitCode.passed)
    if not saved.is_damaged:
        typer.echo(f"{run} is intact: all of its {saved.num_kept} lines are; nothing was written")
        raise typer.Exit(ExitCode.passed)
    typer.echo(f"{saved.folder} has the {saved.num_kept} lines that are intact; {len(saved.dropped)} were left out:")
    for number, wrong in list(saved.dropped.items())[:MOST_SHOWN]:
        typer.echo(f"  line {number}: {wrong}")
    if (left := len(saved.dropped) - MOST_SHOWN) > 0:
        typer.echo(f"  and {left} more")
    if saved.gaps:
        places = ", ".join(map(str, saved.gaps[:MOST_SHOWN])) + ", ..." * (len(saved.gaps) > MOST_SHOWN)
        typer.echo(f"changed or gone is what came before line {places}")
    typer.echo("A lost line may have been a failure, so no gate takes this run. Go on with it by")
    typer.echo(f"  {saved.plan.resume_command(str(saved.folder))}")
    raise typer.Exit(ExitCode.passed)


MOST_SHOWN = 10
PAGE, TOGETHER = "report.html", "together"
"""The page of several runs, and its folder below the first of them."""
COMMAND = Command(
    function=report,
    order=50,
    examples=(
        "attnbench report",
        "attnbench report RUN --open",
        "attnbench report RUN --to shared",
        "attnbench report RUN_A RUN_B --open",
        "attnbench report RUN --format csv --to cells.csv",
        "attnbench report RUN --salvage",
    ),
)
