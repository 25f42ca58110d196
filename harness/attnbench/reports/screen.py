"""The closing screen of a run: at most 25 lines of 80 columns for any sweep.

From top to bottom: the run and its correctness, the machine, warnings, findings, a table of shapes, the advice, memory,
undecided comparisons, and the files. If there are too many shapes, the least notable are omitted; summary.md has all.
"""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from attnbench.analysis.comparisons import doubts
from attnbench.analysis.conclusion import TIMED, Mark
from attnbench.analysis.results import Results
from attnbench.reports import cells, summary, titles
from attnbench.reports.answers import (
    SIGNS,
    Answer,
    batch_line,
    first_calls_line,
    legend,
    memory,
    memory_line,
    names,
    shapes,
)
from attnbench.storage.records import Record
from attnbench.units import MISSING, grouped, sanitize_line, show, text_lines

WIDTH, HEIGHT = 80, 25
HEADING, CELL, NAME = "Time of a call", 9, 20
"""HEADING: heading of the times; CELL and NAME: largest width in characters of a time with its sign, and of a name."""
MOST_DOUBTS, MOST_FINDINGS, MOST_MEMORY, MOST_ADVICE, FEW_ADVICE = 4, 3, 3, 6, 3  # most lines of the screen's parts
MOST_HEADING, MOST_FIRST_CALLS = 4, 4  # most lines of headings if each implementation has a row, and of first calls
JOINED = "\N{NO-BREAK SPACE}"  # keeps a name and its time on one line
FEW_OPEN = 3  # undecided comparisons are named if there are at most this many


class Line(NamedTuple):
    """A line of the screen, with its style on a terminal."""

    text: str
    style: str = ""


def screen(results: Results) -> list[Line]:
    """Return the lines of the closing screen.

    If two states of the code are compared, there is no advice, because the command prints a conclusion.
    """
    members, urgent = shapes(results), "reverse " * bool(doubts(results))
    findings = [*summary.findings(results), *summary.kept_memory(results)]
    more = f"{len(findings) - MOST_FINDINGS + 1} more findings: summary.md"
    head = _lines([summary.verdict(results)], "bold", most=2)
    head += _lines(summary.machine(results))
    head += _lines(summary.troubles(results), f"bold {urgent}yellow", MOST_DOUBTS, "More warnings: summary.md")
    head += _lines(
        [sanitize_line(text, WIDTH * (1 + (len(findings) == 1))) for text in findings], "red", MOST_FINDINGS, more
    )
    is_narrow = is_wide(members)
    most = FEW_ADVICE if is_narrow else MOST_ADVICE
    tail = [] if results.plan.sides is not None else _lines([" ".join(summary.answer(results))], "bold", most)
    tail += _lines([memory_line(members)] * (not is_narrow), most=MOST_MEMORY, more="More memory: summary.md")
    tail += _lines([batch_line(results)], most=MOST_MEMORY + 1)
    tail += _lines([first_calls_line(members)], most=MOST_FIRST_CALLS, more="More first calls: summary.md")
    tail += _lines(left_over(results, most_named=0 if is_narrow else FEW_OPEN))
    tail += [Line(f"Report: {results.folder / summary.PAGE}"), Line(f"Open: attnbench report {results.folder} --open")]
    if (results.folder / "summary.md").exists():
        drawn = ["picture.png"] * (results.folder / "picture.png").exists()  # if there was anything to draw
        tail.append(Line(f"Also there: {', '.join([*drawn, 'records.csv', 'summary.md'])}"))
    body = table(members, titles.base(results.plan), HEIGHT - len(head) - len(tail) - 2)
    return [*head, Line(""), *body, *([Line("")] if body else []), *tail]


def _lines(texts: Sequence[str], style: str = "", most: int = HEIGHT, more: str = "More: summary.md") -> list[Line]:
    """Wrap texts into at most `most` lines. If they need more, the cut text ends with "...", and `more` comes last."""
    lines, num_lines = list[str](), sum(len(textwrap.wrap(text, WIDTH)) for text in texts)
    for text in texts:
        if (room := most - (num_lines > most) - len(lines)) > 0:
            lines += textwrap.wrap(text, WIDTH, max_lines=room, placeholder=" ...")
    lines += [more] * (num_lines > most)
    return [Line(line, style) for line in lines]


