"""Shared parts of the commands that run something: progress, interruption, resuming, reports, the end."""

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from attnbench import plugins
from attnbench.analysis.conclusion import Conclusion, Ending
from attnbench.analysis.results import Results, read
from attnbench.commands import VERBOSITY, ExitCode, options
from attnbench.processes import execution
from attnbench.processes.stages import Progress, Watch
from attnbench.storage.events import Plan
from attnbench.storage.journal import find_run
from attnbench.units import plain

SHOWN = ("--json", "--quiet", "--verbose")
"""Options that change the output and nothing else."""
LINE_EVERY_S = 10.0
DRAW_EVERY_S = 0.5
"""The bar is drawn between two steps alone: a thread that draws would take a core from the timed code."""
WIDE = 120
"""Columns of a terminal, from which on the bar is a long one."""
STAGE_WORDS = {
    "predict": "predicting",
    "check": "checking",
    "observe": "seeing what runs",
    "ceilings": "measuring ceilings",
    "time": "timing",
    "choose": "finding the fastest",
    "search": "looking where that changes",
    "trace": "tracing",
}


def execute(
    plan: Plan,
    folder: Path,
    stages: Collection[str] = execution.STAGES,
    *,
    kept: str = "",
    named: Collection[str] = (),
    stops_when_wrong: bool = False,
) -> Results:
    """Run a plan to its end with its progress shown, and read the results.

    Where a prediction leaves out what was `named`, by its spec, that is said at once.

    Raises:
        ValueError: the folder cannot be written, its journal is damaged, or no worker can start. Where a disk is full,
            `kept` says what is left and how to go on.
        typer.Exit: the user interrupted it; `kept` was printed.
    """
    try:
        with watching({plugins.name_of(spec) for spec in named}) as watch:
            execution.execute(plan, folder, watch, stages, stops_when_wrong=stops_when_wrong)
    except KeyboardInterrupt:
        if kept:
            typer.echo(plain(kept), err=True)
        raise typer.Exit(ExitCode.interrupted) from None
    except OSError as error:
        if not folder.is_dir():
            raise ValueError(f"{folder} is gone: it was removed while the run was at work; begin again") from None
        mend = "; ".join(filter(None, ["free some room or mend it", kept]))
        raise ValueError(f"cannot write to {error.filename or folder}: {error.strerror}; {mend}") from None
    if not kept:  # it lies where nobody looks for it
        return read(folder)
    with finished(folder):
        return read(folder)


def execute_on_cluster(plan: Plan, folder: Path, address: str, *, kept: str) -> Results:
    """Run a plan on the hosts of a Ray cluster to its end, and read the results.

    Raises:
        ValueError: no Ray, no cluster, no host, or the folder cannot be written.
        typer.Exit: the user interrupted it; `kept` was printed.
    """
    from attnbench.cluster import driver

    try:
        driver.sweep(plan, folder, address, note)
    except KeyboardInterrupt:
        typer.echo(plain(kept), err=True)
        raise typer.Exit(ExitCode.interrupted) from None
    except OSError as error:
        raise ValueError(f"cannot write to {error.filename or folder}: {error.strerror}; {kept}") from None
    with finished(folder):
        return read(folder)


