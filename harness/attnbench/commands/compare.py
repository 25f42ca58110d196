"""`attnbench compare`: two states of the code, side by side in one session; or two stored runs beside one another."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from attnbench.commands.ending import FINDING, INCONCLUSIVE, INVALID, write_reports
from attnbench.commands.judging import OutputFolder, ThresholdsFile, read, show
from attnbench.commands.options import (
    AllocatorMode,
    AsJson,
    Budget,
    Cache,
    CacheMode,
    CallLimit,
    MemoryLimit,
    ResultsFolder,
    Seed,
    Settings,
    SmallestEffect,
    Timeout,
)
from attnbench.commands.run import earlier, given
from attnbench.commands.sides import planned_anew, side_by_side

if TYPE_CHECKING:
    from attnbench.analysis.results import Results
    from attnbench.storage.events import Plan

OF_STORED = {"base", "candidate", "thresholds", "to", "results", "as_json"}
"""What may be given beside two stored runs."""
SIDE = "rev:REVISION, rev:WORKTREE, a folder, a python, FILE.py:NAME, or a stored run."


def compare(  # noqa: PLR0913 - one parameter for each option
    context: typer.Context,
    base: Annotated[str, typer.Argument(help=SIDE, show_default=False)] = "",
    candidate: Annotated[str, typer.Argument(help="Likewise.", show_default=False)] = "",
    *,
    sweep: Annotated[str, typer.Option(metavar="NAME|FILE", help="A sweep by name, or a TOML file.")] = "sides",
    settings: Settings = None,
    implementation: Annotated[
        list[str] | None,
        typer.Option(
            "--implementation",
            "-i",
            metavar="NAME|FILE.py:NAME",
            help="What to compare; may be repeated. Default: each file of implementations/ that differs between them.",
        ),
    ] = None,
    thresholds: ThresholdsFile = None,
    to: OutputFolder = None,
    build: Annotated[
        str, typer.Option(metavar="COMMAND", help="Run it in the files of each revision first; they are then apart.")
    ] = "",
    apart: Annotated[bool, typer.Option("--apart", help="Give each side processes of its own.")] = False,
    budget: Budget = None,
    smallest_effect: SmallestEffect = None,
    cache: Cache = CacheMode.warm,
    allocator: Annotated[
        AllocatorMode | None,
        typer.Option(help="What becomes of memory that is freed. Default: system; where the sides are apart, retain."),
    ] = None,
    call_limit: CallLimit = None,
    memory_limit: MemoryLimit = 0.0,
    timeout: Timeout = 60.0,
    results: ResultsFolder = Path("results"),
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with this comparison, as it was planned.")
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Compare two states of the code side by side: revisions, folders, environments or files; or two stored runs.

    Of stored runs it says what got worse, and what could have been seen, and passes whatever that is: `attnbench gate`
    does not.
    """
    from attnbench.processes.planning import Selection
    from attnbench.processes.sides import Asked

    if resume is None and (found_runs := _stored_runs((base, candidate), results)):
        if more := given(context) - OF_STORED:
            raise ValueError(f"two stored runs are compared as they are: leave out {', '.join(sorted(more))}")
        _compare_stored(found_runs, thresholds, as_json=as_json, to=to)
        return
    if thresholds is not None or to is not None:
        raise ValueError(
            "--thresholds and --to are for two stored runs: give them to attnbench gate after this comparison"
        )
    if resume is not None:
        folder, planned = earlier(context, resume, results)
        _require_same_sides(planned, resume, build)
    else:
        selection = Selection(
            sweep=sweep,
            settings=settings or (),
            implementations=implementation or (),
            budget_s=budget,
            smallest_effect=smallest_effect,
            call_limit_s=call_limit,
            timeout_s=timeout,
            memory_limit_bytes=int(memory_limit * 2**30),
            seed=seed,
            cache=cache,
            allocator=allocator,
        )
        asked = Asked(base=base, candidate=candidate, selection=selection, is_apart=apart, build=build)
        folder, planned = planned_anew(asked, results)
    found = side_by_side(planned, folder)
    failures = write_reports(found, folder)
    _tell(found, as_json=as_json)
    conclude(found, failures=failures)


def _require_same_sides(planned: "Plan", resume: str, build: str) -> None:
    """A command is never taken from a journal, which may be anybody's: it is typed again."""
    if planned.sides is None:
        raise ValueError(f"{resume} has no two sides: go on with attnbench run --resume {resume}")
    if planned.sides.build != build:
        option = planned.sides.build_option
        begun = f"with{option}: give just that again" if option else "without --build: leave it out"
        raise ValueError(f"{resume} was begun {begun}")


def _stored_runs(names: tuple[str, str], results: Path) -> "list[Results]":
    """The two runs that the names are of; empty where they are not names of two runs."""
    from attnbench.analysis.gate import stored

    try:
        paths = [stored.locate(name, results) for name in names]
    except ValueError:
        return []
    return [read(path) for path in paths]


def _compare_stored(runs: "list[Results]", thresholds: Path | None, *, as_json: bool, to: Path | None) -> None:
    from attnbench.analysis.gate.decision import judge
    from attnbench.analysis.gate.thresholds import load

    before, after = runs
    show(judge(before, after, load(thresholds)), after, as_json=as_json, to=to)


def _tell(found: "Results", *, as_json: bool) -> None:
    from attnbench.commands import terminal

    if as_json:
        typer.echo(json.dumps(terminal.summary(found) | summary(found), indent=2))
        return
    terminal.print_sides(found)
    typer.echo(f"\nReports and plots: {found.folder}")


def summary(found: "Results") -> dict[str, object]:
    """What a program wants to know beside the cells."""
    from attnbench.analysis.overall import losses, suite

    whole = suite(found)
    told = (
        None
        if whole is None
        else {
            "ratio": whole.ratio.point,
            "low": whole.ratio.low,
            "high": whole.ratio.high,
            "verdict": str(whole.verdict),
            "minimum_detectable_effect": whole.minimum_detectable_effect,
        }
    )
    return {"findings": losses(found), "suite": told}


def conclude(found: "Results", *, failures: bool) -> NoReturn:
    """Exit as the comparison deserves: a loss counts whatever the noise; a slowdown where the session is valid."""
    from attnbench.analysis.comparisons import comparisons
    from attnbench.analysis.overall import losses, suite
    from attnbench.statistics.interference import MANY
    from attnbench.storage.records import Verdict

    if failures or losses(found):
        raise typer.Exit(FINDING)
    if sum(map(len, found.discarded.values())) > MANY * found.num_blocks:
        raise typer.Exit(INVALID)
    whole = suite(found)
    verdicts = [each.verdict for each in comparisons(found)] + ([] if whole is None else [whole.verdict])
    if Verdict.slower in verdicts:
        raise typer.Exit(FINDING)
    raise typer.Exit(INCONCLUSIVE if whole is None or whole.verdict is Verdict.undecided else 0)
