"""`attnbench report`: regenerate every report of stored runs."""

from pathlib import Path
from typing import Annotated

import typer

from attnbench.commands import Command, ExitCode
from attnbench.commands.options import OpenPage, ResultsFolder


def report(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Names or folders. Default: newest.")
    ] = None,
    *,
    results: ResultsFolder = Path("results"),
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Write here, with a copy of the journal.")] = None,
    open_page: OpenPage = False,
) -> None:
    """Rebuild every report of stored runs. Needs no torch."""
    from attnbench.analysis.results import read
    from attnbench.commands.running import finished, write_reports
    from attnbench.storage.journal import copy_journal, find_run, newest_run

    folders = [find_run(name, results) for name in runs or ()] or [newest_run(results)]
    if to is not None and len(folders) > 1:
        raise ValueError("--to takes one run: name a single RUN")
    failed = False
    for folder in folders:
        stored = read(folder)
        target = to or stored.folder
        if to is not None and to.resolve() != stored.folder.resolve():
            copy_journal(stored.folder, to)
        with finished(stored.folder):
            failed |= write_reports(stored, target)
        typer.echo(f"Reports and plots: {target}")
        if open_page:
            typer.launch(str((target / "report.html").resolve()))
    raise typer.Exit(ExitCode.finding if failed else ExitCode.passed)


COMMAND = Command(function=report, order=50)
