"""What `compare` and `gate` share: their options, and how a decision is shown and ends."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from attnbench.commands.ending import FINDING, INCONCLUSIVE, INVALID

if TYPE_CHECKING:
    from attnbench.analysis.gate.rulings import Decision
    from attnbench.analysis.results import Results

ThresholdsFile = Annotated[
    Path | None,
    typer.Option(
        "--thresholds",
        metavar="FILE",
        help="What is allowed, between stored runs. Default: [gate] of ./attnbench.toml, if any.",
    ),
]
OutputFolder = Annotated[
    Path | None,
    typer.Option(
        "--to", metavar="DIR", help="Write gate.md, gate.xml, gate.json and benchmarks.json here, of stored runs."
    ),
]
EXIT_CODES = {"finding": FINDING, "inconclusive": INCONCLUSIVE, "invalid": INVALID}
"""By outcome; any other passes."""


def read(path: Path) -> "Results":
    """A run; one that is damaged ends the command as an invalid session."""
    from attnbench.analysis import results
    from attnbench.storage.events import DamagedError

    try:
        return results.read(path)
    except DamagedError as error:
        typer.echo(f"invalid session: {error}", err=True)
        raise typer.Exit(INVALID) from None


def show(decision: "Decision", candidate: "Results", *, as_json: bool, to: Path | None) -> None:
    """Print a decision, and write its files where that is wanted."""
    from attnbench.analysis.gate import outputs

    if to is not None:
        outputs.write(decision, candidate, to)
    if as_json:
        typer.echo(outputs.as_json(decision), nl=False)
    else:
        _print(decision)
        if to is not None:
            typer.echo(f"Files: {to}")


def end(decision: "Decision") -> NoReturn:
    """Exit as the decision says."""
    raise typer.Exit(EXIT_CODES.get(decision.outcome, 0))


def _print(decision: "Decision") -> None:
    from attnbench.analysis.gate import outputs
    from attnbench.analysis.gate.rulings import Outcome
    from attnbench.text import plain

    for ruling in outputs.sorted_rulings(decision):
        if ruling.outcome is not Outcome.passed:
            typer.echo(outputs.line(ruling))
    for line in (*decision.invalid, *decision.notes, f"suite: {decision.suite.words}", outputs.compared(decision)):
        typer.echo(plain(line))
    typer.echo(outputs.headline(decision))
