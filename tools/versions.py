"""Print the versions that were tried, and those that are installed here: `python -m tools.versions`.

The first table is tools/tried.toml. The second has a row for Python, and for each installed package that pyproject.toml
requires, next to the version of constraints.txt. `--to FILE` writes the second to a file.
"""

import argparse
import platform
import re
import sys
import tomllib
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain
from operator import itemgetter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TITLE = "# Installed versions\n\nMade by `python -m tools.versions` on {day} ({system}).\n"


def asked() -> list[str]:
    """Return the names of the packages that the project and its extra `all` require, sorted."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    parts = re.findall(r"\w+", extras["all"][0].partition("[")[2])
    requirements = chain(project["dependencies"], *(extras[part] for part in parts))
    return sorted({re.split(r"[><=\[]", each)[0] for each in requirements})


def pinned() -> dict[str, str]:
    """Return the versions in constraints.txt, by package name in lower case."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text.lower(), re.MULTILINE))


def table() -> str:
    """Build the page: a title, and a table with a row for Python and for each required package that is installed."""
    lines = [
        "| package | here | constraints.txt |",
        "| --- | --- | --- |",
        f"| Python | {platform.python_version()} | |",
    ]
    for name in asked():
        try:
            lines.append(f"| {name} | {metadata.version(name)} | {pinned().get(name, '')} |")
        except metadata.PackageNotFoundError:
            continue
    title = TITLE.format(day=f"{datetime.now(UTC):%Y-%m-%d}", system=f"{platform.system()} {platform.machine()}, CPU")
    return "\n".join([title, *lines, ""])


def tried() -> str:
    """Build the table of the versions that were tried, newest first: Python, torch, where, what and when."""
    rows = tomllib.loads((ROOT / "tools" / "tried.toml").read_text(encoding="utf-8"))["tried"]
    heads = ("day", "python", "torch", "where", "what")
    lines = [heads, ["---"] * len(heads), *map(itemgetter(*heads), rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Print both tables, and write the second to the file of --to, if given."""
    parser = argparse.ArgumentParser(description="List the versions that are installed here.")
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    if given.to:
        given.to.write_text(table(), encoding="utf-8")
    sys.stdout.write(f"{tried()}\n{table()}")


if __name__ == "__main__":
    main()
