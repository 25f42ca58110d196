"""`attnbench list`: what there is."""

import json
from typing import Annotated, Literal

import typer

from attnbench.commands import Command
from attnbench.commands.options import AsJson

What = Literal["implementations", "sweeps", "axes", "masks", "metrics", "reports"]


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

    notes: list[str] = []
    if what == "implementations":
        specs = list(implementation or plugins.implementation_names())
        plugins.check_specs(specs)
        entries = catalog.implementations(specs)
        notes = catalog.why_not(entries)
    else:
        entries = catalog.entries(what)
    if as_json:
        typer.echo(json.dumps(entries, indent=2))
    else:
        terminal.print_entries(entries, notes)


COMMAND = Command(function=list_what, order=10)