def is_wide(members: Sequence[Answer]) -> bool:
    """Return whether a table with a column for each implementation is wider than WIDTH, so that each needs a row."""
    return max(map(len, _by_shape(members, names(members)))) > WIDTH


def table(members: Sequence[Answer], base: str, height: int = HEIGHT) -> list[Line]:
    """Format the time of each implementation on each shape, to fit `height` lines; empty if nothing was timed.

    A row is a shape or, if there are too many implementations, an implementation. If the shapes do not fit, the least
    notable are omitted first; among equally notable shapes, small ones first. `base` is the baseline's name.
    """
    timed = [shape for shape in members if shape.is_timed]
    if not timed:
        return []
    above = _lines([f"{titles.shared([shape.workload for shape in timed])}:"], "dim")
    room, is_narrow = height - len(above) - 2, is_wide(members)  # two lines are for the legend and omitted shapes
    most = max(1, (WIDTH - _name_width(names(timed))) // (CELL + 1) - 1) if is_narrow else max(1, room - 1)
    ranked = sorted(timed, key=lambda shape: (not shape.is_notable, not shape.is_open, -shape.workload.num_scores))
    kept = [shape for shape in timed if shape in ranked[:most]]
    every = names(kept)
    lines = _by_implementation(kept, every, room) if is_narrow else _by_shape(kept, every)
    below = [f"{signs}."] if (signs := legend(kept)) else []
    if dropped := [shape for shape in timed if shape not in kept]:
        nothing = sum(not (shape.is_notable or shape.is_open) for shape in dropped)
        where = "any" if nothing == len(dropped) else nothing
        note = f"; nothing is faster than {base} in {where} of them" if nothing else ""
        below.append(f"{len(dropped)} more shapes (summary.md){note}.")
    if len(" ".join(below)) <= WIDTH:
        below = [" ".join(below)] * bool(below)
    heading = next(number for number, line in enumerate(lines) if line.startswith(HEADING))
    styled = [Line(line, "bold" if number <= heading else "") for number, line in enumerate(lines)]
    return [*above, *styled, *(Line(line, "dim") for line in below)]


def _by_shape(members: Sequence[Answer], every: Sequence[str]) -> list[str]:
    """Return the lines of a table with a row for each shape; for two states of the code, with a column of verdicts."""
    labels = [shape.label for shape in members]
    labels = ["" if before == label else label for before, label in zip(["", *labels], labels, strict=False)]
    columns = {HEADING: labels} if any(labels) else {}
    columns |= {"" if columns else HEADING: [shape.length for shape in members]}
    for name in every:
        columns[sanitize_line(name, 24)] = [_aligned(shape.text_of(name)) for shape in members]
    right = {*range(len(columns) - len(every), len(columns))}
    if any(shape.has_sides for shape in members):
        columns["verdict"] = [_verdict(shape) for shape in members]
    rows = list(zip(*columns.values(), strict=True))
    return text_lines([*columns], rows, right=right)


def _verdict(shape: Answer) -> str:
    """Format the verdict on the candidate, with its factor if it is faster or slower."""
    (cell,) = shape.others or (None,)
    if cell is None or cell.mark is None:
        return MISSING
    return f"{cell.mark} {cell.factor:.2f}x" if cell.mark in {Mark.faster, Mark.slower} else str(cell.mark)


def _by_implementation(members: Sequence[Answer], every: Sequence[str], room: int) -> list[str]:
    """Return the lines of a table with a row for each implementation, below headings of several lines.

    Implementations that do not fit into `room` lines follow in a sentence about the largest shape.
    """
    largest, peaks = memory(members) or (members[-1], {})

    def texts_of(shape: Answer) -> list[str]:
        return [_aligned(shape.text_of(name)) for name in every]

    columns = [(shape.name, texts_of(shape)) for shape in members]
    amounts = [f"{show(peaks.get(name), 'bytes', digits=2)}  " for name in every]
    columns += [(f"memory {largest.name}", amounts)] * bool(peaks)
    parts, width = [textwrap.wrap(name, CELL)[-MOST_HEADING:] for name, _ in columns], _name_width(every)
    tall = max(map(len, parts))
    heads = [[*[""] * (tall - len(part)), *part] for part in parts]

    def heading(parts: Sequence[str]) -> str:
        return " " * width + "".join(f" {part.rjust(CELL)}" for part in parts)

    lines = list(map(heading, zip(*heads, strict=True)))
    lines[-1] = HEADING + lines[-1][len(HEADING) :]
    last = max(members, key=lambda shape: shape.workload.num_scores)
    for number in range(len(every), 0, -1):
        texts = [
            f"{sanitize_line(name, NAME)} {last.text_of(name).strip()}".replace(" ", JOINED) for name in every[number:]
        ]
        others = textwrap.wrap(f"At {last.name}: {', '.join(texts)}.", WIDTH) if texts else []
        if tall + number + len(others) <= room:
            break
    for place, name in enumerate(every[:number]):
        lines.append(
            sanitize_line(name, NAME).ljust(width) + "".join(f" {texts[place].rjust(CELL)}" for _, texts in columns)
        )
    shown = textwrap.wrap(" ".join(others), WIDTH, max_lines=max(1, room - tall - number), placeholder=" (summary.md)")
    return [line.replace(JOINED, " ").rstrip() for line in [*lines, *shown]]


def _name_width(every: Sequence[str]) -> int:
    return max(len(HEADING), *(len(sanitize_line(name, NAME)) for name in every))


def _aligned(text: str) -> str:
    """Append two spaces to a text that does not end with a sign, such as "*", so that numbers line up."""
    return text if text[-1] in SIGNS or text.endswith(" ") else f"{text}  "


def _limit(records: Sequence[Record]) -> str:
    """List the lengths of cells that were predicted to exceed a limit, with the reason of the first cell."""
    lengths = ", ".join(dict.fromkeys(titles.length(record.workload.axes()) for record in records))
    return sanitize_line(f"T={lengths}: {records[0].message.partition(';')[0]}", 2 * WIDTH)


def left_over(results: Results, *, most_named: int = FEW_OPEN) -> list[str]:
    """Return lines about undecided, doubtful and untried cells, and about unsupported or omitted implementations."""
    judged = [(cell, shape) for shape in shapes(results) for cell in shape.others if cell.mark in TIMED]
    parts = []
    for kind in (Mark.doubtful, Mark.undecided) if judged else ():
        unsure = [(cell, shape) for cell, shape in judged if cell.mark is kind]
        texts = [
            shape.name if shape.has_sides else f"{sanitize_line(cell.name, 24)} at {shape.name}"
            for cell, shape in unsure
        ]
        names = f" ({'; '.join(texts)})" if 0 < len(texts) <= most_named else ""
        if unsure or kind is Mark.undecided:
            parts.append(f"{kind.capitalize()}: {len(unsure)} of {len(judged)}{names}.")
    limits = grouped((record for record in results.records if record.is_predicted), lambda record: record.arm)
    if limits:
        texts = [f"{sanitize_line(str(arm), 24)} ({_limit(alike)})" for arm, alike in limits.items()]
        named = max(1, most_named)
        more = [f"{len(texts) - named} more (report.html)"] * (len(texts) > named)
        parts.append(f"Not tried, over a limit: {'; '.join([*texts[:named], *more])}.")
    if absent := cells.absent_implementations(results):
        few = [sanitize_line(f"{name}: {why}", 2 * WIDTH // len(absent)) for name, why in absent.items()]
        counted = f"{len(few)} implementation{'s' * (len(few) > 1)} (summary.md)"
        parts.append(f"Unsupported: {'; '.join(few) if len(few) <= most_named else counted}.")
    parts += [f"Left out: {text}."] if (text := summary.left_out(results)) else []
    whole = " ".join(parts)
    return [whole] if len(whole) <= WIDTH else parts
