"""`attnbench check`: is it right?"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from attnbench.commands import Command
from attnbench.commands.options import AsJson, SelectionOptions, held

OPTIONS = SelectionOptions(sweep="check")
INVARIANCE = "seq_len=256"
"""Where --invariance is given no workload."""


def check(
    *,
    options: SelectionOptions = OPTIONS,
    goes_on: Annotated[bool, typer.Option("--all", help="Go on with who is wrong, at every workload.")] = False,
    is_invariance: Annotated[
        bool,
        typer.Option(
            "--invariance",
            help="Is a query's answer the same to the last bit whatever the batch, the padding, the chunk, the heads? "
            "And what does it cost compared with sdpa?",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check agreement with the float64 oracle, outputs and gradients; measure nothing, keep nothing.

    Who is wrong is not checked any further. What was found is printed on Ctrl-C, too.
    """
    import tempfile

    from attnbench.analysis.results import read
    from attnbench.commands import invariance, running, terminal
    from attnbench.processes.planning import plan

    specs, not_judged = _usable([*(options.names or ()), *(options.implementations or ())])
    if is_invariance and not (options.settings or options.model):
        options = replace(options, settings=[INVARIANCE])
        planned = plan(options.selection(implementations=specs, metrics=(), is_exact=True), with_baseline=False)
    else:
        planned = plan(options.selection(implementations=specs, metrics=()), with_baseline=False)
    if is_invariance:
        invariance.check(planned, not_judged, timeout_s=options.timeout_s, as_json=as_json)
    with tempfile.TemporaryDirectory(prefix="attnbench-check-") as folder:
        stopped = None
        try:
            checked = running.execute(planned, Path(folder), stages=("check",), stops_when_wrong=not goes_on)
        except typer.Exit as interrupted:
            checked, stopped = read(Path(folder)), interrupted
    verdicts = terminal.verdicts(checked) | dict.fromkeys(not_judged, terminal.NOT_JUDGED)
    if as_json:
        shown = terminal.summary(checked) | {"verdicts": verdicts, "not_judged": not_judged}
        typer.echo(json.dumps(shown, indent=2))
    else:
        terminal.print_check(checked, not_judged)
    if stopped is not None:
        number = planned.num_cells
        typer.echo(f"stopped: {len(checked.records)} of {number} cells were checked", err=True)
        raise stopped
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


COMMAND = Command(
    function=check,
    order=30,
    examples=(
        "attnbench check mine.py:attention",
        "attnbench check mine.py --set mask=causal --set dtype=bfloat16 --set seq_len=128",
        "attnbench check fused -i mine.py --all",
        "attnbench check mine.py:attention --invariance --model smollm2-135m",
    ),
)
