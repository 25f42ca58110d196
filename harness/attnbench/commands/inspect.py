"""`attnbench inspect`: one sentence, step by step."""

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
    sentence: Annotated[list[str] | None, typer.Option(help="Words to attend over; may be repeated.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="AXIS=V", help="Heads, widths, mask.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the words' vectors and the weights.")] = 0,
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: results/inspect/NAME.")] = None,
    open_page: OpenPage = False,
    as_json: AsJson = False,
) -> None:
    """Walk a sentence step by step, with pictures of the weights, and compare an implementation with the oracle."""
    from attnbench import inspection

    results, page = inspection.inspect(name, sentence or (), settings or (), seed, to, as_json=as_json)
    if open_page:
        typer.launch(str(page.resolve()))
    if not results.is_checked:
        raise typer.Exit(ExitCode.inconclusive)
    raise typer.Exit(ExitCode.finding if results.differs else ExitCode.passed)


COMMAND = Command(function=inspect, order=40)
