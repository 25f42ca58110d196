"""Compare the verdicts of `attnbench check` in two kinds of workers: `python -m studies.portable --out DIR NAME...`.

Forked workers are for Linux, spawned ones for all systems. Each NAME is a file or a bundled implementation; without
names, all bundled ones are checked. Both kinds get the same seed. Rerun the command to resume. The exit code is 1 if a
verdict, a mistake or an exit code differs.
"""

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from attnbench.units import markdown_table
from studies import frame
from studies.frame import Piece, Row

SEED = 7
WAYS = {"forked": {}, "spawned": {"ATTNBENCH_WORKERS": "spawn"}}
COMPARED = ("verdict", "mistakes")
"""Fields of an answer that must be equal for both kinds of workers. Broken rules are not compared: if code draws random
numbers or caches by address, it breaks different rules in different processes."""


def checked(name: str, way: str) -> dict[str, Any]:
    """Run `attnbench check` with `way` workers; return its exit code, answers by implementation, and error message."""
    command = [sys.executable, "-m", "attnbench", "check", name, "--seed", str(SEED), "--json"]
    done = subprocess.run(command, env=os.environ | WAYS[way], capture_output=True, text=True, check=False)  # noqa: S603 - our own
    try:
        implementations = json.loads(done.stdout)["implementations"]
    except (json.JSONDecodeError, KeyError):
        implementations = {}
    message = (done.stderr.strip().splitlines() or [""])[-1] * (not implementations)
    return {"exit_code": done.returncode, "implementations": implementations, "message": message}


def compare(name: str, _: int) -> list[Row]:
    """Check a file or implementation with both kinds of workers; return a row for each implementation in it."""
    ends = {way: checked(name, way) for way in WAYS}
    rows = []
    for implementation in sorted({each for end in ends.values() for each in end["implementations"]}) or [""]:
        row: Row = {"name": Path(name).stem, "implementation": implementation}
        for way, end in ends.items():
            answer = end["implementations"].get(implementation, {})
            facts = [str(answer[key]) for key in COMPARED if key in answer] or [end["message"]]
            row[way] = ", ".join([*facts, f"exit code {end['exit_code']}"])
            row[f"{way} cells"] = str(answer.get("num_compared", 0))
        rows.append(row)
    return rows


def table(rows: list[Row]) -> str:
    """Format the number of equal verdicts, then a table with a row for each implementation."""
    num_same = sum(row["forked"] == row["spawned"] for row in rows)
    return f"{num_same} of {len(rows)} judged alike by forked and spawned workers.\n\n{markdown_table(rows)}\n"


def main(arguments: list[str] | None = None) -> int:
    """Check the names that have no rows yet, and print the table of all names; return 1 if a row differs, else 0."""
    parser = argparse.ArgumentParser(prog="python -m studies.portable", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where rows are kept")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="files or implementations; all bundled ones by default"
    )
    options = parser.parse_args(arguments)
    names = options.names or sorted(file.stem for file in Path("implementations").glob("[a-z]*.py"))
    frame.complete([Piece(name=name, make=partial(compare, name)) for name in names], options.out)
    rows = [row for name in names for row in frame.rows(options.out, name)]
    sys.stdout.write(table(rows))
    return 0 if all(row["forked"] == row["spawned"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
