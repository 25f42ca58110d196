"""The closing screen of a run: at most 25 lines of 80 columns for any sweep.

In order: the run and its correctness, the machine and any warning, a table of shapes, the advice, memory, the
undecided, and the files. If there are too many shapes, the least notable are omitted; `-v` prints every cell.
"""

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from attnbench.analysis.comparisons import doubts
from attnbench.analysis.conclusion import TIMED, Mark
from attnbench.analysis.results import Results
from attnbench.reports import cells, story, text_lines, titles
from attnbench.reports.answers import Shape, memory_line, shapes
from attnbench.units import MISSING, plain, show

WIDTH, HEIGHT = 80, 25
FEW_OTHERS = 3
"""Up to this number, slower implementations have a column even if others are faster or equal."""
MOST_DOUBTS, MOST_FINDINGS, MOST_MEMORY = 4, 3, 3
"""Most lines of each section."""
FEW_OPEN = 2
"""Most undecided implementations that a row names."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the screen, with its style on a terminal."""

    text: str
    style: str = ""


def screen(results: Results, *, width: int = WIDTH, height: int = HEIGHT) -> list[Line]:
    """The closing screen of a run; if two states of the code are compared, the answer is in the command's last line."""
    members = shapes(results)
    head = _wrapped([story.verdict(results)], width, "bold")[:2]
    head += _wrapped([*story.machine(results), story.hosts(results)], width)
    head += _troubles(results, width) + _findings(results, width)
    answer = "" if results.plan.sides is not None else " ".join(story.answer(results))
    files = [
        f"Report: {results.folder / 'report.html'}",
        "Open: attnbench report --open   Also there: picture.png, records.csv, summary.md",
    ]
    tail = _wrapped([answer], width, "bold")[: max(2, height // 4)]
    tail += _memory(members, width) + [Line(text=line) for line in [*left_over(results, width), *files]]
    body = table(members, titles.base(results.plan), width, height - len(head) - len(tail) - 2)
    return [*head, Line(text=""), *body, *([Line(text="")] if body else []), *tail]


def _wrapped(texts: Sequence[str], width: int, style: str = "") -> list[Line]:
    return [Line(text=line, style=style) for text in texts for line in textwrap.wrap(text, width)]


def _troubles(results: Results, width: int) -> list[Line]:
    lines = list[Line]()
    for text in story.troubles(results):
        lines += _wrapped([text], width, "bold reverse yellow" if text in doubts(results) else "bold yellow")
    if len(lines) <= MOST_DOUBTS:
        return lines
    return [*lines[: MOST_DOUBTS - 1], Line(text="More about that is in summary.md.", style="bold yellow")]


def _findings(results: Results, width: int) -> list[Line]:
    texts = [*story.findings(results), *story.kept_memory(results)]
    lines = [Line(text=plain(text, width), style="red") for text in texts[:MOST_FINDINGS]]
    if len(texts) > MOST_FINDINGS:
        lines[-1] = Line(text=f"{len(texts) - MOST_FINDINGS + 1} more findings: -v, or summary.md", style="red")
    return lines


def table(members: Sequence[Shape], base: str, width: int, height: int) -> list[Line]:
    """Format the shapes with their times and marks; empty if nothing was timed.

    If they do not fit, shapes on which nothing is faster are omitted first, short ones before long ones.
    """
    timed = [shape for shape in members if any(cell.seconds is not None for cell in shape.cells)]
    if not timed:
        return []
    above = _wrapped([f"{titles.shared([shape.workload for shape in timed])}:"], width, "dim")
    room, below = max(2, height - len(above) - 1), list[Line]()
    ranked = sorted(timed, key=lambda shape: (not shape.is_notable, not shape.is_open, -shape.workload.num_scores))
    if dropped := ranked[room - 1 :] if len(timed) > room else []:
        nothing = sum(not (shape.is_notable or shape.is_open) for shape in dropped)
        note = f"; in {nothing} of them nothing is faster than {base}" if nothing else ""
        below = [Line(text=f"{len(dropped)} more rows (-v){note}.", style="dim")]
    heading, *lines = _rows([shape for shape in timed if shape not in dropped], base, width)
    return [*above, Line(text=heading, style="bold"), *(Line(text=line) for line in lines), *below]


COLUMNS = (Mark.wrong, Mark.failed, Mark.faster, Mark.equal, Mark.undecided, Mark.doubtful, Mark.slower, Mark.right)
"""Columns of the table; if it is too wide, the last ones are omitted."""
MOST_NAMES = {**dict.fromkeys(COLUMNS, (3, 3, 2, 1, 1, 0)), Mark.wrong: (3,) * 6, Mark.failed: (3,) * 6}
MOST_NAMES |= dict.fromkeys((Mark.equal, Mark.undecided, Mark.doubtful), (3, 1, 1, 1, 0, 0))
"""Names in a cell of each column, from the widest table to the narrowest."""


def _rows(members: Sequence[Shape], base: str, width: int) -> list[str]:
    """The lines of the table, its headings first, within the width."""
    every = [cell for shape in members for cell in shape.others]
    present, num_names = {cell.mark for cell in every}, len({cell.name for cell in every})
    is_crowded = num_names > FEW_OTHERS and present & {Mark.faster, Mark.equal, Mark.doubtful}
    columns = [mark for mark in COLUMNS if mark in present and not (is_crowded and mark in {Mark.slower, Mark.right})]
    labels = [shape.label for shape in members]
    labels = ["" if before == label else label for before, label in zip(["", *labels], labels, strict=False)]
    lengths = [shape.length for shape in members]
    first = {"Time of a call": labels, "": lengths} if any(labels) else {"Time of a call": lengths}
    first |= {base: [shape.time_of(base) for shape in members]}
    lines = list[str]()
    for number, step in itertools.product(range(len(columns), -1, -1), range(len(MOST_NAMES[Mark.equal]))):
        texts = {
            str(mark): [_named(shape, mark, MOST_NAMES[mark][step]) for shape in members] for mark in columns[:number]
        }
        rows = list(zip(*first.values(), *texts.values(), strict=True))
        lines = text_lines([*first, *texts], rows, right={len(first) - 1})
        if max(map(len, lines)) <= width:
            break
    return lines


def _named(shape: Shape, mark: Mark, most: int) -> str:
    """At most `most` names with a mark, and their factors, with a count of the rest: "bmm 1.68x +3"."""
    found = shape.having(mark)
    is_open = mark in {Mark.undecided, Mark.doubtful} and len(found) > FEW_OPEN
    if not found or not most or is_open:
        return str(len(found)) if found else MISSING
    texts = [plain(cell.name, 24) for cell in found[:most]]
    if mark in {Mark.faster, Mark.slower}:
        texts = [f"{text} {max(cell.speedup, 1 / cell.speedup):.2f}x" for text, cell in zip(texts, found, strict=False)]
    if mark is Mark.right:
        texts = [f"{text} {show(cell.seconds, 's')}" for text, cell in zip(texts, found, strict=False)]
    return ", ".join(texts) + (f" +{len(found) - most}" if len(found) > most else "")


def _memory(members: Sequence[Shape], width: int) -> list[Line]:
    """Memory of the implementations on the largest shape; amounts in the middle are omitted if there are too many."""
    texts = (_wrapped([memory_line(members, most)], width) for most in (100, *range(10, 1, -1)))
    return next((lines for lines in texts if len(lines) <= MOST_MEMORY), [])


def left_over(results: Results, width: int = WIDTH) -> list[str]:
    """Count comparisons without a verdict, and implementations that are not installed."""
    parts = []
    marks = [cell.mark for shape in shapes(results) for cell in shape.others if cell.mark in TIMED]
    if marks:
        kind = Mark.doubtful if Mark.doubtful in marks else Mark.undecided
        parts.append(f"{kind.capitalize()}: {marks.count(kind)} of {len(marks)}.")
    if out := sum(record.is_predicted for record in results.records):
        parts.append(f"Not tried, over a limit: {out} (-v).")
    if absent := cells.absent(results):
        parts.append(f"Not installed or no GPU: {len(absent)} (attnbench list).")
    whole = "   ".join(parts)
    return [whole] if parts and len(whole) <= width else parts
