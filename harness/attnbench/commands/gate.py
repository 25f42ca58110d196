"""`attnbench gate`: a comparison that passes or fails."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbench.commands import Command, ExitCode
from attnbench.commands.options import AsJson, GateFolder, ResultsFolder, ThresholdsFile

if TYPE_CHECKING:
    from attnbench.analysis.gate.rulings import Decision
    from attnbench.analysis.results import Results

MOST_RUNS = 2
EXIT_CODES = {"finding": ExitCode.finding, "inconclusive": ExitCode.inconclusive, "invalid": ExitCode.invalid}
"""By the decision's outcome; any other passes."""


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
    to: GateFolder = None,
    as_json: AsJson = False,
) -> None:
    """Compare two stored runs, or a run and its stored baseline: pass or fail. Needs no torch."""
    from attnbench.analysis.gate import stored
    from attnbench.analysis.gate.decision import judge, judge_sides
    from attnbench.analysis.gate.rulings import load
    from attnbench.analysis.results import read
    from attnbench.storage.journal import newest_run

    if len(runs or ()) > MOST_RUNS:
        raise ValueError(f"gate takes two runs at most, and {len(runs or ())} were given: BASE and CANDIDATE")
    allowed = load(thresholds)
    paths = [stored.locate(name, results) for name in runs or ()] or [newest_run(results)]
    *before, after = (read(path) for path in paths)
    if not before and after.plan.sides is not None:
        decision = judge_sides(after, allowed)
    else:
        decision = judge(before[0] if before else read(stored.find(after, results)), after, allowed)
    show(decision, after, as_json=as_json, to=to)
    raise typer.Exit(EXIT_CODES.get(decision.outcome, ExitCode.passed))


def show(decision: "Decision", candidate: "Results", *, as_json: bool, to: Path | None) -> None:
    """Print a decision, and write its files where that is wanted."""
    from attnbench.analysis.gate import outputs

    if to is not None:
        outputs.write(decision, candidate, to)
    if as_json:
        typer.echo(outputs.as_json(decision), nl=False)
        return
    typer.echo(outputs.terminal(decision))
    if to is not None:
        typer.echo(f"Files: {to}")


COMMAND = Command(function=gate, order=90)
