"""An inspection as text for a terminal: tables with words as headings, and sentences, a page or two in all."""

import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console

from attnbench.inspection.oracle_diff import Comparison, Inspection, OracleDiff, Outcome
from attnbench.inspection.walkthrough import LETTERS, NUM_KEYS, WIDTHS, Numbers, Walkthrough, descriptions, examples
from attnbench.units import MISSING, plain, significant

SMALLEST_PLAIN = 1e-3
METHOD = (
    "float32 compared with float64; a difference counts beyond what honest float32 code shows. Each step is given "
    "what the oracle computed before it, the output is the whole module's, and the weights are its context where the "
    "values are unit vectors."
)
SATURATION = (
    "Scores of random vectors grow as sqrt(K), and a softmax of large scores is all but 0 and 1, where its gradient is "
    "all but 0. This sentence's scores, without a mask, all heads:"
)
GAP = "    "
NARROWEST, WIDEST = 60, 200
TOGETHER = (("x",), ("query", "key", "value"), ("scores", "masked scores", "weights"), ("context", "output"))
"""Steps whose tables are placed side by side on a wide terminal."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Texts with headings; `marked` is the most important cell (row, column)."""

    title: str
    headings: Sequence[str]  # starts with the heading of the row headings
    rows: Sequence[Sequence[str]]  # each starts with its heading
    marked: tuple[int, int] | None = None
    is_prose: bool = False  # words, aligned to the left

    def cut(self, most: int) -> "Table":
        """The first columns, with a note on their number."""
        number = len(self.headings) - 1
        if number <= most:
            return self
        title = f"{self.title} (columns 1 to {most} of {number})"
        rows = [row[: most + 1] for row in self.rows]
        return replace(self, title=title, headings=self.headings[: most + 1], rows=rows)

    def lines(self) -> list[str]:
        """The table as aligned lines, with the marked cell in brackets."""
        texts = [[row[0], *(f" {text} " for text in row[1:])] for row in (self.headings, *self.rows)]
        if self.marked is not None:
            row, column = self.marked
            texts[row + 1][column + 1] = f"[{self.rows[row][column + 1]}]"
        columns = []
        for place, column_texts in enumerate(zip(*texts, strict=True)):
            width = max(map(cell_len, column_texts))
            spaces = [" " * (width - cell_len(text)) for text in column_texts]
            is_left = self.is_prose or place == 0
            pairs = zip(column_texts, spaces, strict=True)
            columns.append([text + space if is_left else space + text for text, space in pairs])
        return [*filter(None, [self.title]), *map("".join, zip(*columns, strict=True))]


def formatted(values: Numbers) -> list[list[str]]:
    """Format numbers (R, C) with equally many decimals, enough for three digits of the largest; an exact 0 is "0"."""
    largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
    form = ".2e"
    if largest == 0.0 or SMALLEST_PLAIN <= largest < 1e5:  # noqa: PLR2004
        before = 0 if largest == 0.0 else math.floor(math.log10(largest))
        form = f".{min(4, max(0, 2 - before))}f"

    def text(value: float) -> str:
        number = format(value, form)
        return "0" if value == 0.0 else number.removeprefix("-") if float(number) == 0.0 else number

    return [[text(value) for value in row] for row in values.tolist()]


def brief(number: float) -> str:
    """One number to four significant digits at most."""
    if not math.isfinite(number):
        return str(number)
    return f"{number:.3g}" if abs(number) < SMALLEST_PLAIN else f"{number:.4g}"


def value_table(
    title: str, letters: str, values: Numbers, labels: Sequence[str], marked: tuple[int, int] | None = None
) -> Table:
    """Values (T or S, S or a width) of an array with those letters; words label the rows, and columns that are keys."""
    is_of_keys = letters.endswith("S")
    headings = ["query", *labels] if is_of_keys else ["word", *map(str, range(values.shape[1]))]
    rows = [[label, *texts] for label, texts in zip(labels, formatted(values), strict=True)]
    return Table(title=title, headings=headings, rows=rows, marked=marked)


def step_tables(walk: Walkthrough, name: str) -> list[Table]:
    """A step's tables, one for each head; a single table for a step without heads."""
    letters, values = LETTERS[name], walk.steps[name]
    kind = {"H": "head", "G": "key/value head"}.get(letters[1], "")
    if walk.workload.num_heads == walk.workload.num_kv_heads:
        kind = kind and "head"
    return [
        value_table(f"{name}, {kind} {head}" if kind else name, letters, each, walk.labels)
        for head, each in enumerate(values.reshape(-1, *values.shape[-2:]))
    ]


