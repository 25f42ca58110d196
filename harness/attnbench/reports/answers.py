"""The results of a run on each shape (an `Answer`: times and memory of all implementations), and advice from verdicts.

The closing screen, the summary, the page and the API show them. If two states of the code are compared, every
implementation has an `Answer` of its own for each shape, with the base as baseline.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from attnbench import plugins
from attnbench.analysis.conclusion import Mark, factor
from attnbench.analysis.results import Results
from attnbench.analysis.table import GROUP_AXES
from attnbench.reports import cells, titles
from attnbench.reports.cells import Cell
from attnbench.storage.records import FIRST_CACHED, FIRST_CALL, FIRST_OTHERS, Status
from attnbench.units import MISSING, factors, grouped, percent, sanitize_line, show
from attnbench.workloads import counts
from attnbench.workloads.workload import Workload

FEW = 3  # a sentence lists at most this number of axis values, of shapes, or of the user's own implementations


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """The results on one shape: the cell of the baseline, and the cells of all other implementations, fastest first."""

    workload: Workload
    label: str  # short text of the axes in which the shape differs from others of the run
    base: Cell | None  # of the baseline or, if it has no time, of the implementation that replaces it; None: neither
    others: tuple[Cell, ...]
    has_sides: bool = False  # whether two states of the code are compared

    @property
    def cells(self) -> list[Cell]:
        """All cells, the baseline's first."""
        return [*([self.base] if self.base else []), *self.others]

    @property
    def is_timed(self) -> bool:
        """Whether some cell has a time."""
        return any(cell.seconds is not None for cell in self.cells)

    def having(self, mark: Mark) -> list[Cell]:
        """Return the cells of `others` with this mark, fastest first."""
        return [cell for cell in self.others if cell.mark is mark]

    @cached_property
    def faster(self) -> list[Cell]:
        """Cells that are faster than the baseline, except those whose time excludes gathering keys from their pages."""
        return [cell for cell in self.having(Mark.faster) if not cell.is_gathered]

    @property
    def best(self) -> Cell | None:
        """The first cell of `faster` or, if that is empty, the baseline's cell.

        None if a time is doubtful, or if nothing is faster and the baseline has no time.
        """
        if self.having(Mark.doubtful):
            return None
        base = self.base if self.base is not None and self.base.seconds is not None else None
        return self.faster[0] if self.faster else base

    def text_of(self, name: str) -> str:
        """Format the time of an implementation with a sign of `SIGNS`.

        Without a time, return the reason: WRONG, failed, not run, not timed, or "-" if the shape is unsupported.
        """
        cell = next((cell for cell in self.cells if cell.name == name), None)
        if cell is None:
            return "not run"
        if cell.record.status is Status.unsupported:
            return MISSING
        if cell.mark in {Mark.wrong, Mark.failed}:
            return str(cell.mark)
        if cell.seconds is None:
            return "not run" if cell.record.is_predicted else "not timed"
        return f"{show(cell.seconds, 's')} {self._sign(cell)}"

    def _sign(self, cell: Cell) -> str:
        if cell is self.best and not (cell is self.base and (self.is_open or not self.compared)):
            return "*"
        if cell.is_gathered:
            return GATHERED
        return next((sign for sign, mark in SIGNS.items() if mark is cell.mark and cell is not self.base), "")

    @property
    def is_open(self) -> bool:
        """Whether an undecided or doubtful cell may be faster than the baseline."""
        return any(cell.may_be_faster for cell in self.others)

    @property
    def is_notable(self) -> bool:
        """Whether a cell is wrong, failed or faster than the baseline, or the candidate is slower than the base."""
        marks = {Mark.faster, Mark.wrong, Mark.failed, *([Mark.slower] if self.has_sides else [])}
        return any(cell.mark in marks for cell in self.others)

    @property
    def compared(self) -> list[Cell]:
        """The cells with a ratio to the baseline."""
        return [cell for cell in self.others if cell.ratio is not None]

    @property
    def length(self) -> str:
        """The lengths in a label: "T=512" or, if the key length differs, "T=1 x 512" (query x key)."""
        return f"T={titles.length(self.workload.axes())}"

    @property
    def name(self) -> str:
        """The name of the shape in a table: its label, then its length."""
        return f"{self.label} {'at ' * self.has_sides}{self.length}".strip()


