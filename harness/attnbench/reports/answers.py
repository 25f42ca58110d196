"""The answer of a run for each shape: the baseline's time, the marks of the others, and memory.

The closing screen, the summary, the page and the API show these shapes and the advice derived from them. Of two states
of the code each implementation has shapes of its own, on which the candidate is compared with the base.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from attnbench.analysis.comparisons import is_doubtful
from attnbench.analysis.conclusion import Mark, factor, mark_of
from attnbench.analysis.results import Results
from attnbench.analysis.table import GROUP_AXES, Row, arm_of, rows
from attnbench.reports import cells, grouped
from attnbench.storage.records import Verdict
from attnbench.units import MISSING, plain, show
from attnbench.workloads.workload import Workload

FEW_VALUES = 3
"""Most values of an axis that a condition lists."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One implementation on one shape; times and ratios are None if they were not measured."""

    name: str
    mark: Mark | None  # None: unsupported, or predicted to be out of reach
    status: str
    seconds: float | None  # of a call: the baseline's time times the ratio
    ratio: float | None
    low: float | None = None  # of the ratio
    high: float | None = None
    peak_bytes: float | None
    reason: str = ""  # why it is undecided
    may_be_faster: bool = False  # undecided, but possibly faster by more than the margin

    @property
    def speedup(self) -> float:
        """Factor by which it is faster than the baseline; below 1 it is slower."""
        return 1 / self.ratio if self.ratio else 1.0

    @property
    def words(self) -> str:
        """The mark, with the factor by which it is faster or slower."""
        if self.mark in {Mark.faster, Mark.slower} and self.ratio:
            return factor(self.ratio)
        if self.mark in {Mark.right, Mark.imprecise} and self.seconds is not None:
            return show(self.seconds, "s")
        return self.status.replace("_", " ") if self.mark in {None, Mark.failed} else str(self.mark)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One workload of a run, with the cells of all implementations except the baseline, the fastest first."""

    workload: Workload
    label: str  # the axes that distinguish it from other shapes of the run, in few words
    base: Cell | None  # None: there is no baseline
    others: tuple[Cell, ...]
    has_sides: bool = False

    @property
    def cells(self) -> list[Cell]:
        """All cells, the baseline's first."""
        return [*([self.base] if self.base else []), *self.others]

    def having(self, mark: Mark) -> list[Cell]:
        """The cells with this mark, the fastest first."""
        return [each for each in self.others if each.mark is mark]

    @cached_property
    def faster(self) -> list[Cell]:
        """Cells that are faster than the baseline."""
        return self.having(Mark.faster)

    @property
    def best(self) -> Cell | None:
        """The fastest by verdict; the baseline if nothing is faster."""
        return self.faster[0] if self.faster else self.base

    @property
    def is_open(self) -> bool:
        """Whether an undecided cell may be faster than the baseline."""
        return any(each.may_be_faster for each in self.others)

    @property
    def is_notable(self) -> bool:
        """Whether something is faster than the baseline, or the candidate slower than its base."""
        return bool(self.faster or (self.has_sides and self.having(Mark.slower)))

    @property
    def length(self) -> str:
        """The length in a label: "T=512", or "T=1 x 512"."""
        return f"T={cells.length(self.workload.axes())}"

    @property
    def name(self) -> str:
        """Label and length."""
        return f"{self.label} {self.length}".strip()


