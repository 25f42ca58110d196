"""`attnbench profile`: traces of chosen cells."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbench.commands.ending import INTERRUPTED, conclude
from attnbench.commands.options import (
    AsJson,
    CallLimit,
    Implementations,
    MemoryLimit,
    ResultsFolder,
    Seed,
    Settings,
    Timeout,
)

if TYPE_CHECKING:
    from attnbench.analysis.results import Results
    from attnbench.storage.records import Key


def profile(  # noqa: PLR0913 - one parameter for each option
    *,
    sweep: Annotated[str, typer.Option(metavar="NAME|FILE", help="A sweep by name, or a TOML file.")] = "profile",
    settings: Settings = None,
    implementation: Implementations = None,
    call_limit: CallLimit = None,
    memory_limit: MemoryLimit = 0.0,
    timeout: Timeout = 60.0,
    results: ResultsFolder = Path("results"),
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Trace what each call does, step by step, for attnbench tensorboard and Perfetto. Checked first, never timed."""
    from attnbench.analysis.results import read
    from attnbench.commands import progress, terminal
    from attnbench.processes import profiling
    from attnbench.processes.planning import Selection, plan
    from attnbench.tracing import folders

    selection = Selection(
        sweep=sweep,
        settings=settings or (),
        implementations=implementation or (),
        budget_s=0.0,
        call_limit_s=call_limit,
        timeout_s=timeout,
        memory_limit_bytes=int(memory_limit * 2**30),
        metrics=(),
        seed=seed,
    )
    planned = plan(selection, with_baseline=False)
    folder = folders.new_folder(results, planned.sweep)
    try:
        with progress.watching() as watch:
            files = profiling.execute(planned, folder, watch)
    except KeyboardInterrupt:
        typer.echo(f"stopped; the traces made so far are in {folder}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    traced = read(folder)
    if as_json:
        typer.echo(json.dumps(summary(traced, files), indent=2))
    else:
        terminal.print_traces(traced, files)
        if files:
            typer.echo(f"\nLook at them with: attnbench tensorboard {folder}")
    conclude(traced, failures=False)


def summary(results: "Results", files: "Mapping[Key, Path]") -> list[dict[str, object]]:
    """What a program wants to know of each cell."""
    return [
        {
            "workload": record.workload.id,
            "implementation": record.implementation,
            "status": str(record.status),
            "message": record.message,
            "trace": str(files[record.key]) if record.key in files else None,
        }
        for record in results.records
    ]
