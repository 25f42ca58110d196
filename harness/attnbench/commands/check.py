"""`attnbench check`: is it right?"""

import json
from pathlib import Path
from typing import Annotated

import typer

from attnbench.commands import Command
from attnbench.commands.options import AsJson, SelectionOptions

OPTIONS = SelectionOptions(sweep="check")


def check(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME|FILE.py:NAME]...", help="What to check. Default: all.")
    ] = None,
    *,
    options: SelectionOptions = OPTIONS,
    as_json: AsJson = False,
) -> None:
    """Check agreement with the float64 oracle, outputs and gradients; measure nothing, keep nothing."""
    import tempfile

    from attnbench.commands import running, terminal
    from attnbench.processes.planning import plan

    named = [*(names or ()), *(options.implementations or ())]
    planned = plan(options.selection(implementations=named, metrics=()), with_baseline=False)
    with tempfile.TemporaryDirectory(prefix="attnbench-check-") as folder:
        checked = running.execute(planned, Path(folder), stages=("check",))
    if as_json:
        typer.echo(json.dumps(terminal.summary(checked), indent=2))
    else:
        terminal.print_check(checked)
    running.conclude(checked)


COMMAND = Command(function=check, order=30)
