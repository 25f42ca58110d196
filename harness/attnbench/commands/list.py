"""`attnbench list`: implementations, sweeps, axes, masks and plugs."""

from collections.abc import Sequence
from typing import Literal

from attnbench import plugins
from attnbench.commands import OUTPUT, Command
from attnbench.commands.frame import present

What = Literal["implementations", "sweeps", "axes", "masks", "models", "metrics", "reports"]


def list_what(what: What = "implementations") -> None:
    """List what there is; for implementations, what each supports here.

    Options:
        what: What to list.

    Examples:
        attnbench list
        attnbench list axes
        attnbench list sweeps --json
    """
    from attnbench.commands import catalog, terminal

    if what == "implementations":
        supports = catalog.implementations(plugins.implementation_names())
        present(lambda: supports, lambda: print_support(supports))
        return
    entries = catalog.entries(what)
    columns = [column for column in entries[0] if column != "source"]

    def show() -> None:
        terminal.print_table(columns, [[entry[column] for column in columns] for entry in entries])
        for entry in entries:
            if "source" in entry:
                terminal.say(f"{entry[columns[0]]}: {entry['source']}", "dim")

    present(lambda: entries, show)


def print_support(entries: Sequence[dict[str, str]]) -> None:
    """Print what each installed implementation lacks, then the implementations that are not installed."""
    from attnbench.commands.catalog import QUESTIONS
    from attnbench.commands.terminal import print_table, say
    from attnbench.reports import grouped

    columns = [name for name in QUESTIONS if any(entry[name] == "yes" for entry in entries)]
    here = [entry for entry in entries if any(entry[name] == "yes" for name in columns)]
    lacks = {entry["implementation"]: [name for name in columns if entry[name] != "yes"] for entry in here}
    print_table(("implementation", "lacks"), [(name, ", ".join(missing) or "-") for name, missing in lacks.items()])
    if nowhere := [name for name in QUESTIONS if name not in columns]:
        say(f"None supports: {', '.join(nowhere)}")
    absent = [entry for entry in entries if entry not in here]
    first = grouped(absent, lambda entry: entry["why"].partition("\n")[0].partition(": ")[2] or entry["source"])
    for reason, members in first.items():
        say(f"Not here: {', '.join(entry['implementation'] for entry in members)}: {reason}", "dim")
    if not OUTPUT.is_verbose:
        say("Every reason: attnbench list -v", "dim")
        return
    for entry in entries:
        for line in [f"no {why}" for why in entry["why"].splitlines()] + [f"source: {entry['source']}"]:
            say(f"{entry['implementation']}: {line}", "dim")


COMMAND = Command(list_what, order=10)
