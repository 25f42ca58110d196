"""Write the documents that are generated from the code: `python docs/reference.py`. A test compares them with the code.

docs/verdict.schema.json is the schema of the output of --json, and docs/commands.txt lists every command with its
options. docs/site.py writes the site's own pages of commands, words and the journal.
"""

import json
from pathlib import Path

import msgspec
import typer
from typer.core import TyperArgument

from attnbench import cli
from attnbench.reports import verdict

DOCS = Path(__file__).parent


def commands() -> str:
    """List the arguments and options of every command, one in each line."""
    lines = []
    for name, command in sorted(typer.main.get_command(cli.app).commands.items()):
        for each in command.params:
            is_argument = isinstance(each, TyperArgument)
            lines.append(f"{name} {each.name.upper() if is_argument else ' '.join([*each.opts, *each.secondary_opts])}")
    return "\n".join(sorted(lines)) + "\n"


def documents() -> dict[Path, str]:
    """Build the text of each generated document, by its path."""
    return {
        DOCS / "verdict.schema.json": json.dumps(msgspec.json.schema(verdict.Report), indent=1) + "\n",
        DOCS / "commands.txt": commands(),
    }


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
