"""`attnbench check`: is it right?"""

import json
from pathlib import Path
from typing import Annotated

import typer

from attnbench.commands.ending import conclude
from attnbench.commands.options import AsJson, CallLimit, Implementations, Seed, Settings, Timeout


def check(  # noqa: PLR0913 - one parameter for each option
    implementations: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME|FILE.py:NAME]...", help="What to check. Default: all.")
    ] = None,
    *,
    sweep: Annotated[str, typer.Option(metavar="NAME|FILE", help="A sweep by name, or a TOML file.")] = "check",
    settings: Settings = None,
    implementation: Implementations = None,
    call_limit: CallLimit = None,
    timeout: Timeout = 60.0,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Check agreement with the float64 oracle, outputs and gradients; measure nothing, keep nothing."""
    import tempfile

    from attnbench.analysis.results import read
    from attnbench.commands import progress, terminal
    from attnbench.processes import session as run
    from attnbench.processes.planning import Selection, plan

    named = [*(implementations or ()), *(implementation or ())]
    selection = Selection(
        sweep=sweep,
        settings=settings or (),
        implementations=named,
        call_limit_s=call_limit,
        timeout_s=timeout,
        metrics=(),
        seed=seed,
    )
    planned = plan(selection, with_baseline=False)
    with tempfile.TemporaryDirectory(prefix="attnbench-check-") as folder, progress.watching() as watch:
        run.execute(planned, Path(folder), watch, stages=("check",))
        found = read(Path(folder))
    if as_json:
        typer.echo(json.dumps(terminal.summary(found), indent=2))
    else:
        terminal.print_check(found)
    conclude(found, failures=False)
