"""`attnbench growth`: how memory grows with length, and where a limit is reached."""

import json
from dataclasses import replace
from pathlib import Path

import typer

from attnbench.commands import Command
from attnbench.commands.options import AsJson, ResultsFolder, SelectionOptions

DIRECTION = "direction=inference"
"""Default direction of the calls."""
OPTIONS = SelectionOptions(sweep="growth", call_limit_s=20.0)


def growth(
    *,
    options: SelectionOptions = OPTIONS,
    results: ResultsFolder = Path("results"),
    as_json: AsJson = False,
) -> None:
    """Fit how memory grows with length, and predict where a limit is reached.

    Calls are those of inference, unless --set direction says otherwise: training keeps more.
    """
    from attnbench.analysis.conclusion import Question, conclude
    from attnbench.analysis.growth import growths
    from attnbench.commands import running
    from attnbench.processes.execution import new_folder
    from attnbench.reports import endings
    from attnbench.reports import growth as report

    settings = options.settings or []
    if options.has_shapes and not any(each.partition("=")[0].strip() == "direction" for each in settings):
        options = replace(options, settings=[*settings, DIRECTION])
    planned = options.plan(with_baseline=False)
    folder = new_folder(results, planned.sweep)
    measured = running.execute(planned, folder, stages=("check", "metrics"))
    grown = growths(measured, planned.memory_limit_bytes)
    if as_json:
        typer.echo(json.dumps([report.facts(each) for each in grown], indent=2))
    else:
        for title, members in report.by_panel(grown).items():
            typer.echo(f"\n{title}")
            for each in members:
                typer.echo(f"  {report.sentence(each)}")
    running.finish(conclude(endings.marks(measured), Question.measurement), is_silent=as_json)


COMMAND = Command(
    function=growth,
    order=60,
    examples=(
        "attnbench growth sdpa fused",
        "attnbench growth fused --memory-limit 8 --set num_heads=8",
        "attnbench growth fused sdpa --set direction=forward_backward",
    ),
)