@contextmanager
def finished(folder: Path) -> Iterator[None]:
    """Within: an interruption finds a run that is measured, and says how to have its reports.

    Raises:
        typer.Exit: the user interrupted it.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"what was measured is kept; write its reports with: attnbench report {folder}", err=True)
        raise typer.Exit(ExitCode.interrupted) from None


def note(text: str) -> None:
    """Say something on standard error that is neither an answer nor a warning."""
    if not VERBOSITY.is_quiet:
        typer.echo(text, err=True)


def kept(plan: Plan, folder: Path) -> str:
    """How to go on with a run that did not come to its end."""
    return f"finished cells are kept; go on with: {plan.resume_command(str(folder))}"


@contextmanager
def watching(named: Collection[str] = ()) -> Iterator[Watch]:
    """A progress bar on a terminal, plain lines elsewhere; and what predictions leave out of those that were named."""
    console = Console(stderr=True)
    stage, shown_s = "", 0.0

    def is_due(progress: Progress, every_s: float) -> bool:
        nonlocal stage, shown_s
        if progress.stage == stage and time.monotonic() - shown_s < every_s:
            return False
        stage, shown_s = progress.stage, time.monotonic()
        return True

    def print_news(progress: Progress) -> bool:
        if progress.wrong:
            found = f"WRONG: {progress.cell}: {progress.wrong.partition('. ')[0]}"
            console.print(
                plain(found), style="bold red", markup=False, highlight=False, soft_wrap=not console.is_terminal
            )
        if progress.left_out and progress.cell.partition(" ")[0] in named:
            console.print(
                f"left out: {progress.cell}: {progress.left_out}", style="yellow", markup=False, highlight=False
            )
        return bool(progress.left_out or progress.wrong)

    def print_line(progress: Progress) -> None:
        if print_news(progress) or VERBOSITY.is_quiet:
            return
        if VERBOSITY.is_verbose and progress.cell:
            text = f"{STAGE_WORDS[progress.stage]} {progress.cell}"
            console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)
        elif not VERBOSITY.is_verbose and is_due(progress, LINE_EVERY_S):
            share = 100 * min(1.0, progress.done / progress.total) if progress.total else 100.0
            parts = [f"{STAGE_WORDS[stage]} {share:.0f} %", _counts(progress), _left(progress), progress.cell]
            console.print(", ".join(filter(None, parts)), markup=False, highlight=False, soft_wrap=True)

    if VERBOSITY.is_quiet or VERBOSITY.is_verbose or not console.is_terminal:
        yield print_line
        return
    whole, rest = Column(no_wrap=True), Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns = (
        TextColumn("[bold]{task.fields[stage]}", table_column=whole),
        BarColumn(bar_width=8 if console.width < WIDE else 24),
        TaskProgressColumn(table_column=whole),
        TextColumn("{task.fields[left]}", table_column=whole),
        TextColumn("{task.fields[counts]}", table_column=whole),
        TextColumn("[dim]{task.description}", table_column=rest),  # it gives way where there is little room
    )
    with Bar(*columns, console=console, transient=True, auto_refresh=False, expand=True) as bar:
        task = bar.add_task("", total=1.0, stage="starting", left="", counts="")

        def draw(progress: Progress) -> None:
            if print_news(progress):
                return
            refresh = is_due(progress, DRAW_EVERY_S)
            bar.update(
                task,
                completed=progress.done,
                total=progress.total,
                description=escape(progress.cell),
                stage=STAGE_WORDS[progress.stage],
                left=_left(progress),
                counts=_counts(progress),
                refresh=refresh,
            )

        yield draw


def _left(progress: Progress) -> str:
    if progress.left_s is None:
        return ""
    minutes, seconds = divmod(round(progress.left_s), 60)
    return f"about {minutes}:{seconds:02d} left"


def _counts(progress: Progress) -> str:
    return " ".join(f"{number} {status}" for status, number in sorted(progress.counts.items()))


def to_resume(context: typer.Context, resume: str, results: Path, again: Collection[str] = ()) -> tuple[Path, Plan]:
    """Folder and plan of the run to go on with; the options in `again` say once more what is executed.

    Raises:
        ValueError: there is no such run, an option would change it, or this version lacks what it measures.
    """
    if more := sorted(options.typed(context) - {"--resume", "--results", *SHOWN, *again}):
        raise ValueError(f"--resume goes on with the run as it was planned: leave out {', '.join(more)}")
    folder = find_run(resume, results)
    plan, known = read(folder).plan, plugins.plugs("attnbench.metrics", "METRIC")
    for metric in plan.metrics:
        if metric not in known:
            raise ValueError(plugins.unknown("metric", metric, known))
    return folder, plan


def require_named(plan: Plan, specs: Iterable[str], named: Iterable[str], root: str = "") -> None:
    """Check that every file among the specs of a stored plan was named again, or lies below a folder that was.

    Raises:
        ValueError: one was not; the message says what to type.
    """

    def place(spec: str) -> tuple[Path | None, str]:
        path, name = plugins.split(plugins.variant(spec)[0])
        return (None if path is None else path.resolve()), name

    known = {place(each) for each in named}
    for spec in specs:
        path, name = place(spec)
        is_below = root and path is not None and path.is_relative_to(Path(root).resolve())
        if path is not None and (path, name) not in known and not is_below:
            again = f"type {plan.resume_command('RUN')} if you trust it"
            raise ValueError(f"a journal does not decide what is executed, and this one names {spec}: {again}")


def write_reports(results: Results, folder: Path) -> bool:
    """Write the usual reports; one that fails is reported and costs the others nothing. Returns whether any failed.

    Raises:
        ValueError: the folder cannot be written.
    """
    failed = False
    for name, plug in plugins.plugs("attnbench.reports", "REPORT").items():
        if not plug.is_usual:
            continue
        try:
            plug.write(results, folder)
        except OSError as error:
            again = f"what was measured is kept: free some, then attnbench report {results.folder}"
            raise ValueError(f"cannot write {error.filename or folder}: {error.strerror}; {again}") from None
        except Exception as error:  # noqa: BLE001 - somebody's report must not cost the others
            failed = True
            typer.echo(f"warning: report {name} failed: {type(error).__name__}: {error}", err=True)
    return failed


def finish(conclusion: Conclusion, *, has_failed: bool = False, is_silent: bool = False) -> NoReturn:
    """Print the last sentence, and exit with the code of its ending; a report that failed is a finding, too."""
    if not is_silent:
        typer.echo(conclusion.sentence)
    elif conclusion.ending is Ending.inconclusive:
        typer.echo(conclusion.sentence, err=True)
    raise typer.Exit(ExitCode.finding if has_failed else EXIT_CODE_OF[conclusion.ending])


EXIT_CODE_OF = {
    Ending.passed: ExitCode.passed,
    Ending.finding: ExitCode.finding,
    Ending.inconclusive: ExitCode.inconclusive,
    Ending.invalid: ExitCode.invalid,
}