@lru_cache(maxsize=1)
def shapes(results: Results) -> list[Shape]:
    """All shapes of a run, grouped by label, then by length."""
    has_sides = results.plan.sides is not None
    records = {record.key: record for record in results.records}
    by_shape = grouped(
        rows(cells.shown(results)), lambda row: (str(row["workload"]), str(row["implementation"]) * has_sides)
    )
    workloads = {each.id: each for each in results.plan.workloads}
    labels = cells.labels([workloads[name] for name in dict.fromkeys(name for name, _ in by_shape)])
    made = []
    for (name, implementation), members in by_shape.items():
        of_baseline: list[Cell] = []
        others: list[Cell] = []
        for row in members:
            record = records[name, arm_of(row)]
            speed = None if row["verdict"] is None else Verdict(row["verdict"])
            cell = _cell(row, mark_of(record, speed, is_doubtful=is_doubtful(results, record.key)))
            (of_baseline if row["is_baseline"] else others).append(cell)
        made.append(
            Shape(
                workload=workloads[name],
                label=plain(f"{implementation} {labels[name]}"),
                base=next(iter(of_baseline), None),
                others=tuple(sorted(others, key=lambda each: each.ratio or each.seconds or math.inf)),
                has_sides=has_sides,
            )
        )
    order = {label: place for place, label in enumerate(dict.fromkeys(each.label for each in made))}
    return sorted(made, key=lambda each: (order[each.label], each.workload.kv_len, each.workload.seq_len))


def _cell(row: Row, mark: Mark | None) -> Cell:
    return Cell(
        name=row["side"] or cells.arm(row),
        mark=mark,
        status=str(row["status"]),
        seconds=row["latency_s"] if row["is_baseline"] else row["paired_latency_s"] or row["latency_s"],
        ratio=row["ratio"],
        low=row["ratio_low"],
        high=row["ratio_high"],
        peak_bytes=row.get("peak_memory_bytes"),
        reason=row["reason"] or "",
        may_be_faster=mark is Mark.doubtful or (mark is Mark.undecided and _reaches_below(row)),
    )


def _reaches_below(row: Row) -> bool:
    """Whether the interval of a ratio includes values that are faster by more than the margin."""
    return row["ratio_low"] is None or row["ratio_low"] < 1 / (1 + row["margin"])


def shared(found: Sequence[Shape]) -> str:
    """Describe the axes that all or most of the shapes share."""
    workloads = [each.workload for each in found]
    usual = cells.usual_values(workloads)
    varying = {axis for axis in usual if len({each.axes()[axis] for each in workloads}) > 1}
    most = {**workloads[0].axes(), **usual}
    said = cells.title(most, leave_out=varying & {*cells.LABELLED})
    return f"{said[:1].upper()}{said[1:]}{', unless a row says otherwise' if varying - {*cells.LABELLED} else ''}:"


def advice(results: Results) -> list[str]:
    """Recommend an implementation in one or two sentences, derived from the marks of the shapes."""
    return [plain(line) for line in advise(shapes(results), cells.base(results.plan))]


def advise(found: Sequence[Shape], base: str) -> list[str]:
    """The advice derived from shapes."""
    timed = [each for each in found if any(cell.ratio is not None for cell in each.others)]
    if not timed:
        return []
    if all(not each.others or any(cell.mark is Mark.doubtful for cell in each.others) for each in timed):
        return ["No recommendation: the times are doubtful. Run it again on a quiet machine."]
    beaten = [each for each in timed if each.faster]
    rest = [each for each in timed if not each.faster]
    settled = [each for each in rest if not each.is_open]
    names = {cell.name for each in timed for cell in each.others if cell.ratio is not None}
    if not beaten and len(names) == 1:
        at = f" at {timed[0].length}" if len(timed) == 1 else ""
        return [_of_two([cell for each in timed for cell in each.others if cell.ratio is not None], base, at)]
    if not beaten:
        return [_unbeaten(timed, settled, base)]
    return [*_beaten(beaten, rest, base), *_open(rest, settled)]


def _of_two(found: Sequence[Cell], base: str, at: str) -> str:
    """Compare one implementation with the baseline, which it never beats."""
    name, parts = found[0].name, []
    for mark in (Mark.slower, Mark.equal, Mark.undecided):
        own = [each for each in found if each.mark is mark]
        places = f" on {len(own)} of {len(found)} shapes" if len(own) < len(found) else at
        reason = {each.reason for each in own if each.reason}
        if own:
            parts.append(f"{_extent(own, mark)}{places}{f' ({reason.pop()})' if len(reason) == 1 else ''}")
    head = f"Keep {base}: " if all(each.mark is Mark.slower for each in found) else ""
    return f"{head}{name} is {', '.join(parts)}."


