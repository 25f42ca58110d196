"""`attnbench growth`: how memory grows with length, and where a limit is reached."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

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
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the page goes. Default: the run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fit how memory grows with length, and predict where a limit is reached.

    Calls are those of inference, unless --set direction says otherwise: training keeps more.
    """
    from attnbench.analysis.growth import growths
    from attnbench.commands import running
    from attnbench.processes.execution import new_folder
    from attnbench.reports import endings
    from attnbench.reports import growth as report
    from attnbench.reports.style import save
    from attnbench.storage.files import put, writing_to

    if options.settings and not any(each.partition("=")[0].strip() == "direction" for each in options.settings):
        options = replace(options, settings=[*options.settings, DIRECTION])
    planned = options.plan(with_baseline=False)
    folder = new_folder(results, planned.sweep)
    target = to or folder
    measured = running.execute(planned, folder, stages=("check", "metrics"))
    grown = growths(measured, planned.memory_limit_bytes)
    with writing_to(target):
        drawn = save(report.curves(grown), target, "growth")
        pictures = [path.stem for path in drawn if path.suffix == ".png"]
        put(target / "growth.md", report.markdown(grown, measured, pictures))
        text = json.dumps([report.facts(each) for each in grown], indent=2)
        put(target / "growth.json", f"{text}\n")
    if as_json:
        typer.echo(text)
    else:
        for title, members in report.by_panel(grown).items():
            typer.echo(f"\n{title}")
            for each in members:
                typer.echo(f"  {report.sentence(each)}")
        typer.echo(f"\n{report.answered_for(grown)}\nPage and pictures: {target}")
    running.finish(endings.of_growth(measured), is_silent=as_json)


COMMAND = Command(
    function=growth,
    order=60,
    examples=(
        "attnbench growth sdpa fused",
        "attnbench growth fused --memory-limit 8 --set num_heads=8",
        "attnbench growth fused sdpa --set direction=forward_backward",
    ),
)
