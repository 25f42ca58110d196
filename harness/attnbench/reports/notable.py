"""Notable findings: what a run shows and one might not expect, in words with the run's own numbers.

Each is derived from what was measured and from which operators ran, whatever the implementations are called.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import geometric_mean
from typing import TYPE_CHECKING

from attnbench import plugins
from attnbench.analysis.breakdown import NEAR
from attnbench.analysis.results import Results
from attnbench.analysis.table import AXES, LENGTHS, Row, panels, rows
from attnbench.devices import NOT_NATIVE
from attnbench.reports import words
from attnbench.reports.cells import shown
from attnbench.storage.records import Arm, Key, Operators, Verdict
from attnbench.units import percent, plain, show, significant

if TYPE_CHECKING:
    import pandas as pd

LOW, HIGH = 0.1, 0.25
"""A cliff: page faults are a smaller share of a call than the one, and a larger than the other at the next length."""
FEW = 3
"""So many are listed one by one."""
CLEAR = 1.05
"""A ratio nearer to 1 is not notable."""
PRODUCTS = {"attention", "matmul", "softmax"}
"""Kinds of operators that make attention what it is; the others move, mask or allocate."""

Ratios = list[tuple[Row, float]]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The cells of a run that were timed, and the operators that ran in them."""

    cells: "pd.DataFrame"
    rows: dict[tuple[str, str], Row]  # by workload id and implementation, in the order of the tables
    operators: dict[Key, Operators]

    def names(self) -> list[str]:
        """The implementations."""
        return list(dict.fromkeys(name for _, name in self.rows))

    def of(self, name: str) -> list[Row]:
        """The cells of one implementation."""
        return [row for row in self.rows.values() if row["implementation"] == name]

    def ran(self, row: Row) -> Operators | None:
        """What ran in a cell."""
        return self.operators.get((row["workload"], Arm(implementation=row["implementation"])))

    def names_ran(self, row: Row, *, kinds: Iterable[str] = PRODUCTS) -> frozenset[str]:
        """The operators of some kinds that ran in a cell."""
        seen = self.ran(row)
        return frozenset() if seen is None else frozenset(one.name for one in seen.calls if one.kind in kinds)

    def num_calls(self, row: Row, name: str) -> int:
        """How often an operator ran in a cell."""
        seen = self.ran(row)
        return 0 if seen is None else sum(one.num_calls for one in seen.calls if one.name == name)

    def ratios(self, name: str, other: str, workloads: Iterable[str]) -> Ratios:
        """By cell of `name`, its time divided by that of `other` on each workload, from the same blocks if it can."""
        found = []
        for workload in workloads:
            mine, its = self.rows.get((workload, name)), self.rows.get((workload, other))
            if mine is not None and its is not None:
                is_paired = mine["ratio"] is not None and its["ratio"] is not None
                column = "ratio" if is_paired else "latency_s"
                found.append((mine, mine[column] / its[column]))
        return found


def findings(results: Results) -> dict[str, str]:
    """By its name, each notable finding of this run in one or two sentences; none of two states of the code."""
    if results.plan.sides is not None:
        return {}
    cells = shown(results)
    cells = cells[cells["latency_s"].notna()]
    timed = Timed(
        cells=cells,
        rows={(row["workload"], row["implementation"]): row for row in rows(cells)},
        operators={each.key: each.operators for each in results.records if each.operators is not None},
    )
    found = {name: look(timed) for name, look in LOOKS.items()}
    return {name: plain(text) for name, text in found.items() if text}


def _page_faults(timed: Timed) -> str:
    """Where fresh pages become a large part of a call, from one length to the next."""
    cliffs = list(_cliffs(timed))
    if not cliffs:
        return ""
    before, after = max(cliffs, key=lambda pair: float(pair[1]["fault_share"]))
    names = ", ".join(dict.fromkeys(found["implementation"] for _, found in cliffs))
    return (
        f"{after['implementation']} spends {percent(before['fault_share'])} of a call on fresh pages at length "
        f"{words.length(before)} and {percent(after['fault_share'])} at {words.length(after)} "
        f"({after['title']}), where its largest block is {show(after['largest_block_bytes'], 'bytes')}: so large a "
        "block goes back to the system when it is freed, and the next call takes each of its pages again. An estimate, "
        "from the number of faults; --allocator retain shows the same code without them. "
        f"The same happens to: {names}."
    )


