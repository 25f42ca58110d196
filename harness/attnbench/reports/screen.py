"""The closing screen of a run: at most 25 lines of 80 columns for any sweep.

In order: the run and its correctness, the machine and any warning, a table of shapes, the advice, memory, the
undecided, and the files. If there are too many shapes, the least notable are omitted: summary.md has all.
"""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from attnbench.analysis.comparisons import doubts
from attnbench.analysis.conclusion import TIMED, Mark
from attnbench.analysis.results import Results
from attnbench.reports import cells, story, titles
from attnbench.reports.answers import COLUMNS, Answer, first_calls_line, memory_line, shapes
from attnbench.units import plain, text_lines

WIDTH, HEIGHT = 80, 25
FEW_OTHERS = 3  # up to this number, slower implementations have a column even if others are faster or equal
MOST_DOUBTS, MOST_FINDINGS, MOST_MEMORY, MOST_ADVICE, MOST_FIRST_CALLS = 4, 3, 3, 6, 4  # most lines of each section
FEW_OPEN = 3  # most undecided comparisons that are named


class Line(NamedTuple):
    """A line of the screen, with its style on a terminal."""

    text: str
    style: str = ""


def screen(results: Results) -> list[Line]:
    """The closing screen of a run; if two states of the code are compared, the answer is in the command's last line."""
    members, urgent = shapes(results), "reverse " * bool(doubts(results))
    findings = [*story.findings(results), *story.kept_memory(results)]
    more = f"{len(findings) - MOST_FINDINGS + 1} more findings: summary.md"
    head = _lines([story.verdict(results)], "bold", most=2)
    head += _lines(story.machine(results))
    head += _lines(story.troubles(results), f"bold {urgent}yellow", MOST_DOUBTS, "More warnings: summary.md")
    head += _lines([plain(text, WIDTH * (1 + (len(findings) == 1))) for text in findings], "red", MOST_FINDINGS, more)
    tail = [] if results.plan.sides is not None else _lines([" ".join(story.answer(results))], "bold", MOST_ADVICE)
    tail += _lines([memory_line(members)], most=MOST_MEMORY, more="More memory: summary.md")
    tail += _lines([first_calls_line(members)], most=MOST_FIRST_CALLS, more="More first calls: summary.md")
    tail += _lines(left_over(results))
    tail += [Line(f"Report: {results.folder / story.PAGE}"), Line(f"Open: attnbench report {results.folder} --open")]
    if (results.folder / "summary.md").exists():
        drawn = ["picture.png"] * (results.folder / "picture.png").exists()  # if there was anything to draw
        tail.append(Line(f"Also there: {', '.join([*drawn, 'records.csv', 'summary.md'])}"))
    body = table(members, titles.base(results.plan), HEIGHT - len(head) - len(tail) - 2)
    return [*head, Line(""), *body, *([Line("")] if body else []), *tail]


def _lines(texts: Sequence[str], style: str = "", most: int = HEIGHT, more: str = "More: summary.md") -> list[Line]:
    """The texts, wrapped; if they have more than `most` lines, `more` is the last one."""
    lines = [line for text in texts for line in textwrap.wrap(text, WIDTH)]
    lines = lines if len(lines) <= most else [*lines[: most - 1], more]
    return [Line(line, style) for line in lines]


def table(members: Sequence[Answer], base: str, height: int = HEIGHT) -> list[Line]:
    """Format the shapes with their times and marks; empty if nothing was timed.

    If they do not fit, shapes on which nothing is faster are omitted first, short ones before long ones.
    """
    timed = [shape for shape in members if any(cell.seconds is not None for cell in shape.cells)]
    if not timed:
        return []
    above = _lines([f"{titles.shared([shape.workload for shape in timed])}:"], "dim")
    room, below = max(2, height - len(above) - 1), list[Line]()
    ranked = sorted(timed, key=lambda shape: (not shape.is_notable, not shape.is_open, -shape.workload.num_scores))
    if dropped := ranked[room - 1 :] if len(timed) > room else []:
        nothing = sum(not (shape.is_notable or shape.is_open) for shape in dropped)
        where = "any" if nothing == len(dropped) else nothing
        note = f"; nothing is faster than {base} in {where} of them" if nothing else ""
        below = [Line(f"{len(dropped)} more rows (summary.md){note}.", "dim")]
    heading, *lines = _rows([shape for shape in timed if shape not in dropped], base)
    return [*above, Line(heading, "bold"), *map(Line, lines), *below]


LEAST = {Mark.wrong: 3, Mark.failed: 3, Mark.faster: 1}  # fewest names in a column of the narrowest table


def _rows(members: Sequence[Answer], base: str) -> list[str]:
    """The lines of the table, its headings first, within the width."""
    every = [cell for shape in members for cell in shape.others]
    present, num_names = {cell.mark for cell in every}, len({cell.name for cell in every})
    is_crowded = num_names > FEW_OTHERS and present & {Mark.faster, Mark.equal, Mark.doubtful}
    columns = [mark for mark in COLUMNS if mark in present and not (is_crowded and mark in {Mark.slower, Mark.right})]
    labels = [shape.label for shape in members]
    labels = ["" if before == label else label for before, label in zip(["", *labels], labels, strict=False)]
    first = {"Time of a call": labels} if any(labels) else {}
    first |= {"" if first else "Time of a call": [shape.length for shape in members]}
    first |= {base: [shape.time_of(base) for shape in members]}
    options = [(columns, most) for most in (3, 2, 1, 0)]
    options += [(columns[:number], 0) for number in reversed(range(len(columns)))]
    lines = list[str]()
    for marks, most in options:
        texts = {str(mark): [shape.named(mark, max(most, LEAST.get(mark, 0))) for shape in members] for mark in marks}
        rows = list(zip(*first.values(), *texts.values(), strict=True))
        lines = text_lines([*first, *texts], rows, right={len(first) - 1})
        if max(map(len, lines)) <= WIDTH:
            break
    return lines


def left_over(results: Results) -> list[str]:
    """Comparisons without a verdict, by name if they are few, and implementations that are not installed."""
    judged = [(cell, shape) for shape in shapes(results) for cell in shape.others if cell.mark in TIMED]
    parts = []
    for kind in (Mark.doubtful, Mark.undecided) if judged else ():
        unsure = [(cell, shape) for cell, shape in judged if cell.mark is kind]
        texts = [shape.name if shape.has_sides else f"{plain(cell.name, 24)} at {shape.name}" for cell, shape in unsure]
        names = f" ({'; '.join(texts)})" if 0 < len(texts) <= FEW_OPEN else ""
        if unsure or kind is Mark.undecided:
            parts.append(f"{kind.capitalize()}: {len(unsure)} of {len(judged)}{names}.")
    if out := sum(record.is_predicted for record in results.records):
        parts.append(f"Not tried, over a limit: {out} (report.html).")
    if absent := cells.absent(results):
        few = [plain(f"{name}: {why}", 2 * WIDTH // len(absent)) for name, why in absent.items()]
        parts.append(f"Unsupported: {'; '.join(few) if len(few) <= FEW_OPEN else f'{len(few)} (reasons: summary.md)'}.")
    whole = "   ".join(parts)
    return [whole] if len(whole) <= WIDTH else parts