@lru_cache(maxsize=1)
def shapes(results: Results) -> list[Answer]:
    """Return the answers of a run, grouped by label, and sorted by length within each label."""
    has_sides, shown = results.plan.sides is not None, cells.present_cells(results)
    labels = titles.labels(list({cell.workload.id: cell.workload for cell in shown}.values()))
    by_shape = grouped(shown, lambda cell: (cell.workload.id, cell.record.implementation * has_sides))
    unsorted = []
    for (name, implementation), members in by_shape.items():
        others = [cell for cell in members if not cell.is_baseline]
        unsorted.append(
            Answer(
                workload=members[0].workload,
                label=sanitize_line(f"{implementation} {labels[name]}"),
                base=next((cell for cell in members if cell.is_baseline), None),
                others=tuple(sorted(others, key=lambda cell: cell.ratio or cell.seconds or math.inf)),
                has_sides=has_sides,
            )
        )
    in_order = dict.fromkeys(shape.label for shape in unsorted)
    order = {label: place for place, label in enumerate(in_order)}
    return sorted(unsorted, key=lambda shape: (order[shape.label], shape.workload.kv_len, shape.workload.seq_len))


def advice(results: Results) -> list[str]:
    """Recommend an implementation in a few sentences, derived from the verdicts.

    Sentences about shapes on which the baseline has no time follow those about other shapes. Sentences about the user's
    own implementations come last.
    """
    base = titles.base(results.plan)
    timed = [shape for shape in shapes(results) if shape.is_timed]
    groups = grouped(timed, lambda shape: (shape.base.name if shape.base else "", _problem(shape, base)))
    lines = _advice(groups.pop((base, ""), []), base)
    for (substitute, problem), members in groups.items():
        is_compared = any(shape.compared for shape in members)
        there = f"the others are compared with {substitute}" if is_compared else f"only {substitute} has a time"
        lines += [f"{base} {problem} on {_named(members)}: {there}.", *_advice(members, substitute)]
    compared = grouped((cell for shape in timed for cell in shape.compared), lambda cell: cell.name)
    if len(compared) > 1:
        own = [
            sanitize_line(arm.implementation) for arm, spec in results.plan.specs.items() if plugins.is_foreign(spec)
        ]
        lead = "" if groups else f"Next to {base}, "
        lines += [f"{lead}{_standing(compared[name])}." for name in own[:FEW] if name in compared]
    return [sanitize_line(line) for line in lines]


def _problem(shape: Answer, base: str) -> str:
    """Return the reason why the baseline has no time on a shape; "" if it has one."""
    if shape.base is not None and shape.base.name == base:
        return ""
    mark = next((cell.mark for cell in shape.others if cell.name == base), None)
    return {Mark.wrong: "is WRONG", Mark.failed: "failed"}.get(mark or Mark.right, "has no time")


