"""An inspection on a terminal: a page or two of text, in tables of one head."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console

from attnbench.inspection import tables
from attnbench.inspection.found import Beside, Found, Step, Walk
from attnbench.inspection.tables import Table
from attnbench.reports.words import plain

GAP = "    "
NARROWEST, WIDEST = 60, 200
TOGETHER = (("x",), ("query", "key", "value"), ("scores", "masked scores", "weights"), ("context", "output"))
"""Steps whose tables stand beside one another where the terminal is wide enough."""


def write(found: Found, console: Console) -> None:
    """Everything, in order."""
    width = min(WIDEST, max(NARROWEST, console.width))
    for walk in found.walks:
        _print(console, walking(walk, width), title=f"Step by step: {sentence(walk.words)}")
    for walk in found.walks[:1]:
        _print(console, masking(walk, width), title="What the mask changes")
    _print(console, scaling(found, width), title="What the division by sqrt(K) is for")
    _print(console, comparison(found, width), title=f"{found.implementation} beside the oracle")
    lines = tables.first_difference(found)
    style = "bold red" if lines else "green" if found.is_checked else "yellow"
    for line in lines or [tables.agreement(found)]:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
    verdict = "Whether it is right, many inputs and shapes decide: attnbench check"
    console.print(f"{verdict} {found.spec}", style="dim", markup=False, highlight=False, soft_wrap=True)


def sentence(words: Sequence[str]) -> str:
    """A sentence on one line."""
    return plain(" ".join(words), limit=100)


def _print(console: Console, lines: Iterable[str], title: str) -> None:
    console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
    for line in lines:
        console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)
    console.print()


def walking(walk: Walk, width: int) -> Iterator[str]:
    """Each step with its shape, what it does and its values in head 0."""
    heads = walk.workload.num_heads
    yield f"mask {walk.workload.mask}, float64" + (f"; of {heads} heads, head 0 is shown" if heads > 1 else "")
    for names in TOGETHER:
        group = [walk.step(name) for name in names]
        yield ""
        yield from _headings(group, width)
        shown = [tables.of_step(walk, step)[0] for step in group]
        yield from side_by_side(shown if len(group) > 1 else [replace(shown[0], title="")], width)


def _headings(group: list[Step], width: int) -> Iterator[str]:
    name_len = max(len(step.name) for step in group)
    shape_len = max(len(step.shape) for step in group)
    for step in group:
        start = f"{step.name:{name_len}} {step.shape:{shape_len}}  "
        yield from textwrap.wrap(start + step.told, width, subsequent_indent=" " * len(start), drop_whitespace=True)


def side_by_side(found: Sequence[Table], width: int) -> Iterator[str]:
    """Tables beside one another as far as the width goes, then below; one too wide by itself loses columns."""
    waiting: list[list[str]] = []
    for table in found:
        block = _fitting(table, width)
        if waiting and sum(map(_width, [*waiting, block])) + len(GAP) * len(waiting) > width:
            yield from _joined(waiting)
            waiting = []
        waiting.append(block)
    yield from _joined(waiting)


def _fitting(table: Table, width: int) -> list[str]:
    block = lines_of(table)
    for most in range(len(table.columns) - 1, 0, -1):
        if _width(block) <= width:
            break
        block = lines_of(table.cut(most))
    return block


def lines_of(table: Table) -> list[str]:
    """A table as aligned lines; the marked cell stands in brackets."""
    lines = [[table.corner, *(f" {column} " for column in table.columns)]]
    for number, (heading, *texts) in enumerate(table.rows):
        at = table.marked[1] if table.marked is not None and table.marked[0] == number else None
        cells = [f"[{text}]" if place == at else f" {text} " for place, text in enumerate(texts)]
        lines.append([heading, *cells])
    widths = [max(cell_len(line[place]) for line in lines) for place in range(len(lines[0]))]
    aligned = [
        "".join(
            _padded(text, width, left=table.is_prose or place == 0)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return [table.title, *aligned] if table.title else aligned


def _padded(text: str, width: int, *, left: bool = False) -> str:
    space = " " * (width - cell_len(text))
    return text + space if left else space + text


def _width(block: Sequence[str]) -> int:
    return max(map(cell_len, block))


def _joined(blocks: list[list[str]]) -> Iterator[str]:
    widths = [_width(block) for block in blocks]
    for number in range(max(map(len, blocks), default=0)):
        parts = [block[number] if number < len(block) else "" for block in blocks]
        yield GAP.join(_padded(part, width, left=True) for part, width in zip(parts, widths, strict=True))


def masking(walk: Walk, width: int) -> Iterator[str]:
    """In words, and head 0 without the mask and under it."""
    effect = walk.masking
    if not effect.is_chosen:
        yield f"There is none here; as an example, what {effect.mask} would change."
    yield from textwrap.wrap(tables.masking(walk), width)
    if effect.is_felt:
        pair = (("without a mask", effect.without[0]), (f"under {effect.mask}", effect.under[0]))
        yield from side_by_side(
            [tables.of(f"weights {name}", "BHTS", values, walk.labels) for name, values in pair], width
        )


def scaling(found: Found, width: int) -> Iterator[str]:
    """The softmax of this sentence's scores with and without the scale, and of a few vectors."""
    walk = found.walks[0]
    yield from textwrap.wrap(tables.SATURATION, width)
    yield from side_by_side([tables.of_softness(walk)], width)
    yield from textwrap.wrap(tables.growing(found.growth), width)
    yield from side_by_side([tables.of_examples(found)], width)


def comparison(found: Found, width: int) -> Iterator[str]:
    """A table for each sentence, and the numbers of the first step that differs."""
    yield from textwrap.wrap(tables.METHOD, width)
    for beside, walk in zip(found.besides, found.walks, strict=True):
        if len(found.besides) > 1:
            yield f"\n{sentence(beside.words)}"
        yield from _compared(beside, walk, found.implementation, width)


def _compared(beside: Beside, walk: Walk, name: str, width: int) -> Iterator[str]:
    if beside.compared:
        yield from lines_of(tables.of_comparison(beside))
    if beside.unseen:
        yield from textwrap.wrap(beside.unseen, width)
    if beside.first is not None:
        yield from side_by_side(tables.of_difference(beside.first, walk.labels, plain(name)), width)