def _extent(own: Sequence[Cell], mark: Mark) -> str:
    factors = sorted(1 / each.speedup for each in own)
    low, high = f"{factors[0]:.2f}x", f"{factors[-1]:.2f}x"
    size = low if low == high else f"{low} to {high}"
    if mark is Mark.undecided and len(own) == 1:
        return f"undecided, {factor(own[0].ratio or 1.0)} so far"
    return f"{size} slower" if mark is Mark.slower else str(mark)


def _unbeaten(timed: Sequence[Shape], settled: Sequence[Shape], base: str) -> str:
    of = f"on {'this shape' if len(timed) == 1 else f'any of {len(timed)} shapes'}"
    if len(settled) == len(timed):
        return f"Keep {base}: nothing is faster {of}."
    text = f"Nothing is shown to be faster than {base}"
    if not settled:
        return f"{text} so far: every shape is undecided."
    return f"{text}; {len(timed) - len(settled)} of {len(timed)} shapes are undecided."


def _beaten(beaten: Sequence[Shape], rest: Sequence[Shape], base: str) -> list[str]:
    """Name the implementation that beats the baseline most often, the places and the factor."""
    names = Counter(cell.name for shape in beaten for cell in shape.faster)
    most = max(names.values())
    winners = {name for name, number in names.items() if number == most}
    choice = max(winners, key=lambda name: math.fsum(math.log(each.speedup) for each in _cells(beaten, name)))
    won = [each for each in beaten if any(cell.name == choice for cell in each.faster)]
    others = [each for each in [*beaten, *rest] if each not in won]
    more = len(names) - 1
    alike = f"; {more} other{'s' * (more > 1)} beat{'s' * (more == 1)} {base}, too" if more else ""
    where, part = _place(won, others)
    num_others = len(won) - len(part)
    too = f" and on {num_others} other shape{'s' * (num_others != 1)}" if num_others else ""
    lines = [f"Take {choice} {where} ({_gain(part, choice)} faster than {base}){too}{alike}."]
    if elsewhere := [each for each in others if each.faster]:
        lines.append(f"Others are faster than {base} on {_named(elsewhere)}.")
    kept = [each for each in rest if not each.is_open]
    if kept:
        is_all = len(kept) == len(rest) and not elsewhere
        lines.append(f"Keep {base} {'elsewhere' if is_all else f'on {len(kept)} of the others'}.")
    return lines


def _place(won: Sequence[Shape], others: Sequence[Shape]) -> tuple[str, Sequence[Shape]]:
    """Describe these shapes by a condition; if none fits all of them, those that one fits."""
    if not others:
        return f"on all {len(won)} shapes" if len(won) > 1 else "on this shape", won
    if where := condition(won, others):
        return where, won
    for axis in AXES:
        values = {value_of(each, axis) for each in won} - {value_of(each, axis) for each in others}
        part = [each for each in won if value_of(each, axis) in values]
        if part and len(values) <= FEW_VALUES:
            return condition(part, [each for each in [*won, *others] if each not in part]), part
    return f"on {_named(won)}", won


def _gain(own: Sequence[Shape], name: str) -> str:
    """The range of factors by which an implementation is faster on these shapes."""
    gains = sorted(cell.speedup for cell in _cells(own, name))
    low, high = f"{gains[0]:.2f}x", f"{gains[-1]:.2f}x"
    return low if low == high else f"{low} to {high}"


def _cells(found: Iterable[Shape], name: str) -> list[Cell]:
    return [cell for shape in found for cell in shape.faster if cell.name == name]


def _named(found: Sequence[Shape]) -> str:
    return ", ".join(each.name for each in found) if len(found) <= FEW_VALUES else f"{len(found)} shapes"


