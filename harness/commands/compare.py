"""`attnbench compare`: two runs beside one another."""

from pathlib import Path
from typing import Annotated

import typer

from harness.commands.judging import OutputFolder, ThresholdsFile, read, show
from harness.options import AsJson, ResultsFolder


def compare(  # noqa: PLR0913 - one parameter for each option
    base: Annotated[str, typer.Argument(metavar="BASE", help="A run's name or folder, or a journal.")],
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="What is held against it.")],
    *,
    thresholds: ThresholdsFile = None,
    results: ResultsFolder = Path("results"),
    to: OutputFolder = None,
    as_json: AsJson = False,
) -> None:
    """Compare two stored runs: what got worse, by how much, and what could have been seen. Needs no torch."""
    from harness.gate import stored
    from harness.gate.judge import judge
    from harness.gate.thresholds import load

    asked = load(thresholds)
    before, after = (read(stored.locate(name, results)) for name in (base, candidate))
    show(judge(before, after, asked), after, as_json=as_json, to=to)
