"""`attnbench gate`: a comparison that passes or fails, and the baseline that it compares with."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbench.commands import Command, ExitCode
from attnbench.commands.options import AsJson, ResultsFolder

if TYPE_CHECKING:
    from attnbench.analysis.results import Results

MOST_RUNS = 2
EXIT_CODES = {"finding": ExitCode.finding, "inconclusive": ExitCode.inconclusive, "invalid": ExitCode.invalid}
"""Exit codes by the decision's outcome; other outcomes pass."""


def gate(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BASE] [CANDIDATE] [NAME]...",
            help="Runs or journals. Two: BASE and CANDIDATE. One: against the stored baseline of its machine, or its "
            "own base if it compared two sides. None: the newest run, likewise. NAME: an implementation, as -i.",
        ),
    ] = None,
    *,
    implementations: Annotated[
        list[str] | None,
        typer.Option("--implementation", "-i", metavar="NAME", help="Judge these alone; may be repeated."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="AXIS=V,V", help="Judge only cells with these values; may be repeated."),
    ] = None,
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
    from attnbench.plugins import implementation_names
    from attnbench.storage.journal import newest_run

    allowed = load(thresholds)
    given = list(runs or ())
    if is_accepted:
        if len(given) > 1 or implementations or settings or to is not None:
            raise ValueError("--accept takes one run, whole: leave out the others, -i, --set and --to")
        path = stored.locate(given[0], results) if given else newest_run(results)
        written = stored.accept(path, results, reason, allowed)
        typer.echo(json.dumps({"baseline": str(written)}) if as_json else f"Baseline: {written}; commit it")
        return
    if reason:
        raise ValueError("--reason is that of a new baseline: give --accept, too")
    names = [name for name in given if name in implementation_names() and not (results / "runs" / name).exists()]
    given = [name for name in given if name not in names]
    if len(given) > MOST_RUNS:
        raise ValueError(f"gate takes two runs at most, and {len(given)} were given: BASE and CANDIDATE")
    paths = [stored.locate(name, results) for name in given] or [newest_run(results)]
    found = [read(path) for path in paths]
    if len(found) == 1 and found[0].plan.sides is None:
        found.insert(0, read(stored.find(found[0], results)))
    *before, after = _narrowed(found, [*names, *(implementations or ())], settings or ())
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
    raise typer.Exit(EXIT_CODES.get(decision.outcome, ExitCode.passed))


def _narrowed(found: "Sequence[Results]", names: Sequence[str], settings: Sequence[str]) -> "list[Results]":
    """Restrict the runs to these implementations and values.

    Raises:
        ValueError: a run has none of them.
    """
    from attnbench.analysis.selection import only
    from attnbench.commands.running import note

    if not names and not settings:
        return list(found)
    kept = [only(each, names, settings) for each in found]
    note(f"judged: {len(kept[-1].records)} of {len(found[-1].records)} cells, the baseline's own among them")
    return kept


COMMAND = Command(
    function=gate,
    order=90,
    examples=(
        "attnbench gate",
        "attnbench gate BASE CANDIDATE --to gate",
        'attnbench gate --accept --reason "attention is fused now"',
        "attnbench gate BASE CANDIDATE -i fused --set seq_len=512",
    ),
)