def _advice(members: Sequence[Answer], base: str) -> list[str]:
    """Give advice, in sentences, on shapes that have the same baseline."""
    timed = [shape for shape in members if shape.compared]
    if not timed:
        return []
    if all(shape.having(Mark.doubtful) for shape in timed):
        return ["No recommendation: the times are doubtful. Run it again on a quiet machine."]
    beaten = [shape for shape in timed if shape.faster]
    rest = [shape for shape in timed if not shape.faster]
    num_open = sum(shape.is_open for shape in rest)
    if beaten:
        undecided = f"On {num_open} shape{'s' * (num_open > 1)} an undecided implementation may be faster."
        return [*_beaten(beaten, rest, base), *[undecided] * bool(num_open)]
    compared = [cell for shape in timed for cell in shape.compared]
    if len({cell.name for cell in compared}) == 1:
        keep = f"Keep {base}: " if {cell.mark for cell in compared} == {Mark.slower} else ""
        same = f" to {base}" * ({cell.mark for cell in compared} == {Mark.equal})
        return [f"{keep}{_standing(compared)}{same}{f' at {timed[0].length}' * (len(compared) == 1)}."]
    if num_open:
        end = f"; on {num_open} of {len(timed)} shapes others may be faster." if num_open < len(timed) else " so far."
        return [f"Nothing is shown to be faster than {base}{end}"]
    return [f"Keep {base}: nothing is faster on {'this shape' if len(timed) == 1 else f'any of {len(timed)} shapes'}."]


def _standing(compared: Sequence[Cell]) -> str:
    """Describe the verdicts on one implementation: "fused is 1.10x to 1.52x slower on 2 of 3 shapes, equal on 1"."""
    parts = []
    for mark, members in grouped(sorted(compared, key=lambda cell: str(cell.mark)), lambda cell: cell.mark).items():
        text = str(mark)
        if mark in {Mark.faster, Mark.slower}:
            text = f"{factors([cell.factor for cell in members])} {mark}"
        if mark is Mark.undecided and len(members) == 1 and (found := members[0].comparison):
            text += f", {factor(found.ratio)} so far ({found.reason})"
        parts.append(text + f" on {len(members)} of {len(compared)} shapes" * (len(members) < len(compared)))
    return f"{compared[0].name} is {', '.join(parts)}"


def _beaten(beaten: Sequence[Answer], rest: Sequence[Answer], base: str) -> list[str]:
    """Recommend the implementation that beats the baseline on the most shapes; name these shapes and the factor."""
    wins = grouped(((cell, shape) for shape in beaten for cell in shape.faster), lambda win: win[0].name)
    choice = max(wins, key=lambda name: (len(wins[name]), math.fsum(math.log(cell.speedup) for cell, _ in wins[name])))
    won = [shape for _, shape in wins[choice]]
    others = [shape for shape in [*beaten, *rest] if shape not in won]
    where, part = _place(won, others)
    gain = factors([cell.speedup for cell, shape in wins[choice] if shape in part])
    text = f"Take {choice} {where} ({gain} faster than {base})"
    if more := len(won) - len(part):
        text += f" and on {more} other shape{'s' * (more > 1)}"
    as_fast = set.intersection(*(_not_slower(cell, shape) for cell, shape in wins[choice]))
    if alike := [name for name in wins if name in as_fast][:FEW]:
        text += f", or {', '.join(alike)}: not slower by these times"
    if num_others := len(wins) - 1 - len(alike):
        text += f"; {num_others} other{'s' * (num_others > 1)} beat{'s' * (num_others == 1)} {base}, too"
    lines = [f"{text}."]
    if elsewhere := [shape for shape in others if shape.faster]:
        lines.append(f"Others are faster than {base} on {_named(elsewhere)}.")
    if kept := [shape for shape in rest if not shape.is_open]:
        is_all = len(kept) == len(rest) and not elsewhere
        lines.append(f"Keep {base} {'elsewhere' if is_all else f'on {len(kept)} of the others'}.")
    return lines


def _not_slower(choice: Cell, shape: Answer) -> set[str]:
    """Name the other faster implementations on one shape, except those whose interval lies above the choice's."""
    most = choice.ratio_ends[1] or 0.0
    return {cell.name for cell in shape.faster if cell is not choice and (cell.ratio_ends[0] or math.inf) <= most}


def _named(members: Sequence[Answer]) -> str:
    return ", ".join(shape.name for shape in members) if len(members) <= FEW else f"{len(members)} shapes"


