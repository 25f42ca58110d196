"""`attnbench list`: implementations, sweeps, axes, masks and plugs."""

import json
from typing import Annotated, Literal

import typer

from attnbench.commands import Command
from attnbench.commands.options import AsJson, held

What = Literal["implementations", "sweeps", "axes", "masks", "models", "metrics", "reports"]


def list_what(
    what: Annotated[What, typer.Argument(help="What to list.")] = "implementations",
    *,
    implementation: Annotated[
        list[str] | None,
        typer.Option("--implementation", "-i", metavar="NAME|FILE.py:NAME", help="May be repeated. Default: all."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what there is; for implementations, what each supports here."""
    from attnbench import plugins
    from attnbench.commands import catalog, terminal

    if what == "implementations":
        specs = [spec for each in implementation or () for spec in held(each)] or plugins.implementation_names()
        plugins.check_specs(specs)
        entries = catalog.implementations(specs)
    else:
        entries = catalog.entries(what)
    if as_json:
        typer.echo(json.dumps(entries, indent=2))
    elif what == "implementations":
        terminal.print_support(entries, catalog.QUESTIONS, catalog.why_not(entries))
    else:
        terminal.print_entries(entries)


COMMAND = Command(
    function=list_what,
    order=10,
    examples=(
        "attnbench list",
        "attnbench list axes",
        "attnbench list models",
        "attnbench list sweeps --json",
    ),
)
