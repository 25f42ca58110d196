"""The closing screen of a run: at most 25 lines of 80 columns for any sweep.

In order: the run and its correctness, the machine and any warning, a table of shapes, the advice, memory, the
undecided, and the files. If there are too many shapes they are folded; `-v` prints a table of every cell.
"""

import itertools
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnbench.analysis.comparisons import doubts
from attnbench.analysis.conclusion import TIMED, Mark
from attnbench.analysis.results import Results
from attnbench.reports import cells, grouped, story, text_lines, titles
from attnbench.reports.answers import Shape, memory_line, shapes
from attnbench.reports.cells import Cell
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
    tail = _wrapped([answer], width, "bold")[: max(2, height // 4)]
    tail += _memory(members, width) + [Line(text=line) for line in [*left_over(results, width), *where(results)]]
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


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Shapes in one row: with one label, at neighbouring lengths."""

    label: str
    members: tuple[Shape, ...]

    @property
    def length(self) -> str:
        """The range of lengths."""
        first, last = self.members[0], self.members[-1]
        if len(self.members) == 1:
            return first.length
        is_decoding = first.workload.seq_len == last.workload.seq_len
        return f"{first.length}-{last.workload.kv_len if is_decoding else last.length.removeprefix('T=')}"

    def seconds(self, base: str) -> str:
        """The range of the baseline's times, or of those of its substitute."""
        known = [shape.base.seconds for shape in self.members if shape.base and shape.base.seconds is not None]
        if len(known) < 2:  # noqa: PLR2004 - no range
            return self.members[0].time_of(base)
        low, high = show(min(known), "s", digits=2), show(max(known), "s", digits=2)
        return f"{low.split()[0]}-{high}" if low.split()[1] == high.split()[1] else f"{low}-{high}"

    @property
    def rank(self) -> tuple[bool, bool]:
        """Sort key of importance: rows in which something is faster come first, then undecided ones."""
        is_notable = any(shape.is_notable for shape in self.members)
        return not is_notable, not any(shape.is_open for shape in self.members)

    def named(self, mark: Mark, most: int) -> str:
        """At most `most` names with a mark, and their factors, with a count of the rest: "bmm 1.68x +3"."""
        places = [(shape, cell) for shape in self.members for cell in shape.having(mark)]
        by_name = grouped(places, lambda place: place[1].name)
        is_open = mark in {Mark.undecided, Mark.doubtful} and len(by_name) > FEW_OPEN
        if not by_name or not most or is_open:
            return str(len(by_name)) if by_name else MISSING
        names = sorted(by_name, key=lambda name: -len(by_name[name]))[:most]
        more = len(by_name) - len(names)
        return ", ".join(self._named(mark, by_name[name]) for name in names) + (f" +{more}" if more else "")

    def _named(self, mark: Mark, places: Sequence[tuple[Shape, Cell]]) -> str:
        """One name with its factors, and with its lengths if it has the mark on a part of the shapes."""
        text = plain(places[0][1].name, 24)
        if mark in {Mark.faster, Mark.slower}:
            factors = sorted(max(cell.speedup, 1 / cell.speedup) for _, cell in places)
            text += f" {'-'.join(dict.fromkeys(f'{end:.2f}' for end in (factors[0], factors[-1])))}x"
        if mark is Mark.right:
            text += f" {show(places[0][1].seconds, 's')}"
        if len(places) < len(self.members):
            at = [shape.length.removeprefix("T=") for shape, _ in places]
            text += f" at {'-'.join(dict.fromkeys((at[0], at[-1])))}"
        return text


def table(members: Sequence[Shape], base: str, width: int, height: int) -> list[Line]:
    """Format the shapes with their times and marks; empty if nothing was timed."""
    timed = [shape for shape in members if any(cell.seconds is not None for cell in shape.cells)]
    if not timed:
        return []
    above = _wrapped([f"{titles.shared([shape.workload for shape in timed])}:"], width, "dim")
    folds, note = folded(timed, max(2, height - len(above) - 1), base)
    heading, *lines = _rows(folds, base, width)
    below = [Line(text=note, style="dim")] if note else []
    return [*above, Line(text=heading, style="bold"), *(Line(text=line) for line in lines), *below]


LEVELS: tuple[Callable[[Shape], object], ...] = (
    lambda shape: shape.workload.id,
    lambda shape: [frozenset(cell.name for cell in shape.having(mark)) for mark in (Mark.faster, Mark.equal)],
    lambda shape: (shape.best.name if shape.best else "", shape.is_open),
    lambda _: 0,
)
"""Criteria for folding neighbouring lengths of a label into one row; the first that fits is used."""


def folded(members: Sequence[Shape], room: int, base: str) -> tuple[list[Fold], str]:
    """Fold the shapes until they fit into the rows, with a note on omitted rows; notable rows are omitted last."""
    folds: list[Fold] = []
    for key in LEVELS:
        folds = [
            Fold(label=label, members=tuple(neighbours))
            for label, alike in grouped(members, lambda shape: shape.label).items()
            for _, neighbours in itertools.groupby(alike, lambda shape: (shape.base and shape.base.name, key(shape)))  # noqa: B023 - used at once
        ]
        if len(folds) <= room:
            return folds, ""
    ranked = sorted(folds, key=lambda fold: fold.rank)
    kept, dropped = ranked[: room - 1], ranked[room - 1 :]
    nothing = sum(fold.rank == (True, True) for fold in dropped)
    note = f"{len(dropped)} more rows (-v); in {nothing} of them nothing is faster than {base}."
    return [fold for fold in folds if fold in kept], note


COLUMNS = (Mark.wrong, Mark.failed, Mark.faster, Mark.equal, Mark.undecided, Mark.doubtful, Mark.slower, Mark.right)
"""Columns of the table; if it is too wide, the last ones are omitted."""
MOST_NAMES = {**dict.fromkeys(COLUMNS, (3, 3, 2, 1, 1, 0)), Mark.wrong: (3,) * 6, Mark.failed: (3,) * 6}
MOST_NAMES |= dict.fromkeys((Mark.equal, Mark.undecided, Mark.doubtful), (3, 1, 1, 1, 0, 0))
"""Names in a cell of each column, from the widest table to the narrowest."""


def _rows(folds: Sequence[Fold], base: str, width: int) -> list[str]:
    """The lines of the table, its headings first, within the width."""
    every = [cell for fold in folds for shape in fold.members for cell in shape.others]
    present, num_names = {cell.mark for cell in every}, len({cell.name for cell in every})
    is_crowded = num_names > FEW_OTHERS and present & {Mark.faster, Mark.equal, Mark.doubtful}
    columns = [mark for mark in COLUMNS if mark in present and not (is_crowded and mark in {Mark.slower, Mark.right})]
    labels = ["" if place and folds[place - 1].label == fold.label else fold.label for place, fold in enumerate(folds)]
    lengths = [fold.length for fold in folds]
    first = {"Time of a call": labels, "": lengths} if any(labels) else {"Time of a call": lengths}
    first |= {base: [fold.seconds(base) for fold in folds]}
    for number in range(len(columns), -1, -1):
        for step in range(len(MOST_NAMES[Mark.equal])):
            texts = {
                str(mark): [fold.named(mark, MOST_NAMES[mark][step]) for fold in folds] for mark in columns[:number]
            }
            rows = list(zip(*first.values(), *texts.values(), strict=True))
            lines = text_lines([*first, *texts], rows, right={len(first) - 1})
            if max(map(len, lines)) <= width:
                return lines
    return lines


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


def where(results: Results) -> list[str]:
    """The files of the run."""
    also = "Open: attnbench report --open   Also there: picture.png, records.csv, summary.md"
    return [f"Report: {results.folder / 'report.html'}", also]
