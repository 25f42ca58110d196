"""`attnbench check`: is it right?"""

import json
from pathlib import Path

import typer

from attnbench.commands import Command
from attnbench.commands.options import AsJson, SelectionOptions, held

OPTIONS = SelectionOptions(sweep="check")


def check(
    *,
    options: SelectionOptions = OPTIONS,
    as_json: AsJson = False,
) -> None:
    """Check agreement with the float64 oracle, outputs and gradients; measure nothing, keep nothing."""
    import tempfile

    from attnbench.commands import running, terminal
    from attnbench.processes.planning import plan

    specs, not_judged = _usable([*(options.names or ()), *(options.implementations or ())])
    planned = plan(options.selection(implementations=specs, metrics=()), with_baseline=False)
    with tempfile.TemporaryDirectory(prefix="attnbench-check-") as folder:
        checked = running.execute(planned, Path(folder), stages=("check",))
    verdicts = terminal.verdicts(checked) | dict.fromkeys(not_judged, terminal.NOT_JUDGED)
    if as_json:
        shown = terminal.summary(checked) | {"verdicts": verdicts, "not_judged": not_judged}
        typer.echo(json.dumps(shown, indent=2))
    else:
        terminal.print_check(checked, not_judged)
    running.conclude_check(checked, is_complete=not not_judged)


def _usable(given: list[str]) -> tuple[list[str], dict[str, str]]:
    """The specs that can be tried, a file alone as all that it holds, and why the others cannot.

    Raises:
        ValueError: none can be tried, though some were given.
    """
    from attnbench import plugins

    specs: list[str] = []
    problems: dict[str, str] = {}  # the others are judged all the same
    for named in given:
        try:
            found = held(named)
        except ValueError as error:
            problems[named] = str(error)
            continue
        for spec in found:
            try:
                plugins.check_specs([spec])
                specs.append(spec)
            except ValueError as error:
                problems[spec] = str(error)
    if problems and not specs:
        raise ValueError("; ".join(problems.values()))
    return specs, problems


COMMAND = Command(function=check, order=30)
