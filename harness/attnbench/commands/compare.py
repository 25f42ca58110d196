"""`attnbench compare`: two states of the code, side by side in one session."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbench.commands import Command, ExitCode
from attnbench.commands.options import AsJson, ResultsFolder, Resume, TimingOptions, conditions_of

if TYPE_CHECKING:
    from attnbench.analysis.results import Results

OPTIONS = TimingOptions(sweep="sides")
SKIP = 125
"""The exit code by which `git bisect run` passes over a revision. Source: https://git-scm.com/docs/git-bisect"""
SIDE = "rev:REVISION, rev:WORKTREE, env:FOLDER, a folder, a python, or FILE.py:NAME."


def compare(
    base: Annotated[str, typer.Argument(help=SIDE, show_default=False)] = "",
    candidate: Annotated[str, typer.Argument(help="Likewise.", show_default=False)] = "",
    *,
    options: TimingOptions = OPTIONS,
    results: ResultsFolder = Path("results"),
    resume: Resume = None,
    is_bisecting: Annotated[
        bool,
        typer.Option("--bisect", help="Exit as `git bisect run` wants it: 0 good, 1 bad, 125 if it cannot be judged."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two states of the code side by side: revisions, folders, environments or files.

    Two stored runs are compared by `attnbench gate`.
    """
    from attnbench.commands import running
    from attnbench.reports import endings

    with _skipping() if is_bisecting else nullcontext():
        measured, has_failed = _compare(base, candidate, options, results, resume, as_json=as_json)
        answers = {record.status for record in measured.records if record.arm.side == "candidate"}
        if is_bisecting and answers.isdisjoint({"ok", "disagrees"}):
            raise ValueError("nothing of the candidate could be called")
        running.finish(endings.of_sides(measured), has_failed=has_failed, is_silent=as_json)


def _compare(
    base: str, candidate: str, options: TimingOptions, results: Path, resume: str | None, *, as_json: bool
) -> tuple["Results", bool]:
    """Measure, and write and print the results; return them, and whether a report failed.

    Raises:
        ValueError: there are no such sides, or they cannot be compared.
    """
    from attnbench.commands import running, terminal
    from attnbench.processes import execution, sides
    from attnbench.reports import endings

    is_apart = conditions_of(options.conditions).get("isolation") == "process"
    folder, resumed = execution.new_folder(results, "compare"), None
    if resume is not None:
        folder, resumed = running.to_resume(options, resume, results, "compare", {"base", "candidate"})
        assert resumed.sides is not None
        if not (base and candidate and sides.are_as_given(resumed.sides, (base, candidate), folder)):
            again = f"type {resumed.resume_command(resume)} if you trust it"
            raise ValueError(f"a journal does not decide which sides are compared: {again}")
        for side in (resumed.sides.base, resumed.sides.candidate):
            named = [side.given, *options.named]
            running.require_named(resumed, side.implementations.values(), named, side.root)
    elif not base or not candidate:
        raise ValueError(f"give two sides, BASE and CANDIDATE: each is {sides.FORMS}")
    with sides.checkouts(folder):
        isolation = "process" if is_apart else "shared"
        planned = resumed or sides.plan(base, candidate, options.fields(isolation=isolation), folder, is_apart=is_apart)
        assert planned.sides is not None
        sides.check_out(planned.sides)
        how = "each side in processes of its own" if planned.sides.is_apart else "both sides in one process"
        running.note(f"{len(planned.workloads)} workload{'s' * (len(planned.workloads) != 1)}, {how}, into {folder}")
        measured = running.execute(planned, folder, kept=running.kept(planned, folder))
    with running.finished(folder):
        failed = running.write_reports(measured, folder)
        if as_json:
            running.print_report(measured, endings.of_sides(measured), has_failed=failed)
        else:
            terminal.print_results(measured)
            terminal.print_changes(measured)
    return measured, failed


@contextmanager
def _skipping() -> Iterator[None]:
    """Turn whatever cannot be judged inside of the context into the exit code that skips a revision."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"cannot be judged: {error}", err=True)
        raise typer.Exit(SKIP) from None
    except typer.Exit as ended:
        if ended.exit_code not in {ExitCode.inconclusive, ExitCode.invalid}:
            raise
        raise typer.Exit(SKIP) from None


COMMAND = Command(
    function=compare,
    order=80,
    examples=(
        "attnbench compare rev:main rev:WORKTREE -i mine.py:attention",
        "attnbench compare old.py:attention new.py:attention --set seq_len=512",
        "git bisect run attnbench compare rev:v1.0 rev:WORKTREE -i mine.py:attention --bisect",
    ),
)
