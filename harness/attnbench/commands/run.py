"""`attnbench run`: sweep, check, measure, store and report."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbench.commands.ending import INTERRUPTED, conclude, write_reports
from attnbench.commands.options import (
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
    Rounds,
    Seed,
    Settings,
    SmallestEffect,
    Timeout,
)

if TYPE_CHECKING:
    from attnbench.storage.events import Plan


def run_sweep(  # noqa: PLR0913 - one parameter for each option
    context: typer.Context,
    *,
    sweep: Annotated[str, typer.Option(metavar="NAME|FILE", help="A sweep by name, or a TOML file.")] = "quick",
    settings: Settings = None,
    implementation: Implementations = None,
    baseline: Annotated[
        str,
        typer.Option(metavar="NAME", help="What ratios are taken against; it takes part though -i does not name it."),
    ] = "sdpa",
    budget: Budget = None,
    smallest_effect: SmallestEffect = None,
    rounds: Rounds = None,
    cache: Cache = CacheMode.warm,
    allocator: Allocator = AllocatorMode.system,
    call_limit: CallLimit = None,
    memory_limit: MemoryLimit = 0.0,
    timeout: Timeout = 60.0,
    results: ResultsFolder = Path("results"),
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with this run, as it was planned (its name or folder).")
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Sweep, check, measure, store and report."""
    from attnbench import plugins
    from attnbench.analysis.results import read
    from attnbench.commands import progress, terminal
    from attnbench.processes import session as run
    from attnbench.processes.planning import Selection, plan

    if resume is not None:
        folder, planned = earlier(context, resume, results)
        if planned.sides is not None:
            raise ValueError(f"{resume} compares two sides: go on with attnbench compare --resume {resume}")
        plugins.check_specs(planned.implementations)
    else:
        selection = Selection(
            sweep=sweep,
            settings=settings or (),
            implementations=implementation or (),
            baseline=baseline,
            budget_s=budget,
            smallest_effect=smallest_effect,
            num_rounds=rounds,
            call_limit_s=call_limit,
            timeout_s=timeout,
            memory_limit_bytes=int(memory_limit * 2**30),
            seed=seed,
            cache=cache,
            allocator=allocator,
        )
        planned = plan(selection)
        folder = run.new_folder(results, planned.sweep)
    typer.echo(_announcement(len(planned.workloads), len(planned.implementations), folder), err=True)
    try:
        with progress.watching() as watch:
            run.execute(planned, folder, watch)
    except KeyboardInterrupt:
        typer.echo(f"stopped; go on with: attnbench run --resume {folder}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    found = read(folder)
    failures = write_reports(found, folder)
    if as_json:
        typer.echo(json.dumps(terminal.summary(found), indent=2))
    else:
        terminal.print_results(found)
        typer.echo(f"\nReports and plots: {folder}")
    conclude(found, failures=failures)


def earlier(context: typer.Context, resume: str, results: Path) -> tuple[Path, "Plan"]:
    """Folder and plan of the run to go on with.

    Raises:
        ValueError: there is no such run, or an option would change it.
    """
    from attnbench.analysis.results import read
    from attnbench.storage.journal import find_run

    if more := sorted(given(context) - {"resume", "results", "as_json", "build"}):
        raise ValueError(f"--resume goes on with the run as it was planned: leave out {', '.join(more)}")
    folder = find_run(resume, results)
    return folder, read(folder).plan


def given(context: typer.Context) -> set[str]:
    """The parameters that stood on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _announcement(num_workloads: int, num_implementations: int, folder: Path) -> str:
    plural = "" if num_implementations == 1 else "s"
    return f"{num_workloads} workloads x {num_implementations} implementation{plural}, into {folder}"