AXES = ("dtype", "direction", "mask", "scope", *(axis for axis in GROUP_AXES if axis not in {"dtype", "mask"}))
"""Axes in the order in which `_place` tries them as a condition."""


def _place(won: Sequence[Answer], others: Sequence[Answer]) -> tuple[str, Sequence[Answer]]:
    """Find the condition, such as "for bfloat16", that as many of `won` as possible and none of `others` meet.

    Return it with the shapes of `won` that meet it. If there is no such condition, name the shapes of `won`.
    """
    if not others:
        return "on this shape" if len(won) == 1 else f"on all {len(won)} shapes", won
    best = "", list[Answer]()
    for axis in AXES:
        elsewhere = {shape.workload.axes()[axis] for shape in others}
        part = [shape for shape in won if shape.workload.axes()[axis] not in elsewhere]
        words = dict.fromkeys(titles.word(axis, shape.workload.axes()) for shape in part)
        if len(part) > len(best[1]) and len(words) <= FEW:
            best = f"for {' and '.join(words)}", part
    inside = [shape.workload.kv_len for shape in won]
    outside = [shape.workload.kv_len for shape in others]
    if len(best[1]) < len(won) and min(inside) > max(outside):
        return f"from T={min(inside)} on", won
    if len(best[1]) < len(won) and max(inside) < min(outside):
        return f"up to T={max(inside)}", won
    return best if best[1] else (f"on {_named(won)}", won)


def memory(members: Sequence[Answer]) -> tuple[Answer, dict[str, float]] | None:
    """Return the largest shape, and the peak memory of each implementation on it in bytes, by name.

    A shape on which at least two implementations were measured is preferred, since their memory can be compared. None
    if no memory was measured.
    """
    peaks: dict[Answer, dict[str, float]] = {}
    for shape in members:
        peaks[shape] = {cell.name: cell.peak_bytes for cell in shape.cells if cell.peak_bytes}
    if not any(peaks.values()):
        return None
    largest = max(members, key=lambda shape: (min(len(peaks[shape]), 2), shape.workload.num_scores, len(peaks[shape])))
    return largest, peaks[largest]


def memory_line(members: Sequence[Answer]) -> str:
    """Format the peak memory of each implementation on the shape of `memory`; "" if none was measured."""
    if (found := memory(members)) is None:
        return ""
    largest, peaks = found
    ordered = sorted(peaks.items(), key=lambda item: item[1])
    amounts = {name: show(peak, "bytes", digits=2) for name, peak in ordered}
    parts = [f"{', '.join(alike)} {amount}" for amount, alike in grouped(amounts, amounts.__getitem__).items()]
    return sanitize_line(f"Memory {'of' if largest.has_sides else 'at'} {largest.name}: {'; '.join(parts)}.")


def _cache_rates(shape: Answer) -> list[float | None]:
    return [cell.cache_rate for cell in shape.cells]


def batch_line(results: Results) -> str:
    """Format the rates of each implementation on the largest timed batch of requests; "" if no batch was timed.

    Rates are in bytes of keys and values per second, and in new tokens per second. Implementations that read no pages
    are named.
    """
    timed = [shape for shape in shapes(results) if any(_cache_rates(shape))]
    if not timed:
        return ""
    shape = max(timed, key=lambda each: counts.cache_bytes(each.workload))
    parts = []
    for cell in sorted((each for each in shape.cells if each.cache_rate), key=lambda each: each.seconds or math.inf):
        share = (
            f" ({percent(cell.cache_rate / cell.copy_rate)} of a copy)" if cell.cache_rate and cell.copy_rate else ""
        )
        parts.append(f"{cell.name} {show(cell.cache_rate, 'bytes/s')}{share}, {cell.token_rate:,.0f} tokens/s")
    text = f"Keys and values of {shape.workload.batch}: {'; '.join(parts)}."
    return sanitize_line(f"{text} {cells.gathered_line(cell.name for cell in shape.cells if cell.is_gathered)}")