def _open(rest: Sequence[Shape], settled: Sequence[Shape]) -> list[str]:
    number = len(rest) - len(settled)
    return [f"{number} shape{'s are' if number > 1 else ' is'} undecided."] if number else []


AXES = ("dtype", "direction", "mask", "scope", *(axis for axis in GROUP_AXES if axis not in {"dtype", "mask"}))
"""Axes in the order in which a condition is searched."""


def value_of(shape: Shape, axis: str) -> object:
    """The value of an axis."""
    return shape.workload.axes()[axis]


def condition(inside: Sequence[Shape], outside: Sequence[Shape]) -> str:
    """The condition on one axis that holds for `inside` but nowhere in `outside`: "in bfloat16"; "" without any."""
    for axis in AXES:
        mine = {value_of(each, axis) for each in inside}
        if len(mine) <= FEW_VALUES and not mine & {value_of(each, axis) for each in outside}:
            words = [cells.word(axis, each.workload.axes()) for each in inside]
            return f"for {' and '.join(dict.fromkeys(words))}"
    mine_kv, other_kv = ([each.workload.kv_len for each in part] for part in (inside, outside))
    if min(mine_kv) > max(other_kv):
        return f"from T={min(mine_kv)} on"
    if max(mine_kv) < min(other_kv):
        return f"up to T={max(mine_kv)}"
    return ""


def memory_line(found: Sequence[Shape], most: int = 100) -> str:
    """List the memory of each implementation on the largest shape, at most `most` amounts; "" if none was measured."""
    measured = [each for each in found if len(_peaks(each)) > 1] or [each for each in found if _peaks(each)]
    if not measured:
        return ""
    shape = max(measured, key=_num_scores)
    peaks = sorted(_peaks(shape).items(), key=lambda item: item[1])
    amounts = grouped(peaks, lambda item: show(item[1], "bytes", digits=2))
    parts = [f"{', '.join(name for name, _ in own)} {amount}" for amount, own in amounts.items()]
    if len(parts) > most:
        parts = [*parts[: most // 2], "...", *parts[len(parts) - (most - most // 2) :]]
    return plain(f"Memory at {shape.name}: {'; '.join(parts)}.")


def _num_scores(shape: Shape) -> tuple[int, int]:
    workload = shape.workload
    return workload.batch_size * workload.seq_len * workload.kv_len, len(_peaks(shape))


def _peaks(shape: Shape) -> Mapping[str, float]:
    return {each.name: each.peak_bytes for each in shape.cells if each.peak_bytes is not None}


def table(found: Sequence[Shape], base: str) -> list[dict[str, str]]:
    """The answer as a table for pages: a row for each shape, with equal columns."""
    made = []
    for shape in found:
        best = shape.best
        is_known = bool(shape.faster) or not shape.is_open
        kinds = {mark: [each.name for each in shape.having(mark)] for mark in Mark}
        row = {
            "shape": shape.name,
            f"time of {base}": MISSING if shape.base is None else show(shape.base.seconds, "s"),
            "fastest": MISSING if best is None else best.name if is_known else "undecided",
            "speedup": f"{shape.faster[0].speedup:.2f}x" if shape.faster else MISSING,
            "equal": ", ".join(kinds[Mark.equal]) or MISSING,
        }
        for heading, members in OPTIONAL.items():
            number = sum(len(kinds[mark]) for mark in members)
            row[heading] = str(number) if number else MISSING
        measured = best if is_known else shape.base
        row["memory"] = MISSING if measured is None else show(measured.peak_bytes, "bytes")
        made.append(row)
    unused = [heading for heading in OPTIONAL if all(row[heading] == MISSING for row in made)]
    return [{heading: text for heading, text in row.items() if heading not in unused} for row in made]


OPTIONAL = {"slower": (Mark.slower,), "undecided": (Mark.undecided, Mark.doubtful), "wrong": (Mark.wrong, Mark.failed)}
"""Columns that count marks, omitted if no shape has any."""
