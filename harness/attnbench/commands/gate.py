"""`attnbench gate`: a comparison that passes or fails, and the baseline that it compares with."""

import json
from pathlib import Path
from typing import Annotated

import typer

from attnbench.commands import Command, ExitCode
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
    is_accepted: Annotated[
        bool, typer.Option("--accept", help="Judge nothing: store the run as the baseline of its machine.")
    ] = False,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="With --accept: why this is the new normal; kept in the file.")
    ] = "",
    thresholds: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Allowed changes. Default: the table gate of ./attnbench.toml, if any."),
    ] = None,
    results: ResultsFolder = Path("results"),
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Write gate.md and gate.json here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two stored runs, or a run and its stored baseline: pass or fail. Needs no torch.

    With --accept, the run becomes the baseline that later runs are compared with.
    """
    from attnbench.analysis.gate import outputs, stored
    from attnbench.analysis.gate.decision import judge, judge_sides
    from attnbench.analysis.gate.rulings import load
    from attnbench.analysis.results import read
    from attnbench.storage.journal import find_run

    allowed = load(thresholds)
    given = list(runs or ())
    if is_accepted:
        if len(given) > 1 or to is not None:
            raise ValueError("--accept takes one run: leave out the others and --to")
        path = stored.locate(given[0], results) if given else find_run(None, results)
        written = stored.accept(path, results, reason)
        typer.echo(json.dumps({"baseline": str(written)}) if as_json else f"Baseline: {written}; commit it")
        return
    if reason:
        raise ValueError("--reason is that of a new baseline: give --accept, too")
    if len(given) > MOST_RUNS:
        raise ValueError(f"gate takes two runs at most, and {len(given)} were given: BASE and CANDIDATE")
    paths = [stored.locate(name, results) for name in given] or [find_run(None, results)]
    found = [read(path) for path in paths]
    if len(found) == 1 and found[0].plan.sides is None:
        found.insert(0, read(stored.find(found[0], results)))
    *before, after = found
    if not before and after.plan.sides is not None:
        decision = judge_sides(after, allowed)
    else:
        decision = judge(before[0], after, allowed)
    if to is not None:
        outputs.write(decision, to)
    if as_json:
        typer.echo(outputs.as_json(decision), nl=False)
    else:
        typer.echo(outputs.terminal(decision))
        if to is not None:
            typer.echo(f"Files: {to}")
    raise typer.Exit(ExitCode.__members__.get(decision.outcome, ExitCode.passed))


COMMAND = Command(
    function=gate,
    order=90,
    examples=(
        "attnbench gate",
        "attnbench gate BASE CANDIDATE --to gate",
        'attnbench gate --accept --reason "attention is fused now"',
    ),
)
