"""`attnbench report`: the reports of a stored run, of several parts of one, or its cells for another tool."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from attnbench.commands import Command, ExitCode
from attnbench.commands.options import AsJson, OpenPage, ResultsFolder

if TYPE_CHECKING:
    from attnbench.analysis.results import Results

MOST_LINES = 10
PAGE = "report.html"


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Names or folders; of several, one report of all. Default: newest. Files of check --report: what "
            "differs between them.",
        ),
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
            help="Only this report: csv, markdown, html, pytest-benchmark, picture, latency_plot, memory_plot or "
            "ratio_plot. Without --to a text is printed, and a picture is put into the run.",
        ),
    ] = None,
    is_salvaged: Annotated[
        bool, typer.Option("--salvage", help="Write the intact parts of a damaged RUN into a new one, RUN-salvaged.")
    ] = False,
    open_page: OpenPage = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild the reports of a stored run. Several runs, such as those of `run --shard`, become one. Needs no torch."""
    from attnbench.analysis.results import read
    from attnbench.commands import running
    from attnbench.reports import stock
    from attnbench.storage.journal import copy_run, find_run

    if (is_salvaged or kind is not None) + open_page + (is_salvaged and kind is not None) > 1:
        raise ValueError("--salvage, --format and --open exclude one another: give one of them")
    files = [Path(run) for run in runs or () if Path(run).suffix == stock.SUFFIX and Path(run).is_file()]
    if files and len(files) == len(runs or ()):
        typer.echo(stock.side_by_side(files), nl=False)
        raise typer.Exit(ExitCode.passed)
    if is_salvaged:
        if len(runs or ()) != 1:
            raise ValueError("--salvage takes one damaged run: name it, as in attnbench report RUN --salvage")
        _salvage((runs or [])[0], results, to, as_json=as_json)
    folders = [find_run(name, results) for name in runs or ()] or [find_run(None, results)]
    stored = read(folders[0] if len(folders) == 1 else _joined(folders))
    if kind is not None:
        _write_one(stored, kind, to, as_json=as_json)
    target = to or stored.folder
    if target.resolve() != stored.folder.resolve():
        copy_run(stored.folder, target)
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


def _joined(folders: Sequence[Path]) -> Path:
    """Join parts of a run into a new one next to the first; return its folder."""
    from attnbench.commands.parts import join
    from attnbench.storage.files import writing_to

    folder = folders[0].with_name(f"{folders[0].name}-joined")
    with writing_to(folder):
        join(folders, folder)
    return folder


def _write_one(stored: "Results", kind: str, to: Path | None, *, as_json: bool) -> NoReturn:
    """Write one report to a file, or a text to the terminal and a picture into the run."""
    from attnbench.plugins import plugs, unknown
    from attnbench.storage.files import put, writing_to

    known = plugs("attnbench.reports", "REPORT")
    if kind not in known:
        raise ValueError(unknown("format", kind, known))
    chosen = known[kind]
    if to is None and chosen.text is not None:
        text = chosen.text(stored)
        typer.echo(json.dumps({"format": kind, "text": text}) if as_json else text, nl=as_json)
        raise typer.Exit(ExitCode.passed)
    with writing_to((to or stored.folder / kind).parent):
        if to is None:
            paths = chosen.write(stored, stored.folder)
        elif chosen.text is not None:
            paths = [put(to, chosen.text(stored))]
        else:
            picture = chosen.draw(stored)
            paths = [] if picture is None else [picture.save(to)]
    files = [str(path) for path in paths]
    typer.echo(json.dumps({"format": kind, "files": files}) if as_json else "\n".join(files or ["nothing to draw"]))
    raise typer.Exit(ExitCode.passed)


def _salvage(run: str, results: Path, to: Path | None, *, as_json: bool) -> NoReturn:
    """Copy the intact lines of a damaged run into a new one, and print the dropped ones. The damaged run is kept."""
    from attnbench.storage import salvage as storage
    from attnbench.storage.journal import find_run

    saved = storage.salvage(Path(run) if Path(run).is_file() else find_run(run, results), to)
    if as_json:
        facts = {
            "folder": str(saved.folder) if saved.is_damaged else None,
            "num_kept": saved.num_kept,
            "dropped": {str(number): wrong for number, wrong in saved.dropped.items()},
            "gaps": list(saved.gaps),
        }
        lines = [json.dumps(facts, indent=2)]
    elif not saved.is_damaged:
        lines = [f"{run} is intact: all of its {saved.num_kept} lines are; nothing was written"]
    else:
        count = f"{saved.folder} has the {saved.num_kept} lines that are intact"
        lines = [f"{count}; {len(saved.dropped)} were left out:"]
        lines += [f"  line {number}: {wrong}" for number, wrong in list(saved.dropped.items())[:MOST_LINES]]
        lines += [f"  and {len(saved.dropped) - MOST_LINES} more"] * (len(saved.dropped) > MOST_LINES)
        places = ", ".join([*map(str, saved.gaps[:MOST_LINES]), *["..."] * (len(saved.gaps) > MOST_LINES)])
        lines += [f"changed or gone is what came before line {places}"] * bool(saved.gaps)
        lines += ["A lost line may have been a failure, so no gate takes this run. Go on with it by"]
        lines += [f"  {saved.plan.resume_command(str(saved.folder))}"]
    typer.echo("\n".join(lines))
    raise typer.Exit(ExitCode.passed)


COMMAND = Command(
    function=report,
    order=50,
    examples=(
        "attnbench report",
        "attnbench report RUN --open",
        "attnbench report RUN --to shared",
        "attnbench report PART_1 PART_2 PART_3",
        "attnbench report RUN --format csv --to cells.csv",
        "attnbench report RUN --salvage",
    ),
)
