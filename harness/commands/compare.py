"""`attnbench compare`: two states of the code, side by side in one session."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from harness.commands.ending import FINDING, INCONCLUSIVE, INTERRUPTED, INVALID, write_reports
from harness.commands.run import earlier
from harness.options import (
    Allocator,
    AllocatorMode,
    AsJson,
    Budget,
    Cache,
    CacheMode,
    CallLimit,
    Implementations,
    MemoryLimit,
    ResultsFolder,
    Seed,
    Settings,
    Timeout,
)

if TYPE_CHECKING:
    from harness.events import Plan
    from harness.selection import Selection
    from harness.store import Results

SIDE = "rev:REVISION, rev:WORKTREE, a folder, a python, or FILE.py:NAME."


def compare(  # noqa: PLR0913 - one parameter for each option
    context: typer.Context,
    base: Annotated[str, typer.Argument(help=SIDE, show_default=False)] = "",
    candidate: Annotated[str, typer.Argument(help="Likewise.", show_default=False)] = "",
    *,
    sweep: Annotated[str, typer.Option(metavar="NAME|FILE", help="A sweep by name, or a TOML file.")] = "sides",
    settings: Settings = None,
    implementation: Implementations = None,
    apart: Annotated[bool, typer.Option("--apart", help="Give each side processes of its own.")] = False,
    budget: Budget = None,
    cache: Cache = CacheMode.warm,
    allocator: Allocator = AllocatorMode.system,
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
    """Compare two states of the code side by side: revisions, folders, environments or files."""
    from harness.selection import Selection

    if resume is not None:
        folder, planned = earlier(context, resume, results)
        if planned.sides is None:
            raise ValueError(f"{resume} has no two sides: go on with attnbench run --resume {resume}")
    else:
        selection = Selection(
            sweep=sweep,
            settings=settings or (),
            implementations=implementation or (),
            budget_s=budget,
            call_limit_s=call_limit,
            timeout_s=timeout,
            memory_limit_bytes=int(memory_limit * 2**30),
            seed=seed,
            cache=cache,
            allocator=allocator,
        )
        folder, planned = _planned(base, candidate, selection, results, is_apart=apart)
    found = side_by_side(planned, folder)
    failures = write_reports(found, folder)
    _tell(found, as_json=as_json)
    conclude(found, failures=failures)


def _planned(
    base: str, candidate: str, selection: "Selection", results: Path, *, is_apart: bool
) -> tuple[Path, "Plan"]:
    """Folder and plan of a new comparison; leaves with 0 where all is the same.

    Raises:
        ValueError: whatever was given that cannot be.
    """
    from harness import run, sides

    if not base or not candidate:
        raise ValueError(f"give two sides, BASE and CANDIDATE: each is {sides.FORMS}")
    sides.sweep_up(results)
    folder = run.new_folder(results, "compare")
    asked = sides.Asked(base=base, candidate=candidate, selection=selection, is_apart=is_apart)
    planned, same = sides.plan(asked, folder)
    if same:
        typer.echo(f"the same on both sides, not compared: {', '.join(same)} (name them with -i to do so)", err=True)
    if planned is None:
        sides.clear(folder)
        typer.echo("nothing to compare: every implementation is the same on both sides")
        raise typer.Exit(0)
    return folder, planned


def side_by_side(planned: "Plan", folder: Path) -> "Results":
    """Run it, with both sides in place meanwhile.

    Raises:
        ValueError: it cannot be run.
    """
    from harness import run, sides, terminal

    assert planned.sides is not None
    how = "each side in processes of its own" if planned.sides.is_apart else "both sides in one process"
    plural = "" if len(planned.workloads) == 1 else "s"
    typer.echo(f"{len(planned.workloads)} workload{plural}, {how}, into {folder}", err=True)
    try:
        with sides.at_work(planned, folder), terminal.watching() as watch:
            return run.execute(planned, folder, watch)
    except KeyboardInterrupt:
        typer.echo(f"stopped; go on with: attnbench compare --resume {folder}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _tell(found: "Results", *, as_json: bool) -> None:
    from harness import terminal

    if as_json:
        typer.echo(json.dumps(terminal.summary(found) | _summary(found), indent=2))
        return
    terminal.print_sides(found)
    typer.echo(f"\nReports and plots: {found.folder}")


def _summary(found: "Results") -> dict[str, object]:
    """What a program wants to know beside the cells."""
    from harness.suite import losses, suite

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
    from harness.compare import comparisons
    from harness.interference import MANY
    from harness.records import Verdict
    from harness.suite import losses, suite

    if failures or losses(found):
        raise typer.Exit(FINDING)
    if sum(map(len, found.void.values())) > MANY * found.num_blocks:
        raise typer.Exit(INVALID)
    whole = suite(found)
    verdicts = [each.verdict for each in comparisons(found)] + ([] if whole is None else [whole.verdict])
    if Verdict.slower in verdicts:
        raise typer.Exit(FINDING)
    raise typer.Exit(INCONCLUSIVE if whole is None or whole.verdict is Verdict.undecided else 0)
