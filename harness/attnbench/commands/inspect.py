"""`attnbench inspect`: one sentence, step by step."""

import json
from pathlib import Path
from typing import Annotated

import typer

from attnbench.commands import Command, ExitCode
from attnbench.commands.options import AsJson, OpenPage


def inspect(
    name: Annotated[
        str, typer.Argument(metavar="[NAME|FILE.py:NAME]", help="What to compare with the oracle.")
    ] = "fused",
    *,
    sentence: Annotated[
        list[str] | None, typer.Option(metavar="WORDS", help="Words to attend over; may be repeated.")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="AXIS=V", help="Heads, widths, mask.")] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the words' vectors and the weights.")] = 0,
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: results/inspect/NAME.")] = None,
    open_page: OpenPage = False,
    as_json: AsJson = False,
) -> None:
    """Walk a sentence step by step, with every number, and compare an implementation with the oracle."""
    from rich.console import Console

    from attnbench.inspection import text
    from attnbench.inspection.oracle_diff import look

    results = look(name, sentence or (), settings or (), seed)
    folder = to or Path("results") / "inspect" / results.implementation
    file = text.write_page(results, folder)
    if as_json:
        typer.echo(json.dumps(text.facts(results, [file]), indent=2))
    else:
        console = Console()
        text.write(results, console)
        console.print(f"\nEvery step with its numbers: {file}", markup=False, highlight=False, soft_wrap=True)
    if open_page:
        typer.launch(str(file.resolve()))
    if not results.is_checked:
        raise typer.Exit(ExitCode.inconclusive)
    raise typer.Exit(ExitCode.finding if results.differs else ExitCode.passed)


COMMAND = Command(
    function=inspect,
    order=40,
    examples=(
        "attnbench inspect",
        "attnbench inspect mine.py:attention --set num_heads=2 --open",
        'attnbench inspect fused --sentence "the cat sat"',
    ),
)
