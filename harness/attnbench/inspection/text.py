"""Show an inspection: tables with the words as headings, and a sentence that concludes it.

The terminal shows the comparison with the oracle. The page, one HTML file without scripts, also shows the result of
every step, with shaded weights.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np
from rich.console import Console

from attnbench.inspection.oracle_diff import LETTERS, Comparison, Inspection, Numbers, Walkthrough
from attnbench.storage.files import write_atomically, writing_to
from attnbench.units import MISSING, sanitize_line, text_lines

PAGE = "inspect.html"
TEMPLATES = [Path(__file__).parent, Path(__file__).parents[1] / "reports"]
SMALLEST_PLAIN, LARGEST_PLAIN = 1e-3, 1e5
"""Limits for decimal notation: if the largest number of a table is outside of them, all numbers have exponents."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts with headings."""

    title: str = ""
    headings: Sequence[str]  # of all columns, including the column of row headings
    rows: Sequence[Sequence[str]]  # each starts with its heading
    marked: tuple[int, int] | None = None  # row and column, without headings, of the most important cell
    is_prose: bool = False  # cells contain words, aligned to the left
    shades: Sequence[Sequence[float]] = ()  # of each cell except headings, from 0 to 1; empty: no cell is shaded

    def lines(self, width: int) -> list[str]:
        """Format the table as lines for a terminal of `width` columns, with the marked cell in brackets."""
        rows = [list(row) for row in self.rows]
        if self.marked is not None:
            row, column = self.marked
            rows[row][column + 1] = f"[{rows[row][column + 1]}]"
        right = () if self.is_prose else range(1, len(self.headings))
        return [*filter(None, [self.title]), *text_lines(self.headings, rows, width=width, right=right)]


def formatted(values: Numbers) -> list[list[str]]:
    """Format all numbers (R, C) with the same number of decimals, or all with an exponent.

    There are 0 to 4 decimals, so that the largest number has three significant digits if possible. Exponents are used
    if the largest number is below SMALLEST_PLAIN, or not below LARGEST_PLAIN. The number 0 becomes "0".
    """
    largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
    form = ".2e"
    if largest == 0.0 or SMALLEST_PLAIN <= largest < LARGEST_PLAIN:
        before = 0 if largest == 0.0 else math.floor(math.log10(largest))
        form = f".{min(4, max(0, 2 - before))}f"

    def text(value: float) -> str:
        number = format(value, form)
        return "0" if value == 0.0 else number.removeprefix("-") if float(number) == 0.0 else number

    return [list(map(text, row)) for row in values.tolist()]


def value_table(
    title: str, letters: str, values: Numbers, labels: Sequence[str], marked: tuple[int, int] | None = None
) -> Table:
    """Format a matrix (T, columns) with a row for each word; `labels` has the words.

    `letters` are the axes of the values. If they end with S, the columns are also words (the keys), and the table is
    shaded if all values are between 0 and 1. `marked` is the row and column of the most important cell.
    """
    is_of_keys = letters.endswith("S")
    headings = ["query", *labels] if is_of_keys else ["word", *map(str, range(values.shape[1]))]
    rows = [[label, *texts] for label, texts in zip(labels, formatted(values), strict=True)]
    is_shaded = is_of_keys and bool(((values >= 0) & (values <= 1)).all())
    return Table(title=title, headings=headings, rows=rows, marked=marked, shades=values.tolist() if is_shaded else ())


def step_tables(walk: Walkthrough, name: str) -> list[Table]:
    """Create the tables of a step's result: one for each head, or a single table if the result has no heads."""
    letters, values = LETTERS[name], walk.steps[name]
    kind = {"H": "head", "G": "head" if walk.workload.num_heads == walk.workload.num_kv_heads else "key/value head"}
    return [
        value_table(f"{name}, {kind[letters[1]]} {head}" if letters[1] in kind else name, letters, each, walk.labels)
        for head, each in enumerate(values.reshape(-1, *values.shape[-2:]))
    ]


