"""Print every table of the tutorials: `python -m examples.tutorials [000 001 002 003 004] [--json]`."""

import argparse
import json
import sys
from typing import Any

import torch
from torch import Tensor

from examples.tutorials import TUTORIALS

LINE_LEN = 120


def main() -> None:
    """Print the tables of the tutorials that are named on the command line, or of all."""
    parser = argparse.ArgumentParser(prog="python -m examples.tutorials", description=__doc__)
    parser.add_argument("tutorials", nargs="*", metavar="NUMBER", help=f"{', '.join(TUTORIALS)}; default: all")
    parser.add_argument("--json", action="store_true", help="for a program to read; -inf is written as text")
    asked = parser.parse_args()
    for number in asked.tutorials:
        if number not in TUTORIALS:
            parser.error(f"there is no tutorial {number}; choose among {', '.join(TUTORIALS)}")
    made = {number: TUTORIALS[number]() for number in asked.tutorials or TUTORIALS}
    if asked.json:
        printable = {
            number: {name: plain(table.tolist()) for name, table in tables.items()} for number, tables in made.items()
        }
        sys.stdout.write(json.dumps(printable, indent=1) + "\n")
        return
    torch.set_printoptions(linewidth=LINE_LEN, threshold=sys.maxsize)
    for number, tables in made.items():
        for name, table in tables.items():
            sys.stdout.write(f"{number} {name} {tuple(table.shape)}\n{shown(table)}\n\n")


def shown(table: Tensor) -> str:
    """Format a tensor as torch prints it, without `tensor(...)`."""
    return str(table).removeprefix("tensor(").removesuffix(")").replace("\n       ", "\n")


def plain(value: Any) -> Any:
    """Replace infinite numbers in nested lists by text, since JSON has none."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value if abs(value) != float("inf") else str(value)


if __name__ == "__main__":
    main()
