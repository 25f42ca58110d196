"""`attnbench compare`: measure two states of the code side by side in one session."""

from pathlib import Path

import typer

from attnbench.analysis.conclusion import Conclusion, Ending
from attnbench.analysis.results import Results
from attnbench.commands import OUTPUT, Command, running, terminal
from attnbench.commands.options import TimingOptions
from attnbench.processes import execution, revisions
from attnbench.reports import exit_status
from attnbench.storage.events import Plan

OPTIONS = TimingOptions(sweep="sides")
SKIP = 125
"""The exit code that makes `git bisect run` skip a revision. Source: https://git-scm.com/docs/git-bisect"""


def compare(
    base: str = "",
    candidate: str = "",
    *,
    options: TimingOptions = OPTIONS,
    results: Path = Path("results"),
    resume: str | None = None,
    is_bisecting: bool = False,
) -> Conclusion | int:
    """Compare two states of the code side by side: revisions, folders, environments or files.

    Two stored runs are compared by `attnbench gate`.

    Options:
        base: rev:REVISION, rev:WORKTREE, env:FOLDER, a folder, a python, or FILE.py:NAME.
        candidate: Written like BASE.
        is_bisecting (--bisect): Exit as `git bisect run` wants it: 0 good, 1 bad, 125 if it cannot be judged.

    Examples:
        attnbench compare rev:main rev:WORKTREE -i mine.py:attention
        attnbench compare old.py:attention new.py:attention --set seq_len=512
        git bisect run attnbench compare rev:v1.0 rev:WORKTREE -i mine.py:attention --bisect
    """
    try:
        measured = _measured(base, candidate, options, results, resume)
    except Exception as error:  # any other code from 1 to 127 would mean a bad revision
        if not is_bisecting or isinstance(error, typer.Exit):
            raise
        typer.echo(f"cannot be judged: {error}", err=True)
        return SKIP
    answers = {record.status for record in measured.records if record.arm.side == "candidate"}
    end = exit_status.of_sides(measured)
    running.print_report(measured, end, lambda: terminal.print_results(measured))
    is_open = end.ending in {Ending.inconclusive, Ending.invalid} or answers.isdisjoint({"ok", "disagrees"})
    if is_bisecting and is_open:
        typer.echo(end.sentence, err=OUTPUT.is_json)
        return SKIP
    return end


def _measured(base: str, candidate: str, options: TimingOptions, results: Path, resume: str | None) -> Results:
    if resume is not None:
        folder, planned = running.to_resume(options, resume, results, "compare", {"base", "candidate"})
        _require_sides(planned, base, candidate, options.named, folder)
    elif not base or not candidate:
        raise ValueError(f"give two sides, BASE and CANDIDATE: each is {revisions.FORMS}")
    else:
        fields, folder = options.fields(), execution.new_folder(results, "compare")
        is_apart = fields.get("isolation") == "process" or options.is_refereed
        planned = revisions.plan(base, candidate, {"isolation": "shared"} | fields, folder, is_apart=is_apart)
    how = "in processes of its own" if planned.has_runners else "in one process with the other"
    running.print_note(f"shapes: {len(planned.workloads)}, each side {how}, into {folder}")
    with revisions.checked_out(planned, folder):
        return running.measure(planned, folder)


def _require_sides(resumed: Plan, base: str, candidate: str, named: list[str], folder: Path) -> None:
    """Check that the user who resumes a comparison named both compared states, and all files outside them, again.

    A journal may come from someone else, so it must not decide which code runs.

    Raises:
        ValueError: something was not named again; the message says what to type.
    """
    assert resumed.sides is not None
    if not (base and candidate and revisions.are_as_given(resumed.sides, (base, candidate), folder)):
        again = f"type {resumed.resume_command(folder.name)} if you trust it"
        raise ValueError(f"a journal does not decide which sides are compared: {again}")
    for side in (resumed.sides.base, resumed.sides.candidate):
        running.require_named(resumed, side.implementations.values(), [side.given, *named], side.root)


COMMAND = Command(compare, order=25)
