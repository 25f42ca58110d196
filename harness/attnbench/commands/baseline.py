"""`attnbench baseline`: make a run what later ones are held against."""

from pathlib import Path
from typing import Annotated

import typer

from attnbench.commands.judging import ThresholdsFile
from attnbench.commands.options import ResultsFolder


def baseline(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Its name or folder. Default: newest.")] = None,
    *,
    reason: Annotated[str, typer.Option(help="Why this is the new normal; kept in the file.")],
    thresholds: ThresholdsFile = None,
    results: ResultsFolder = Path("results"),
) -> None:
    """Store a run as the baseline of its machine, with the reason. Needs no torch."""
    from attnbench.analysis.gate import stored
    from attnbench.analysis.gate.thresholds import load
    from attnbench.storage.journal import newest_run

    path = stored.locate(run, results) if run is not None else newest_run(results)
    written = stored.accept(path, results, reason, load(thresholds))
    typer.echo(f"Baseline: {written}; commit it")