def first_calls_line(members: Sequence[Answer]) -> str:
    """Format the first-call times and break-even points at the shape with the most of them; "" if none was measured."""
    timed: dict[Answer, list[Cell]] = {}
    for each in members:
        timed[each] = [cell for cell in each.cells if FIRST_CALL in cell.metrics]
    shape = max(timed, key=lambda each: (len(timed[each]), each.workload.num_scores), default=None)
    if shape is None or not timed[shape]:
        return ""
    parts = []
    for cell in sorted(timed[shape], key=lambda cell: cell.metrics[FIRST_CALL]):
        more = {FIRST_CACHED: "cached", **FIRST_OTHERS}
        read = [(name, cell.metrics[metric]) for metric, name in more.items() if metric in cell.metrics]
        words = [f"{name} {show(seconds, 's', digits=2)}" for name, seconds in read]
        words += [f"paid after: {cell.break_even.words}"] if cell.break_even is not None else []
        parts.append(f"{cell.name} {show(cell.metrics[FIRST_CALL], 's', digits=2)} ({', '.join(words)})")
    return sanitize_line(f"First calls at {shape.name}: {'; '.join(parts)}.")


GATHERED = "^"  # the sign of a time that leaves out the gathering of keys from their pages
SIGNS = {
    "*": "fastest",
    "+": Mark.faster,
    "=": Mark.equal,
    "?": Mark.undecided,
    "~": Mark.doubtful,
    GATHERED: "without gathering its keys",
}
"""Meanings of the signs after a time. A compared time without a sign belongs to a cell slower than the baseline."""


def legend(members: Sequence[Answer]) -> str:
    """Explain the signs that the times on these shapes have: "* fastest, = equal to sdpa, - unsupported"."""
    every, bases = names(members), {shape.base.name for shape in members if shape.base}
    base = "the baseline" if len(bases) != 1 else bases.pop()
    present = {shape.text_of(name)[-1] for shape in members for name in every}
    words = SIGNS | {"+": f"faster than {base}", "=": f"equal to {base}", MISSING: "unsupported"}
    return ", ".join(f"{sign} {word}" for sign, word in words.items() if sign in present)


def names(members: Sequence[Answer]) -> list[str]:
    """Return the names of the implementations that support any of these shapes.

    Baselines come first, then implementations that are the fastest on a shape, then the others. Each of these groups is
    sorted by the median ratio; implementations that were compared on less than half of the shapes end their group.
    """
    supported = (cell for shape in members for cell in shape.cells if cell.record.status is not Status.unsupported)
    ratios = grouped(supported, lambda cell: cell.name)
    bases = {shape.base.name for shape in members if shape.base}
    fastest = {shape.best.name for shape in members if shape.best}

    def place(name: str) -> tuple[bool, bool, bool, float]:
        known = [cell.ratio for cell in ratios[name] if cell.ratio]
        is_rare = 2 * len(known) < len(members)
        return name not in bases, name not in fastest, is_rare, statistics.median(known) if known else math.inf

    return sorted(ratios, key=place)


def table(members: Sequence[Answer]) -> list[dict[str, str]]:
    """Return rows of a table, one for each shape: the fastest implementation, or why there is none, and all times."""
    every, rows = names(members), list[dict[str, str]]()
    for shape in members:
        fastest = next((cell for cell in shape.cells if shape.text_of(cell.name).endswith("*")), None)
        reason = next((str(mark) for mark in (Mark.doubtful, Mark.undecided) if shape.having(mark)), MISSING)
        text = reason if fastest is None else sanitize_line(fastest.name, 24)
        if fastest is not None and fastest is not shape.base:
            text += f" ({fastest.speedup:.2f}x)"
        times = {sanitize_line(name, 24): shape.text_of(name).strip() for name in every}
        rows.append({"shape": shape.name, "fastest": text, **times})
    return rows