def difference_tables(comparison: Comparison | None, labels: Sequence[str], name: str) -> list[Table]:
    """The head with the largest difference, of the implementation and of the oracle; empty if nothing was compared."""
    if comparison is None or comparison.actual is None or comparison.place is None:
        return []
    head, (row, column) = comparison.place[:-2], comparison.place[-2:]
    which = f", head {head[1]}" if len(head) > 1 else ""
    return [
        value_table(f"{comparison.name} of {who}{which}", comparison.letters, values[head], labels, (row, column))
        for who, values in ((name, comparison.actual), ("the oracle", comparison.oracle))
    ]


def comparison_table(diff: OracleDiff) -> Table:
    """One row for each compared step."""
    rows = []
    for each in diff.comparisons:
        values = [brief(value) for value in each.values_there() or ()] or [MISSING, MISSING]
        largest = MISSING if each.actual is None else f"{each.largest:.1e}"
        step = each.name if each.name == each.step else f"{each.step}: {each.name}"
        place = each.where(diff.walk.words) if each.outcome is not Outcome.agrees else ""
        where = each.trouble or place or MISSING
        rows.append((step, str(each.outcome), largest, f"{each.tolerance:.1e}", *values, where))
    headings = ("step", "result", "largest difference", "tolerance", "here", "oracle", "where")
    return Table(title="", headings=headings, rows=rows, is_prose=True)


def softness_table(walk: Walkthrough) -> Table:
    """The sharpness of the softmax of a sentence's scores."""
    most = significant(math.log2(len(walk.words)), 3) if len(walk.words) > 1 else "0"
    rows = [(name, brief(largest), f"{brief(entropy)} of {most}") for name, (largest, entropy) in walk.scaling.items()]
    return Table(title="", headings=("softmax of", "largest weight", "entropy in bits"), rows=rows)


def example_table() -> Table:
    """The softmax of a few vectors."""
    rows = [(name, *("  ".join(map(brief, numbers)) for numbers in pair)) for name, pair in examples().items()]
    return Table(title="", headings=("softmax of", "scores", "weights"), rows=rows, is_prose=True)


def growth_sentence(inspection: Inspection) -> str:
    """The largest weight at the largest K."""
    with_scale, without = (brief(quartiles[-1, 1]) for quartiles in inspection.growth)
    setup = f"A random query over {NUM_KEYS} random keys of width K={WIDTHS[-1]}"
    return f"{setup}: the largest weight is {with_scale} with the division and {without} without (medians)."


def first_difference(inspection: Inspection) -> list[str]:
    """For each sentence with a difference, the first step that differs, in words."""
    lines = []
    for diff in inspection.diffs:
        if (first := diff.first) is None:
            continue
        where = "" if len(inspection.diffs) == 1 else f"in '{diff.walk.sentence()}', "
        name = first.step if first.name == first.step else f"{first.step} ({first.name})"
        there = first.values_there()
        if there is None:
            lines.append(f"{where}{name}: {first.trouble}")
        else:
            values = f"{brief(there[0])}, the oracle says {brief(there[1])}"
            lines.append(f"{where}{name}: first difference, {first.where(diff.walk.words)}: {values}")
    return lines


def agreement(inspection: Inspection) -> str:
    """The conclusion if no step differs."""
    if not inspection.is_checked:
        return f"{inspection.implementation} was not compared: {inspection.diffs[0].unseen}"
    return f"{inspection.implementation} agrees with the oracle in every step that can be seen."


def mask_sentences(walk: Walkthrough, head: int = 0) -> str:
    """The effect of the mask in a sentence or two."""
    effect = walk.mask
    pairs, hidden = effect.seen.size, int((~effect.seen).sum())
    if not effect.has_effect:
        return f"Mask {effect.mask} hides none of the {pairs} pairs of query and key here: it changes nothing."
    text = f"Mask {effect.mask} ({effect.summary}) hides {hidden or 'none'} of {pairs} pairs. "
    change = np.abs(effect.under - effect.without)[head] * effect.seen
    if not change.any():
        return text + "A query that sees no key has weights and a context of 0."
    row, column = np.unravel_index(int(change.argmax()), change.shape)
    query, key = walk.labels[row], walk.labels[column]
    before, after = brief(effect.without[head, row, column]), brief(effect.under[head, row, column])
    if effect.seen[row].all():
        return f"{text}In head {head}, query '{query}' gave key '{key}' {before} and now gives it {after}."
    lost = brief(float((effect.without[head, row] * ~effect.seen[row]).sum()))
    text += f"In head {head}, query '{query}' had {lost} of its weight on keys that are now hidden; "
    return f"{text}the others make up for it: key '{key}' goes from {before} to {after}."