def _cliffs(timed: Timed) -> Iterator[tuple[Row, Row]]:
    """Neighbours in length, the first nearly without page faults, the second full of them."""
    for panel in panels(timed.cells):
        for line in panel.lines.values():
            for before, after in pairwise(rows(line.sort_values(list(LENGTHS)))):
                if (before["fault_share"] or 0.0) < LOW and (after["fault_share"] or 0.0) > HIGH:
                    yield before, after


def _half_precision(timed: Timed) -> str:
    """Half precision that takes longer than float32 does."""
    full = {_but_dtype(row): row for row in timed.rows.values() if row["dtype"] == "float32"}
    found: dict[str, Ratios] = {}
    for row in timed.rows.values():
        other = full.get(_but_dtype(row))
        if row["dtype"] in {"bfloat16", "float16"} and other is not None:
            found.setdefault(row["dtype"], []).append((row, row["latency_s"] / other["latency_s"]))
    texts = [
        f"{dtype} takes {_times(ratios)} the time of float32, most for {_where(ratios)}{_why(ratios)}"
        for dtype, ratios in found.items()
        if _mean(ratios) > CLEAR
    ]
    if not texts:
        return ""
    notes = [note for row in timed.rows.values() for note in (row["warnings"] or "").split("; ")]
    native = dict.fromkeys(note for note in notes if note.endswith(NOT_NATIVE))
    return f"{'; '.join(texts)}.{''.join(f' {note}.' for note in native)}"


def _but_dtype(row: Row) -> tuple[object, ...]:
    return (row["implementation"], *(row[axis] for axis in AXES if axis != "dtype"))


def _compiled(timed: Timed) -> str:
    """Textbook code in whose place the compiler put a fused kernel."""
    texts = []
    for name in timed.names():
        uncompiled, option = plugins.variant(name)
        mine = [(row, seen.observed) for row in timed.of(name) if (seen := timed.ran(row)) is not None]
        written = {seen.observed for row in timed.of(uncompiled) if (seen := timed.ran(row)) is not None}
        became = [(row, backend) for row, backend in mine if backend]
        if not option or not became or written != {""}:
            continue
        backends = ", ".join(dict.fromkeys(backend for _, backend in became))
        ratios = timed.ratios(name, uncompiled, [row["workload"] for row, _ in became])
        texts.append(
            f"in {len(became)} of {len(mine)} workloads what ran of {name} is PyTorch's {backends} kernel, which "
            "nobody wrote there: the compiler knows the textbook form"
            f"{_elsewhere([row for row, _ in mine], [row for row, _ in became])}. "
            f"It takes {_times(ratios)} the time of {uncompiled}"
        )
    return "; ".join(texts) + "." if texts else ""


def _elsewhere(cells: Sequence[Row], became: Sequence[Row]) -> str:
    """The masks under which it does not, where masks make the difference."""
    known = {row["mask"] for row in became}
    others = {row["mask"] for row in cells} - known
    is_clear = others and not any(row["mask"] in known for row in cells if row not in became)
    return f", but not under the mask {' or '.join(sorted(others))}" if is_clear else ""


def _explicit_mask(timed: Timed) -> str:
    """A mask as a tensor, where others run the same kernel without one."""
    texts = []
    pairs: dict[tuple[str, str, str], list[str]] = {}
    for row in timed.rows.values():
        if row["mask"] != "none" and timed.names_ran(row, kinds={"mask"}):
            for other in _without_mask(timed, row):
                pairs.setdefault((row["implementation"], other, row["mask"]), []).append(row["workload"])
    for (name, other, mask), workloads in pairs.items():
        ratios = timed.ratios(name, other, workloads)
        if _mean(ratios) >= CLEAR:
            texts.append(
                f"the {mask} mask as a tensor ({name}) takes {_times(ratios)} the time of the same kernel without one "
                f"({other}), most for {_where(ratios)}"
            )
    return f"{'; '.join(texts)}: a tensor must be read, and its kernel cannot skip what it hides." if texts else ""


def _without_mask(timed: Timed, row: Row) -> list[str]:
    """Who ran the same backend and no operator on a mask, the baseline before others; at most one."""
    seen = timed.ran(row)
    if seen is None or not seen.observed:
        return []
    same = [
        other
        for (workload, _), other in timed.rows.items()
        if workload == row["workload"] and other["ran"] == row["ran"] and not timed.names_ran(other, kinds={"mask"})
    ]
    return [other["implementation"] for other in sorted(same, key=lambda other: not other["is_baseline"])[:1]]


