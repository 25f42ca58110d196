"""`attnbench report`: regenerate every report of stored runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbench.commands import Command, ExitCode
from attnbench.commands.options import AsJson, OpenPage, ResultsFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnbench.analysis.results import Results


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Names or folders; of several, one page of all. Default: newest."),
    ] = None,
    *,
    results: ResultsFolder = Path("results"),
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Write here, with a copy of the journal.")] = None,
    are_hosts: Annotated[
        bool,
        typer.Option("--hosts", help="The runs are of one plan on several machines: judge each kind of them."),
    ] = False,
    open_page: OpenPage = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild every report of a stored run, or write one page that shows several side by side. Needs no torch."""
    from attnbench.analysis.hosts import boots, parts_of, require_machines, shown, together
    from attnbench.analysis.results import read
    from attnbench.commands import running
    from attnbench.reports import hosts, story
    from attnbench.storage.files import put
    from attnbench.storage.journal import copy_journal, find_run, newest_run

    first, *others = [find_run(name, results) for name in runs or ()] or [newest_run(results)]
    stored, more = shown(read(first)), [shown(read(other)) for other in others]
    target = to or (stored.folder / TOGETHER if more else stored.folder)
    failed = False
    parts: dict[str, Results] = {}
    for name, run in named([stored, *more]).items() if are_hosts else ():
        own = parts_of(run)
        parts |= {f"{name}/{host}": part for host, part in own.items()} if len(own) > 1 else {name: run}
    require_machines(parts)
    across = together(parts) if are_hosts else None
    if unknown := [name for name, part in parts.items() if not boots(part) and not part.hosts]:
        running.note(f"warning: {', '.join(unknown)}: not known on which machine; make sure that each is of another")
    if more:
        target.mkdir(parents=True, exist_ok=True)
        put(target / PAGE, story.page(stored, more))
    else:
        if to is not None and to.resolve() != stored.folder.resolve():
            copy_journal(stored.folder, to)
        with running.finished(stored.folder):
            failed = running.write_reports(stored, target)
    if across is not None:
        put(target / HOSTS, hosts.text(across))
    page = target / PAGE
    if as_json:
        typer.echo(json.dumps({"folders": [str(target)], "failed": failed}, indent=2))
    else:
        if not more:
            typer.echo(f"Reports and plots: {target}")
        if across is not None:
            typer.echo("\n".join([*hosts.sentences(across), f"A verdict for each kind of host: {target / HOSTS}"]))
        typer.echo(f"One page that you can send to anybody, complete in itself: {page}")
    if open_page:
        typer.launch(str(page.resolve()))
    raise typer.Exit(ExitCode.finding if failed else ExitCode.passed)


def named(runs: "Sequence[Results]") -> "dict[str, Results]":
    """Runs of several hosts by the names of their folders.

    Raises:
        ValueError: two have the same name.
    """
    found = {run.folder.name: run for run in runs}
    if len(found) < len(runs):
        twice = next(name for name in found if sum(run.folder.name == name for run in runs) > 1)
        raise ValueError(
            f"two runs are named {twice}, and --hosts takes one for each host: give their folders own names"
        )
    return found


PAGE, HOSTS, TOGETHER = "report.html", "hosts.md", "together"
"""The page, what hosts say together, and below the first of several runs the folder that both are written to."""
COMMAND = Command(
    function=report,
    order=50,
    examples=(
        "attnbench report",
        "attnbench report RUN --open",
        "attnbench report RUN --to shared",
        "attnbench report RUN_A RUN_B --open",
        "attnbench report RUN_A RUN_B RUN_C --hosts",
    ),
)
