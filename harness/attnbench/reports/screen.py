"""The closing screen of a run: at most 25 lines of 80 columns for any sweep.

In order: the run and its correctness, the machine and any warning, a table of shapes, the advice, memory, the
undecided, and the files. If there are too many shapes they are folded; `-v` prints a table of every cell.
"""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnbench.analysis.comparisons import comparisons, doubts
from attnbench.analysis.conclusion import TIMED, Mark
from attnbench.analysis.results import Results
from attnbench.reports import cells, grouped, story, text_lines
from attnbench.reports.answers import Cell, Shape, memory_line, shapes, shared
from attnbench.storage.records import Verdict
from attnbench.units import MISSING, plain, show

WIDTH, HEIGHT = 80, 25
FEW_OTHERS = 3
"""Up to this number, each implementation has a column of its own."""
MOST_DOUBTS, MOST_FINDINGS, MOST_MEMORY = 4, 3, 3
"""Most lines of each section."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the screen, with its style on a terminal."""

    text: str
    style: str = ""


def screen(results: Results, *, width: int = WIDTH, height: int = HEIGHT) -> list[Line]:
    """The closing screen of a run; that of two states of the code has its answer in the command's last line."""
    found = shapes(results)
    head = [Line(text=line, style="bold") for line in textwrap.wrap(story.verdict(results), width)[:2]]
    head += [Line(text=line) for text in story.machine(results) for line in textwrap.wrap(text, width)]
    head += [Line(text=line) for line in textwrap.wrap(story.hosts(results), width)]
    head += _troubles(results, width) + _findings(results, width)
    answer = "" if results.plan.sides is not None else " ".join(story.answer(results))
    tail = [Line(text=line, style="bold") for line in textwrap.wrap(answer, width)]
    tail = tail[: max(2, height // 4)]
    tail += _memory(found, width)
    tail += [Line(text=line) for line in left_over(results, width)]
    tail += [Line(text=line) for line in where(results)]
    body = table(found, cells.base(results.plan), width, height - len(head) - len(tail) - 2)
    return [*head, Line(text=""), *body, *([Line(text="")] if body else []), *tail]


def _troubles(results: Results, width: int) -> list[Line]:
    lines = [
        Line(text=line, style="bold reverse yellow" if text in doubts(results) else "bold yellow")
        for text in story.troubles(results)
        for line in textwrap.wrap(text, width)
    ]
    if len(lines) <= MOST_DOUBTS:
        return lines
    return [*lines[: MOST_DOUBTS - 1], Line(text="More about that is in summary.md.", style="bold yellow")]


def _findings(results: Results, width: int) -> list[Line]:
    found = [*story.findings(results), *story.kept_memory(results)]
    lines = [Line(text=plain(text, width), style="red") for text in found[:MOST_FINDINGS]]
    if len(found) > MOST_FINDINGS:
        lines[-1] = Line(text=f"{len(found) - MOST_FINDINGS + 1} more findings: -v, or summary.md", style="red")
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

    @property
    def seconds(self) -> str:
        """The range of the baseline's times."""
        known = [each.base.seconds for each in self.members if each.base is not None and each.base.seconds is not None]
        if not known:
            return MISSING
        if len(known) == 1:
            return show(known[0], "s")
        low, high = show(min(known), "s", digits=2), show(max(known), "s", digits=2)
        return f"{low.split()[0]}-{high}" if low.split()[1] == high.split()[1] else f"{low}-{high}"

    @property
    def is_notable(self) -> bool:
        """Whether any of the shapes is."""
        return any(shape.is_notable for shape in self.members)

    @property
    def is_open(self) -> bool:
        """Whether an undecided implementation may be faster."""
        return any(shape.is_open for shape in self.members)

    def having(self, mark: Mark) -> dict[str, list[tuple[Shape, Cell]]]:
        """Shapes with this mark by implementation, the most frequent first."""
        places = [(shape, cell) for shape in self.members for cell in shape.having(mark)]
        found = grouped(places, lambda place: place[1].name)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def table(found: Sequence[Shape], base: str, width: int, height: int) -> list[Line]:
    """Format the shapes with their times and marks; empty if nothing was timed."""
    timed = [each for each in found if any(cell.seconds is not None for cell in each.cells)]
    if not timed:
        return []
    above = [Line(text=line, style="dim") for line in textwrap.wrap(shared(timed), width)]
    room = max(2, height - len(above) - 1)
    folds, note = folded(timed, room, base)
    lines = _rows(folds, base, width)
    return [
        *above,
        Line(text=lines[0], style="bold"),
        *(Line(text=line) for line in lines[1:]),
        *([Line(text=note, style="dim")] if note else []),
    ]


def folded(found: Sequence[Shape], room: int, base: str) -> tuple[list[Fold], str]:
    """Fold the shapes until they fit into the rows, with a note on omitted rows."""
    by_label = grouped(found, lambda each: each.label).values()
    folds: list[Fold] = []
    for alike in LEVELS:
        folds = [fold for members in by_label for fold in _folds(members, alike)]
        if len(folds) <= room:
            return folds, ""
    return _dropped(folds, room, base)


LEVELS: tuple[Callable[[Shape], object], ...] = (
    lambda shape: shape.workload.id,
    lambda shape: [frozenset(cell.name for cell in shape.having(mark)) for mark in (Mark.faster, Mark.equal)],
    lambda shape: (shape.best.name if shape.best else "", shape.is_open),
    lambda _: 0,
)
"""Criteria for folding neighbouring lengths of a label into one row; the first that fits is used."""


def _dropped(folds: Sequence[Fold], room: int, base: str) -> tuple[list[Fold], str]:
    """Keep the rows that fit: first the notable ones, then the open ones."""
    ranked = sorted(folds, key=lambda fold: (not fold.is_notable, not fold.is_open))
    kept, dropped = ranked[: room - 1], ranked[room - 1 :]
    nothing = sum(not fold.is_notable and not fold.is_open for fold in dropped)
    note = f"{len(dropped)} more rows (-v); in {nothing} of them nothing is faster than {base}."
    return [fold for fold in folds if fold in kept], note


def _folds(own: Sequence[Shape], key: Callable[[Shape], object]) -> list[Fold]:
    ordered = sorted(own, key=lambda each: (each.workload.kv_len, each.workload.seq_len))
    runs: list[list[Shape]] = []
    for shape in ordered:
        if runs and key(runs[-1][-1]) == key(shape):
            runs[-1].append(shape)
        else:
            runs.append([shape])
    return [Fold(label=run[0].label, members=tuple(run)) for run in runs]


def _rows(folds: Sequence[Fold], base: str, width: int) -> list[str]:
    """The lines of the table, its headings first, within the width."""
    names = list(dict.fromkeys(cell.name for fold in folds for shape in fold.members for cell in shape.others))
    is_plain = all(len(fold.members) == 1 for fold in folds)
    if len(names) <= FEW_OTHERS and is_plain:
        lines = _lines(folds, base, {name: [_own(fold, name) for fold in folds] for name in names})
        if max(map(len, lines)) <= width:
            return lines
    present = {mark for mark in Mark if any(shape.having(mark) for fold in folds for shape in fold.members)}
    columns = COLUMNS if present & {Mark.faster, Mark.equal, Mark.doubtful} else (*COLUMNS, Mark.slower, Mark.right)
    shown = [mark for mark in columns if mark in present]
    most = dict.fromkeys(shown, MOST_NAMES)
    while True:
        named = {str(mark): [_named(fold, mark, most[mark]) for fold in folds] for mark in shown}
        lines = _lines(folds, base, named)
        if max(map(len, lines)) <= width or not any(most.values()):
            break
        widths = {mark: max(map(len, named[mark])) for mark in shown if most[mark]}
        most[max(widths, key=lambda mark: widths[mark] / WEIGHTS.get(mark, 1.0))] -= 1
    while max(map(len, lines)) > width and len(named) > 1:
        named.popitem()
        lines = _lines(folds, base, named)
    return lines


COLUMNS = (Mark.wrong, Mark.failed, Mark.faster, Mark.equal, Mark.undecided, Mark.doubtful)
MOST_NAMES, FEW_OPEN = 3, 2
"""Names in a cell of the table, and undecided names; more are counted."""
WEIGHTS = {Mark.faster: 2.0, Mark.slower: 2.0, Mark.wrong: 2.0, Mark.failed: 2.0}
"""Relative widths of columns, from which names are left out first where they are too wide; all others have 1."""


def _lines(folds: Sequence[Fold], base: str, columns: dict[str, list[str]]) -> list[str]:
    labels = ["" if place and folds[place - 1].label == each.label else each.label for place, each in enumerate(folds)]
    has_labels = any(labels)
    first = {"Time of a call": labels, "": [each.length for each in folds]}
    if not has_labels:
        first = {"Time of a call": [each.length for each in folds]}
    every = {**first, base: [each.seconds for each in folds], **columns}
    right = {len(first)}
    return text_lines(list(every), list(zip(*every.values(), strict=True)), right=right)


def _own(fold: Fold, name: str) -> str:
    cell = next((each for each in fold.members[0].others if each.name == name), None)
    return MISSING if cell is None else cell.words


def _named(fold: Fold, mark: Mark, most: int) -> str:
    """The names with a mark and their factors, with a count of the rest: "bmm 1.68x +3"."""
    found = fold.having(mark)
    if not found or not most or (mark in {Mark.undecided, Mark.doubtful} and len(found) > FEW_OPEN):
        return str(len(found)) if found else MISSING
    texts = []
    for name, places in list(found.items())[:most]:
        text = plain(name, 24)
        if mark in {Mark.faster, Mark.slower}:
            factors = sorted(max(cell.speedup, 1 / cell.speedup) for _, cell in places)
            low, high = f"{factors[0]:.2f}", f"{factors[-1]:.2f}"
            text += f" {low}x" if low == high else f" {low}-{high}x"
        if mark is Mark.right:
            text += f" {places[0][1].words}"
        if len(places) < len(fold.members):
            at = [shape.length.removeprefix("T=") for shape, _ in places]
            text += f" at {at[0]}" + (f"-{at[-1]}" if len(at) > 1 else "")
        texts.append(text)
    more = len(found) - len(texts)
    return ", ".join(texts) + (f" +{more}" if more else "")


def _memory(found: Sequence[Shape], width: int) -> list[Line]:
    """Memory of the implementations on the largest shape; amounts in the middle are omitted if there are too many."""
    texts = (textwrap.wrap(memory_line(found, most), width) for most in (100, *range(10, 1, -1)))
    lines = next((lines for lines in texts if len(lines) <= MOST_MEMORY), [])
    return [Line(text=line) for line in lines]


def left_over(results: Results, width: int = WIDTH) -> list[str]:
    """Count comparisons without a verdict, and implementations that are not installed."""
    parts = []
    marks = [cell.mark for shape in shapes(results) for cell in shape.others if cell.mark in TIMED]
    if Mark.doubtful in marks:
        parts.append(f"Doubtful: {marks.count(Mark.doubtful)} of {len(marks)}.")
    elif marks:
        more = story.more_time([each for each in comparisons(results) if each.verdict is Verdict.undecided])
        parts.append(f"Undecided: {marks.count(Mark.undecided)} of {len(marks)}{f' ({more})' if more else ''}.")
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