def write(inspection: Inspection, console: Console) -> None:
    """Print everything, in order."""
    width = min(WIDEST, max(NARROWEST, console.width))
    for title, lines in _sections(inspection, width):
        console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
        for line in lines:
            console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)
        console.print()
    differences = first_difference(inspection)
    style = "bold red" if differences else "green" if inspection.is_checked else "yellow"
    for line in differences or [agreement(inspection)]:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
    advice = f"To check it on many inputs and shapes: attnbench check {inspection.spec}"
    console.print(advice, style="dim", markup=False, highlight=False, soft_wrap=True)


def _sections(inspection: Inspection, width: int) -> Iterator[tuple[str, list[str]]]:
    """Each title with its lines: all sentences step by step, the mask, the scale, the comparison with the oracle."""
    for walk in inspection.walks:
        yield f"Step by step: {walk.sentence(100)}", list(_walk_lines(walk, width))
    first = inspection.walks[0]
    effect = first.mask
    lines = [] if effect.is_chosen else [f"There is none here; as an example, what {effect.mask} would change."]
    lines += textwrap.wrap(mask_sentences(first), width)
    if effect.has_effect:
        pair = (("without a mask", effect.without[0]), (f"under {effect.mask}", effect.under[0]))
        tables = [value_table(f"weights {name}", "BHTS", values, first.labels) for name, values in pair]
        lines += side_by_side(tables, width)
    yield "What the mask changes", lines
    lines = [*textwrap.wrap(SATURATION, width), *side_by_side([softness_table(first)], width)]
    lines += textwrap.wrap(growth_sentence(inspection), width)
    lines += side_by_side([example_table()], width)
    yield "What the division by sqrt(K) is for", lines
    lines = textwrap.wrap(METHOD, width)
    for diff in inspection.diffs:
        lines += [f"\n{diff.walk.sentence(100)}"] if len(inspection.diffs) > 1 else []
        lines += comparison_table(diff).lines() if diff.comparisons else []
        lines += textwrap.wrap(diff.unseen, width)
        lines += side_by_side(difference_tables(diff.first, diff.walk.labels, plain(inspection.implementation)), width)
    yield f"{inspection.implementation} compared with the oracle", lines


def _walk_lines(walk: Walkthrough, width: int) -> Iterator[str]:
    """Each step with its shape, its description and its values in head 0."""
    heads, described = walk.workload.num_heads, descriptions(walk.workload)
    yield f"mask {walk.workload.mask}, float64" + (f"; of {heads} heads, head 0 is shown" if heads > 1 else "")
    for names in TOGETHER:
        yield ""
        name_len, shape_len = max(map(len, names)), max(len(walk.shape(name)) for name in names)
        for name in names:
            start = f"{name:{name_len}} {walk.shape(name):{shape_len}}  "
            yield from textwrap.wrap(start + described[name], width, subsequent_indent=" " * len(start))
        tables = [step_tables(walk, name)[0] for name in names]
        yield from side_by_side(tables if len(names) > 1 else [replace(tables[0], title="")], width)


def side_by_side(tables: Sequence[Table], width: int) -> Iterator[str]:
    """Place tables side by side within the width, then below; a table that is too wide alone loses columns."""
    rows: list[list[list[str]]] = []  # blocks of lines
    room = 0
    for table in tables:
        block = table.lines()
        for most in range(len(table.headings) - 2, 0, -1):
            if max(map(cell_len, block)) <= width:
                break
            block = table.cut(most).lines()
        wide = max(map(cell_len, block))
        block = [set_cell_size(line, wide) for line in block]
        if rows and wide <= room:
            rows[-1].append(block)
        else:
            rows.append([block])
            room = width
        room -= wide + len(GAP)
    for blocks in rows:
        blanks = [" " * cell_len(block[0]) for block in blocks]
        for lines in itertools.zip_longest(*blocks):
            yield GAP.join(line or blank for line, blank in zip(lines, blanks, strict=True))
