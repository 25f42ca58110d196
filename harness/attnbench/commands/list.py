"""`attnbench list`: implementations, sweeps, axes, masks and plugs."""

import json
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from attnbench.commands import VERBOSITY, Command
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
        specs = [spec for name in implementation or () for spec in held(name)] or plugins.implementation_names()
        plugins.check_specs(specs)
        entries = catalog.implementations(specs)
    else:
        entries = catalog.entries(what)
    if as_json:
        typer.echo(json.dumps(entries, indent=2))
        return
    columns = [column for column in entries[0] if column != "source"]
    if what == "implementations":
        print_support(entries)
    else:
        terminal.print_table(columns, [[entry[column] for column in columns] for entry in entries])
    for entry in entries:
        if entry.get("source") and (what != "implementations" or VERBOSITY.is_verbose):
            terminal.say(f"{entry[columns[0]]}: {entry['source']}", "dim")


def print_support(entries: Sequence[dict[str, str]]) -> None:
    """Print what each installed implementation lacks, then the implementations that are not installed."""
    from attnbench.commands import catalog
    from attnbench.commands.terminal import print_table, say
    from attnbench.reports import grouped

    lacks = {entry["implementation"]: [name for name in catalog.QUESTIONS if entry[name] != "yes"] for entry in entries}
    nowhere = set(catalog.QUESTIONS).intersection(*lacks.values())
    here = {name: [each for each in missing if each not in nowhere] for name, missing in lacks.items()}
    here = {name: missing for name, missing in here.items() if len(lacks[name]) < len(catalog.QUESTIONS)}
    print_table(("implementation", "lacks"), [(name, ", ".join(missing) or "-") for name, missing in here.items()])
    if nowhere:
        say(f"None supports: {', '.join(name for name in catalog.QUESTIONS if name in nowhere)}")
    absent = [entry for entry in entries if entry["implementation"] not in here]
    if absent:
        say("")
        say("Not here:")
    first = grouped(absent, lambda entry: entry["why"].partition("\n")[0].partition(": ")[2] or entry["source"])
    for reason, members in first.items():
        say(f"  {', '.join(entry['implementation'] for entry in members)}: {reason}", "dim")
    if not VERBOSITY.is_verbose:
        say("Every reason: attnbench list -v", "dim")
        return
    for entry in entries:
        for line in entry["why"].splitlines():
            say(f"{entry['implementation']}: no {line}", "dim")


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
