"""Numbers as tables of text with words as headings, for the terminal and the page alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnbench.inspection.found import TOLERANCE, Beside, Compared, Found, Growth, Numbers, Outcome, Step, Walk
from attnbench.reports.words import plain
from attnbench.units import MISSING, significant

LARGEST_PLAIN = 1e5
SMALLEST_PLAIN = 1e-3
MOST_DECIMALS = 4
METHOD = (
    f"float32 beside float64; a difference counts above {TOLERANCE:g} of the largest value. Each step is given "
    "what the oracle made before it, the output is the whole module's, and the weights are what its context is where "
    "the values are unit vectors."
)
SATURATION = (
    "Scores of random vectors grow as sqrt(K), and a softmax of large scores is all but 0 and 1, where it hands back "
    "all but no gradient. This sentence's scores, without a mask, all heads:"
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Texts with headings; `marked` is the cell (row, column) that matters most."""

    title: str
    corner: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]  # each begins with its heading
    marked: tuple[int, int] | None = None
    is_prose: bool = False  # words rather than numbers: begin at the left

    def cut(self, most: int) -> "Table":
        """The first columns alone, and how many there are."""
        if len(self.columns) <= most:
            return self
        title = f"{self.title} (columns 1 to {most} of {len(self.columns)})"
        rows = tuple(row[: most + 1] for row in self.rows)
        return replace(self, title=title, columns=self.columns[:most], rows=rows)


def shown(values: Numbers) -> list[list[str]]:
    """Numbers (R, C) with as many decimals as three digits of the largest need, the same for all."""
    finite = np.abs(values[np.isfinite(values)])
    largest = float(finite.max(initial=0.0))
    if largest >= LARGEST_PLAIN or 0.0 < largest < SMALLEST_PLAIN:
        return [[_number(value, ".2e") for value in row] for row in values.tolist()]
    before = 0 if largest == 0.0 else math.floor(math.log10(largest))
    decimals = min(MOST_DECIMALS, max(0, 2 - before))
    return [[_number(value, f".{decimals}f") for value in row] for row in values.tolist()]


def _number(value: float, form: str) -> str:
    if value == 0.0:
        return "0"  # exactly: hidden, not merely small
    text = format(value, form)
    return text.removeprefix("-") if float(text) == 0.0 else text


def of(
    title: str,
    letters: str,
    values: Numbers,
    labels: Sequence[str],
    marked: tuple[int, int] | None = None,
) -> Table:
    """Values (T or S, S or a width) of an array with those letters: words head the rows, and columns that are keys."""
    is_of_keys = letters.endswith("S")
    columns = tuple(labels) if is_of_keys else tuple(map(str, range(values.shape[1])))
    rows = tuple((label, *texts) for label, texts in zip(labels, shown(values), strict=True))
    return Table(title=title, corner="query" if is_of_keys else "word", columns=columns, rows=rows, marked=marked)


def of_step(walk: Walk, step: Step) -> list[Table]:
    """A step's tables, one for each head."""
    found = step.tables
    kind = {"H": "head", "G": "key/value head"}.get(step.letters[1], "")
    if walk.workload.num_heads == walk.workload.num_kv_heads:
        kind = kind and "head"
    titles = [f"{step.name}, {kind} {head}" if kind else step.name for head in range(len(found))]
    return [of(title, step.letters, values, walk.labels) for title, values in zip(titles, found, strict=True)]


def of_difference(compared: Compared, labels: Sequence[str], name: str) -> list[Table]:
    """The head that differs most: the implementation's table beside the oracle's; none where it made none."""
    if compared.here is None or compared.place is None:
        return []
    head, (row, column) = compared.place[:-2], compared.place[-2:]
    told = f", head {head[1]}" if len(head) > 1 else ""
    return [
        of(f"{compared.name} of {who}{told}", compared.letters, values[head], labels, (row, column))
        for who, values in ((name, compared.here), ("the oracle", compared.oracle))
    ]