def difference_tables(comparison: Comparison | None, labels: Sequence[str], name: str) -> list[Table]:
    """Create two tables of a step's result: the result of the implementation `name`, and that of the oracle.

    Both tables show the head of `comparison.place`. The list is empty if there is nothing to compare.
    """
    if comparison is None or comparison.actual is None or comparison.place is None:
        return []
    head, (row, column) = comparison.place[:-2], comparison.place[-2:]
    which = f", head {head[1]}" if len(head) > 1 else ""
    return [
        value_table(f"{comparison.name} of {who}{which}", LETTERS[comparison.name], values[head], labels, (row, column))
        for who, values in ((name, comparison.actual), ("the oracle", comparison.oracle))
    ]


def comparison_table(inspection: Inspection) -> Table:
    """Create a table with one row for each compared step."""
    rows = []
    for each in inspection.comparisons:
        values = [f"{value:.4g}" for value in each.values_there() or ()] or [MISSING, MISSING]
        largest = MISSING if each.actual is None else f"{each.largest:.1e}"
        step = each.name if each.name == each.step else f"{each.step}: {each.name}"
        where = MISSING if each.agrees else each.trouble or each.where(inspection.walk.words)
        rows.append((step, "agrees" if each.agrees else "DIFFERS", largest, f"{each.tolerance:.1e}", *values, where))
    headings = ("step", "result", "largest difference", "tolerance", "here", "oracle", "where")
    return Table(headings=headings, rows=rows, is_prose=True)


def first_difference(inspection: Inspection) -> str:
    """Describe the first step that differs, and its difference; return "" if no step differs."""
    if (first := inspection.first) is None:
        return ""
    name = first.step if first.name == first.step else f"{first.step} ({first.name})"
    text = first.trouble
    if there := first.values_there():
        values = f"{there[0]:.4g}, the oracle has {there[1]:.4g}"
        text = f"largest difference at {first.where(inspection.walk.words)}: {values}"
    return f"{name}: {text}"


def agreement(inspection: Inspection) -> str:
    """Return the sentence that concludes an inspection in which no step differs."""
    if not inspection.comparisons:
        return f"{inspection.implementation} was not compared: {inspection.unseen}"
    return f"{inspection.implementation} agrees with the oracle in every step that can be seen."


def facts(inspection: Inspection, files: Sequence[Path]) -> dict[str, object]:
    """Return the comparison of each step as fields of JSON, with numbers as strings, and the paths of written files."""
    table = comparison_table(inspection)
    return {
        "implementation": inspection.implementation,
        "differs": inspection.first is not None,
        "first_difference": first_difference(inspection),
        "steps": [dict(zip(table.headings, row, strict=True)) for row in table.rows],
        "files": [str(file) for file in files],
    }


def write(inspection: Inspection, console: Console) -> None:
    """Print the comparison with the oracle, the values around the first difference, and the conclusion."""

    def say(line: str, style: str = "") -> None:
        console.print(line.rstrip(), style=style, markup=False, highlight=False, soft_wrap=True)

    width, walk = console.width, inspection.walk
    tables = [comparison_table(inspection)] if inspection.comparisons else []
    tables += difference_tables(inspection.first, walk.labels, sanitize_line(inspection.implementation))
    lines = [walk.sentence(100), *(line for table in tables for line in ["", *table.lines(width)])]
    for line in [*lines, "", *textwrap.wrap(inspection.unseen, width), *[""] * bool(inspection.unseen)]:
        say(line)
    difference = first_difference(inspection)
    style = "bold red" if difference else "green" if inspection.comparisons else "yellow"
    say(difference or agreement(inspection), style)
    say(f"To check it on many inputs and shapes: attnbench check {inspection.spec}", "dim")


def write_page(inspection: Inspection, folder: Path) -> Path:
    """Write inspect.html into the folder, and return its path; the template escapes all text from outside.

    Raises:
        ValueError: the folder cannot be written.
    """
    loader = jinja2.FileSystemLoader(TEMPLATES)
    templates = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    functions = (step_tables, difference_tables, comparison_table, first_difference, agreement)
    texts = {function.__name__: function for function in functions}
    page = templates.get_template("page.html.jinja").render(inspection=inspection, **texts)
    with writing_to(folder):
        return write_atomically(folder / PAGE, page)