def _layer_for_each_head(timed: Timed) -> str:
    """A linear layer for each head, where others run the same operators with fewer, larger layers."""
    lengths: dict[tuple[str, str], dict[int, list[str]]] = {}
    calls: dict[str, int] = {}
    for row in (row for row in timed.rows.values() if row["scope"] == "module"):
        number = timed.num_calls(row, LINEAR)
        for other in _with_fewer_layers(timed, row) if number > row["num_heads"] else ():
            pair = row["implementation"], other["implementation"]
            lengths.setdefault(pair, {}).setdefault(row["seq_len"], []).append(row["workload"])
            calls |= {pair[0]: number, pair[1]: timed.num_calls(other, LINEAR)}
    texts = []
    for (name, fewer), workloads in lengths.items():
        ratios = {length: timed.ratios(name, fewer, workloads[length]) for length in sorted(workloads)}
        if max(map(_mean, ratios.values())) >= CLEAR:
            at = ", ".join(f"{_times(found)} at length {length}" for length, found in ratios.items())
            layers = f"a linear layer for each head ({name}, {calls[name]} of them) takes longer than {calls[fewer]}"
            texts.append(f"{layers} for all heads ({fewer}), projections included: {at}")
    return "; ".join(texts) + "." if texts else ""


def _with_fewer_layers(timed: Timed, row: Row) -> list[Row]:
    """Who made its products by the same operators with fewer linear layers than heads; at most one."""
    same = [
        other
        for (workload, _), other in timed.rows.items()
        if workload == row["workload"]
        and timed.names_ran(other) == timed.names_ran(row)
        and timed.num_calls(other, LINEAR) < row["num_heads"]
    ]
    return sorted(same, key=lambda other: str(other["implementation"]))[:1]


def _baseline_beaten(timed: Timed) -> str:
    """Who is faster than the baseline, by verdict."""
    baseline = next((row["implementation"] for row in timed.rows.values() if row["is_baseline"]), "")
    faster: dict[str, Ratios] = {}
    for row in timed.rows.values():
        if row["verdict"] == Verdict.faster:
            faster.setdefault(row["implementation"], []).append((row, 1 / row["ratio"]))
    if not faster:
        return ""
    most = sorted(faster.items(), key=lambda item: -len(item[1]))
    others = f", and by {', '.join(name for name, _ in most[FEW:])}" if len(most) > FEW else ""
    texts = [
        f"{name} in {len(found)} of {len(timed.of(name))} workloads (most for {_where(found)})"
        for name, found in most[:FEW]
    ]
    return f"{baseline} is beaten by {'; '.join(texts)}{others}."


def _mean(ratios: Ratios) -> float:
    return geometric_mean([ratio for _, ratio in ratios])


def _times(ratios: Ratios) -> str:
    """Several ratios in words: "1.8 times (1.2 to 3.1 over 6 cells)"."""
    mean = f"{significant(_mean(ratios), 2)} times"
    if len(ratios) == 1:
        return mean
    low, high = (significant(end(ratio for _, ratio in ratios), 2) for end in (min, max))
    return f"{mean} ({low} to {high} over {len(ratios)} cells)"


def _where(ratios: Ratios) -> str:
    """The row with the largest ratio, and that."""
    row, most = max(ratios, key=lambda one: one[1])
    return f"{row['implementation']}, {row['title']}, length {words.length(row)}: {significant(most, 2)} times"


def _why(ratios: Ratios) -> str:
    """What the row with the largest ratio spends more than the fastest of its workload, where that is known."""
    row, _ = max(ratios, key=lambda one: one[1])
    why = row["why_slower"] or ""
    return f" ({why} compared with the fastest there)" if "%" in why and why != NEAR else ""


LINEAR = "aten::linear"
LOOKS: dict[str, Callable[[Timed], str]] = {
    "Page faults": _page_faults,
    "Half precision": _half_precision,
    "Compiled": _compiled,
    "Explicit mask": _explicit_mask,
    "A layer for each head": _layer_for_each_head,
    "Baseline beaten": _baseline_beaten,
}