def of_comparison(beside: Beside) -> Table:
    """A row for each thing that was compared."""
    rows = []
    for each in beside.compared:
        there = each.values_there()
        values = (MISSING, MISSING) if there is None else (brief(there[0]), brief(there[1]))
        largest = MISSING if each.here is None else f"{each.largest:.1e}"
        step = each.name if each.name == each.step else f"{each.step}: {each.name}"
        place = each.where(beside.words) if each.outcome is not Outcome.agrees else ""
        rows.append(
            (step, str(each.outcome), largest, f"{each.allowed:.1e}", *values, each.trouble or place or MISSING)
        )
    columns = ("result", "largest difference", "allowed", "here", "oracle", "where")
    return Table(title="", corner="step", columns=columns, rows=tuple(rows), is_prose=True)


def of_softness(walk: Walk) -> Table:
    """How sharp the softmax of a sentence's scores is."""
    most = significant(math.log2(len(walk.words)), 3) if len(walk.words) > 1 else "0"
    rows = [(each.name, brief(each.largest), f"{brief(each.entropy)} of {most}") for each in walk.scaling]
    columns = ("largest weight", "entropy in bits")
    return Table(title="", corner="softmax of", columns=columns, rows=tuple(rows))


def of_examples(found: Found) -> Table:
    """The softmax of a few vectors."""
    rows = [(each.name, _vector(each.scores), _vector(each.weights)) for each in found.examples]
    return Table(title="", corner="softmax of", columns=("scores", "weights"), rows=tuple(rows), is_prose=True)


def _vector(numbers: Sequence[float]) -> str:
    return "  ".join(brief(number) for number in numbers)


def brief(number: float) -> str:
    """One number to four significant digits at most."""
    if not math.isfinite(number):
        return str(number)
    return f"{number:.3g}" if abs(number) < SMALLEST_PLAIN else f"{number:.4g}"


def growing(growth: Growth) -> str:
    """The end of the growth with K, in a sentence."""
    with_scale, without = brief(growth.with_scale[-1, 1]), brief(growth.without[-1, 1])
    told = f"A random query over {growth.num_keys} random keys of width K={growth.widths[-1]}"
    return f"{told}: the largest weight is {with_scale} with the division and {without} without (medians)."


def first_difference(found: Found) -> list[str]:
    """For each sentence in which the implementation differs, the first step that does, in words."""
    lines = []
    for beside in found.besides:
        first = beside.first
        if first is None:
            continue
        sentence = "" if len(found.besides) == 1 else f"in '{plain(' '.join(beside.words))}', "
        name = first.step if first.name == first.step else f"{first.step} ({first.name})"
        there = first.values_there()
        if there is None:
            lines.append(f"{sentence}{name}: {first.trouble}")
        else:
            told = f"{brief(there[0])}, the oracle says {brief(there[1])}"
            lines.append(f"{sentence}{name}: first difference, {first.where(beside.words)}: {told}")
    return lines


def agreement(found: Found) -> str:
    """How the implementation compares, where no step differs."""
    if not found.is_checked:
        return f"{found.implementation} was not compared: {found.besides[0].unseen}"
    return f"{found.implementation} agrees with the oracle in every step that can be seen."


def masking(walk: Walk, head: int = 0) -> str:
    """What the mask changes, in a sentence or two."""
    effect = walk.masking
    pairs, hidden = effect.seen.size, int((~effect.seen).sum())
    if not effect.is_felt:
        return f"Mask {effect.mask} hides none of the {pairs} pairs of query and key here: it changes nothing."
    told = f"Mask {effect.mask} ({effect.summary}) hides {hidden or 'none'} of {pairs} pairs. "
    gap = np.abs(effect.under - effect.without)[head] * effect.seen
    if not gap.any():
        return told + "A query that sees no key has weights and a context of 0."
    row, column = np.unravel_index(int(gap.argmax()), gap.shape)
    labels = walk.labels
    before, after = effect.without[head, row, column], effect.under[head, row, column]
    if effect.seen[row].all():
        told += f"In head {head}, query '{labels[row]}' gave key '{labels[column]}' {brief(before)}"
        return f"{told} and gives it {brief(after)} now."
    lost = float((effect.without[head, row] * ~effect.seen[row]).sum())
    told += f"In head {head}, query '{labels[row]}' had {brief(lost)} of its weight on keys that are hidden now; "
    return told + f"the rest make up for it: key '{labels[column]}' goes from {brief(before)} to {brief(after)}."
