"""`attnbench explain`: what a word on a screen means."""

from typing import Annotated

import msgspec
import typer

from attnbench.commands import Command
from attnbench.commands.options import AsJson


def explain(
    name: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="A mistake, verdict, status, warning, rule or note. Default: list all."),
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Explain a word that a screen, a page or JSON shows: what it means, why it matters, and what to do."""
    from attnbench.commands.terminal import say
    from attnbench.explained import KINDS, explained, explanations

    found = explained(" ".join(name)) if name else list(explanations())
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    elif name:
        for each in found:
            say(f"{each.name} ({KINDS[each.kind].lower()})", "bold")
            say(each.means)
            say(f"Why: {each.why}")
            say(f"Example: {each.example}")
            say(f"Do: {each.do}")
    else:
        for kind, title in KINDS.items():
            say(f"{title}: {', '.join(each.name for each in found if each.kind == kind)}")


COMMAND = Command(
    function=explain,
    order=115,
    examples=(
        "attnbench explain undecided",
        "attnbench explain softmax_over_queries",
        "attnbench explain not judged",
    ),
)
