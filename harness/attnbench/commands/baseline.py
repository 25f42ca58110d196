"""`attnbench baseline`: make a run what later ones are compared with."""

import json
from pathlib import Path
from typing import Annotated

import typer

from attnbench.commands import Command
from attnbench.commands.options import AsJson, ResultsFolder, ThresholdsFile


def baseline(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Its name or folder. Default: newest.")] = None,
    *,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why this is the new normal; kept in the file.")],
    thresholds: ThresholdsFile = None,
    results: ResultsFolder = Path("results"),
    as_json: AsJson = False,
) -> None:
    """Store a run as the baseline of its machine, with the reason. Needs no torch."""
    from attnbench.analysis.gate import stored
    from attnbench.analysis.gate.rulings import load
    from attnbench.storage.journal import newest_run

    path = stored.locate(run, results) if run is not None else newest_run(results)
    written = stored.accept(path, results, reason, load(thresholds))
    typer.echo(json.dumps({"baseline": str(written)}) if as_json else f"Baseline: {written}; commit it")


COMMAND = Command(
    function=baseline,
    order=100,
    examples=('attnbench baseline --reason "attention is fused now"',),
)
