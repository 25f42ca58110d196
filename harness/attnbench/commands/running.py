"""Shared parts of the commands that run something: progress, interruption, resuming, and reports."""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer

from attnbench import plugins, reports
from attnbench.analysis.conclusion import Conclusion
from attnbench.analysis.results import Results, judge, read
from attnbench.cluster import shares
from attnbench.commands import OUTPUT, ExitCode
from attnbench.commands.frame import exit_code, present
from attnbench.commands.options import SelectionOptions
from attnbench.commands.terminal import print_results
from attnbench.console import watching
from attnbench.devices import device
from attnbench.processes import execution
from attnbench.processes.execution import Session
from attnbench.processes.worker_client import Template
from attnbench.reports import verdict
from attnbench.storage.events import Plan
from attnbench.storage.journal import Unstored, find_run
from attnbench.units import sanitize_line


def execute(
    plan: Plan,
    folder: Path,
    stages: Collection[str] = execution.STAGES,
    *,
    hint: str = "",
    cluster: str = "",
    stops_when_wrong: bool = False,
    then: Callable[[Session], object] | None = None,
    templates: Sequence[Template] = (),
    unstored: Unstored | None = None,
    show_partial: Callable[[Results], object] = lambda _: None,
) -> Results:
    """Run a plan to its end here, or on the hosts of a Ray cluster, with progress; return the results.

    Raises:
        ValueError: the folder cannot be written, its journal is damaged, or no worker or host can start. If a disk is
            full, `hint` says how to continue.
        typer.Exit: the user interrupted the run; `show_partial` got the results so far, and `hint` was printed.
    """
    note_untried(workload.device for workload in plan.workloads)
    try:
        with interruptible(hint, lambda: show_partial(read(folder))):
            if cluster:
                shares.sweep(plan, folder, cluster, print_note)
            else:
                with watching(is_quiet=OUTPUT.is_quiet, is_verbose=OUTPUT.is_verbose) as watch:
                    execution.execute(
                        plan,
                        folder,
                        watch,
                        stages,
                        stops_when_wrong=stops_when_wrong,
                        then=then,
                        templates=templates,
                        unstored=unstored,
                    )
    except OSError as error:
        if not folder.is_dir():
            raise ValueError(f"{folder} was removed during the run: start a new run") from None
        again = "; ".join(filter(None, ["free some room or fix it", hint]))
        raise ValueError(f"cannot write to {error.filename or folder}: {error.strerror}; {again}") from None
    return judge(folder, unstored.state) if unstored else read(folder)


def measure(plan: Plan, folder: Path, *, cluster: str = "") -> Results:
    """Run a plan, write its usual reports, and return the results.

    An interruption prints the results so far, and how to continue; errors are those of `execute`.
    """
    hint = f"{how_to_resume(plan, folder)}{f' --cluster {cluster}' * bool(cluster)}"
    with interruptible(hint):
        measured = execute(plan, folder, hint=hint, cluster=cluster, show_partial=print_partial)
        write_reports(measured)
    return measured


def write_reports(results: Results, to: Path | None = None) -> bool:
    """Write the usual reports (reports.write_usual), and print failures; return whether any report failed."""
    failed = reports.write_usual(results, to)
    for each in failed:
        typer.echo(f"warning: {each}", err=True)
    return bool(failed)


@contextmanager
def interruptible(hint: str, show: Callable[[], object] = lambda: None) -> Iterator[None]:
    """If the user interrupts the code inside the context, call `show`, print the hint, and exit.

    Raises:
        typer.Exit: the user interrupted the code.
    """
    try:
        yield
    except KeyboardInterrupt:
        with suppress(ValueError, OSError):  # there may be no results yet
            show()
        if hint:
            typer.echo(sanitize_line(hint), err=True)
        raise typer.Exit(ExitCode.interrupted) from None


def print_partial(results: Results) -> None:
    """Write the reports of an interrupted run, and print its screen, if anything was checked."""
    if results.records and not OUTPUT.is_json:
        write_reports(results)
        print_results(results)


def how_to_resume(plan: Plan, folder: Path) -> str:
    """Return a hint on how to continue an unfinished run, with the command."""
    return f"finished cells are kept; continue with: {plan.resume_command(str(folder))}"


def note_untried(names: Iterable[str]) -> None:
    """Print a note on each device on which attnbench has never been tried: what should work there."""
    for name in sorted({*names}):
        if words := device(name).untried:
            typer.echo(f"{name}: untried. {words}.", err=True)


def print_note(text: str) -> None:
    """Print a note, which is neither an answer nor a warning, on standard error; nothing with --quiet."""
    if not OUTPUT.is_quiet:
        typer.echo(text, err=True)


def to_resume(
    selected: SelectionOptions, resume: str, results: Path, command: str, again: Collection[str] = ()
) -> tuple[Path, Plan]:
    """Return the folder and the plan of the run that `command` continues; `again` lists options allowed with --resume.

    Raises:
        ValueError: there is no such run, or it cannot be continued this way: the message says how.
    """
    output = {"--json", "--quiet", "--verbose"}
    if more := sorted(selected.typed - {"names", "--implementation", "--resume", "--results", *output, *again}):
        raise ValueError(f"--resume continues a run as planned: leave out {', '.join(more)}")
    folder = find_run(resume, results)
    plan = read(folder).plan
    plugins.require_known("metric", plan.metrics, plugins.plugs("attnbench.metrics", "METRIC"))
    if plan.command != command:
        raise ValueError(f"{resume} was begun by attnbench {plan.command}: continue with {plan.resume_command(resume)}")
    if plan.sides is None:
        require_named(plan, plan.implementations, selected.named)
        plugins.check_specs(plan.implementations)
    return folder, plan


def require_named(plan: Plan, specs: Iterable[str], named: Iterable[str], root: str = "") -> None:
    """Check that the user named each file among the specs of a stored plan again, except files below `root`.

    A journal may come from someone else, so it must not decide which code runs.

    Raises:
        ValueError: a file was not named; the message says what to type.
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
            raise ValueError(f"a journal never decides which code runs, and this one names {spec}: {again}")


def print_report(
    results: Results,
    conclusion: Conclusion,
    show: Callable[[], object],
    **more: Any,  # noqa: ANN401 - other parameters of reports.verdict.report
) -> None:
    """With --json, print the verdict for programs (docs/verdict.schema.json); otherwise call `show`."""
    is_typed = len(sys.argv) > 1 and not sys.argv[1].startswith("-")
    words = sys.argv[1:] if is_typed else [results.plan.command]
    present(lambda: verdict.report(results, conclusion, int(exit_code(conclusion)), words, **more), show)
