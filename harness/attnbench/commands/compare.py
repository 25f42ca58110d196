"""`attnbench compare`: two states of the code, side by side in one session; or two stored runs with one another."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbench.commands import Command, ExitCode
from attnbench.commands.options import (
    AsJson,
    GateFolder,
    ResultsFolder,
    Resume,
    ThresholdsFile,
    TimingOptions,
    conditions_of,
    typed,
)

if TYPE_CHECKING:
    from attnbench.analysis.results import Results
    from attnbench.storage.events import Plan

OPTIONS = TimingOptions(sweep="sides")
OF_STORED = {"base", "candidate", "--thresholds", "--to", "--results", "--json", "--quiet", "--verbose"}
OF_STORED |= {"names", "--implementation", "--set"}
"""The arguments and options that two stored runs allow."""
SIDE = "rev:REVISION, rev:WORKTREE, a folder, a python, FILE.py:NAME, or a stored run."


def compare(
    base: Annotated[str, typer.Argument(help=SIDE, show_default=False)] = "",
    candidate: Annotated[str, typer.Argument(help="Likewise.", show_default=False)] = "",
    *,
    options: TimingOptions = OPTIONS,
    thresholds: ThresholdsFile = None,
    to: GateFolder = None,
    results: ResultsFolder = Path("results"),
    resume: Resume = None,
    as_json: AsJson = False,
) -> None:
    """Compare two states of the code side by side: revisions, folders, environments or files; or two stored runs.

    Of stored runs it says what got worse, and what could have been detected, and passes whatever that is: `attnbench
    gate` does not.
    """
    from attnbench.analysis.gate import decision, rulings
    from attnbench.commands import gate, running, terminal
    from attnbench.processes import execution, sides
    from attnbench.reports import endings

    if resume is None and (stored := _stored_runs((base, candidate), results)):
        if more := typed(options.context) - OF_STORED:
            raise ValueError(f"two stored runs are compared as they are: leave out {', '.join(sorted(more))}")
        before, after = gate.narrowed(stored, options.named, options.settings or ())
        gate.show(decision.judge(before, after, rulings.load(thresholds)), as_json=as_json, to=to)
        return
    if thresholds is not None or to is not None:
        raise ValueError(
            "--thresholds and --to are for two stored runs: give them to attnbench gate after this comparison"
        )
    if resume is not None:
        folder, resumed = running.to_resume(
            options.context, resume, results, {"base", "candidate", "names", "--implementation"}
        )
        if resumed.sides is None:
            raise ValueError(f"{resume} has no two sides: go on with {resumed.resume_command(resume)}")
        if not (base and candidate and sides.are_as_given(resumed.sides, (base, candidate), folder)):
            again = f"type {resumed.resume_command(resume)} if you trust it"
            raise ValueError(f"a journal does not decide which sides are compared: {again}")
        for side in (resumed.sides.base, resumed.sides.candidate):
            named = [side.given, *options.named]
            running.require_named(resumed, side.implementations.values(), named, side.root)
        planned: Plan | None = resumed
    else:
        if not base or not candidate:
            raise ValueError(f"give two sides, BASE and CANDIDATE: each is {sides.FORMS}")
        is_apart = conditions_of(options.conditions).get("isolation") == "process"
        fields = options.fields(isolation="process" if is_apart else "shared")
        sides.remove_abandoned(results)
        folder = execution.new_folder(results, "compare")
        planned, same = sides.plan(base, candidate, fields, folder, is_apart=is_apart)
        if same:
            running.note(f"the same on both sides, not compared: {', '.join(same)} (name them with -i to do so)")
    if planned is None:
        typer.echo("nothing to compare: every implementation is the same on both sides")
        raise typer.Exit(ExitCode.passed)
    assert planned.sides is not None
    how = "each side in processes of its own" if planned.sides.is_apart else "both sides in one process"
    plural = "" if len(planned.workloads) == 1 else "s"
    running.note(f"{len(planned.workloads)} workload{plural}, {how}, into {folder}")
    with sides.checked_out(planned, folder):
        measured = running.execute(planned, folder, kept=running.kept(planned, folder))
    with running.finished(folder):
        failed = running.write_reports(measured, folder)
        if as_json:
            typer.echo(json.dumps(terminal.summary(measured) | summary(measured), indent=2))
        else:
            terminal.print_sides(measured)
            typer.echo(f"Report: {measured.folder / 'report.html'}")
    running.finish(endings.of_sides(measured), has_failed=failed, is_silent=as_json)


def _stored_runs(names: tuple[str, str], results: Path) -> "list[Results]":
    """The two runs that the names stand for; empty where they are not names of two runs."""
    from attnbench.analysis.gate import stored
    from attnbench.analysis.results import read

    try:
        paths = [stored.locate(name, results) for name in names]
    except ValueError:
        return []
    return [read(path) for path in paths]


def summary(results: "Results") -> dict[str, object]:
    """What a program needs to know in addition to the cells."""
    from attnbench.analysis.comparisons import losses, whole

    found = whole(results)
    verdict = found and {
        "ratio": found.ratio,
        "low": found.low,
        "high": found.high,
        "verdict": str(found.verdict),
        "reason": found.reason and str(found.reason),
        "margin": found.margin,
        "num_processes": found.effect.num_processes,
        "minimum_detectable_effect": found.detectable,
    }
    return {"findings": losses(results), "suite": verdict}


COMMAND = Command(
    function=compare,
    order=80,
    examples=(
        "attnbench compare rev:main rev:WORKTREE",
        "attnbench compare old.py:attention new.py:attention --set seq_len=512",
        "attnbench compare RUN_A RUN_B -i fused",
    ),
)
