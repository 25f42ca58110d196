"""`attnbench gate`: a comparison that passes or fails."""

from pathlib import Path
from typing import Annotated

import typer

from attnbench.commands.judging import OutputFolder, ThresholdsFile, end, read, show
from attnbench.commands.options import AsJson, ResultsFolder

MOST_RUNS = 2


def gate(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BASE] [CANDIDATE]",
            help="Runs or journals. Two: BASE and CANDIDATE. One: against the stored baseline of its machine, or its "
            "own base if it compared two sides. None: the newest run, likewise.",
        ),
    ] = None,
    *,
    thresholds: ThresholdsFile = None,
    results: ResultsFolder = Path("results"),
    to: OutputFolder = None,
    as_json: AsJson = False,
) -> None:
    """Compare two stored runs, or a run and its stored baseline: pass or fail. Needs no torch."""
    from attnbench.analysis.gate import stored
    from attnbench.analysis.gate.decision import judge, judge_sides
    from attnbench.analysis.gate.thresholds import load
    from attnbench.storage.journal import newest_run

    if len(runs or ()) > MOST_RUNS:
        raise ValueError(f"gate takes two runs at most, and {len(runs or ())} were given: BASE and CANDIDATE")
    asked = load(thresholds)
    paths = [stored.locate(name, results) for name in runs or ()] or [newest_run(results)]
    *before, after = (read(path) for path in paths)
    if not before and after.plan.sides is not None:
        decision = judge_sides(after, asked)
    else:
        decision = judge(before[0] if before else read(stored.find(after, results)), after, asked)
    show(decision, after, as_json=as_json, to=to)
    end(decision)
