"""Notable findings: what a run shows and one might not expect, in words with the run's own numbers.

Each is derived from what was measured and from which operators ran, whatever the implementations are called.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import geometric_mean
from typing import TYPE_CHECKING

from attnbench import plugins
from attnbench.analysis.breakdown import NEAR
from attnbench.analysis.results import Results
from attnbench.analysis.table import AXES, Row, panels, rows
from attnbench.devices import NOT_NATIVE
from attnbench.reports import cells, grouped
from attnbench.storage.records import Verdict
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
LINEAR = "aten::linear"

Ratios = list[tuple[Row, float]]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The cells of a run that were timed, in the order of the tables.

    Their rows are by workload id and implementation, and have two columns more: `calls`, the operators that ran, and
    `backend`, the one of PyTorch's SDPA that ran, empty for none, None where it is not known.
    """

    cells: "pd.DataFrame"
    rows: dict[tuple[str, str], Row]

    def others(self, row: Row, is_like: Callable[[Row, Row], bool]) -> list[Row]:
        """The first other cell of the workload that is like this one, the baseline before all; empty for none."""
        members = [other for (workload, _), other in self.rows.items() if workload == row["workload"]]
        same = [other for other in members if is_like(row, other)]
        return sorted(same, key=lambda other: (not other["is_baseline"], other["implementation"]))[:1]

    def ratios(self, name: str, other: str, workloads: Iterable[str]) -> Ratios:
        """By cell of `name`, its time divided by that of `other` on each workload, from the same blocks if it can."""
        both = [(self.rows.get((workload, name)), self.rows.get((workload, other))) for workload in workloads]
        found = []
        for mine, its in both:
            if mine is not None and its is not None:
                is_paired = mine["ratio"] is not None and its["ratio"] is not None
                column = "ratio" if is_paired else "latency_s"
                found.append((mine, mine[column] / its[column]))
        return found


@lru_cache(maxsize=1)
def findings(results: Results) -> Mapping[str, str]:
    """By its name, each notable finding of this run in one or two sentences; none of two states of the code."""
    if results.plan.sides is not None:
        return {}
    shown = cells.shown(results)
    timed = Timed(cells=shown[shown["latency_s"].notna()], rows={})
    operators = {(record.workload.id, record.implementation): record.operators for record in results.records}
    for row in rows(timed.cells):
        key = row["workload"], row["implementation"]
        seen = operators[key]
        timed.rows[key] = row | {"calls": seen.calls if seen else (), "backend": seen.observed if seen else None}
    texts = {name: look(timed) for name, look in LOOKS.items()}
    return {name: plain(text) for name, text in texts.items() if text}


def _operators(row: Row, kinds: Iterable[str]) -> frozenset[str]:
    """The names of the operators of some kinds that ran in a cell."""
    return frozenset(one.name for one in row["calls"] if one.kind in kinds)


def _num_linear(row: Row) -> int:
    """How many linear layers ran in a cell."""
    return sum(one.num_calls for one in row["calls"] if one.name == LINEAR)


def _page_faults(timed: Timed) -> str:
    """Where fresh pages become a large part of a call, from one length to the next."""
    cliffs = list(_cliffs(timed))
    if not cliffs:
        return ""
    before, after = max(cliffs, key=lambda pair: float(pair[1]["fault_share"]))
    names = ", ".join(dict.fromkeys(found["implementation"] for _, found in cliffs))
    return (
        f"{after['implementation']} spends {percent(before['fault_share'])} of a call on fresh pages at length "
        f"{cells.length(before)} and {percent(after['fault_share'])} at {cells.length(after)} "
        f"({after['title']}), where its largest block is {show(after['largest_block_bytes'], 'bytes')}: so large a "
        "block goes back to the system when it is freed, and the next call takes each of its pages again. An estimate, "
        "from the number of faults; --allocator retain shows the same code without them. "
        f"The same happens to: {names}."
    )


def _cliffs(timed: Timed) -> Iterator[tuple[Row, Row]]:
    """Neighbours in length, the first nearly without page faults, the second full of them."""
    for panel in panels(timed.cells):
        for line in panel.lines.values():
            for before, after in pairwise(line):
                if (before["fault_share"] or 0.0) < LOW and (after["fault_share"] or 0.0) > HIGH:
                    yield before, after


def _half_precision(timed: Timed) -> str:
    """Half precision that takes longer than float32 does."""

    def but_dtype(row: Row) -> tuple[object, ...]:
        return (row["implementation"], *(row[axis] for axis in AXES if axis != "dtype"))

    full = {but_dtype(row): row for row in timed.rows.values() if row["dtype"] == "float32"}
    found: dict[str, Ratios] = {}
    for row in timed.rows.values():
        other = full.get(but_dtype(row))
        if row["dtype"] in {"bfloat16", "float16"} and other is not None:
            found.setdefault(row["dtype"], []).append((row, row["latency_s"] / other["latency_s"]))
    parts = [
        f"{dtype} takes {_times(ratios)} the time of float32, most for {_where(ratios)}{_why(ratios)}"
        for dtype, ratios in found.items()
        if _mean(ratios) > CLEAR
    ]
    notes = [note for row in timed.rows.values() for note in (row["warnings"] or "").split("; ")]
    native = dict.fromkeys(f" {note}." for note in notes if note.endswith(NOT_NATIVE))
    return f"{'; '.join(parts)}.{''.join(native)}" if parts else ""


def _compiled(timed: Timed) -> str:
    """Textbook code in whose place the compiler put a fused kernel."""
    by_name = grouped(timed.rows.values(), lambda row: str(row["implementation"]))
    parts = []
    for name, mine in by_name.items():
        source, option = plugins.variant(name)
        written = {row["backend"] for row in by_name.get(source, ())} - {None}
        became = [row for row in mine if row["backend"]]
        if not option or not became or written != {""}:
            continue
        backends = ", ".join(dict.fromkeys(str(row["backend"]) for row in became))
        known = {row["mask"] for row in became}
        others = {row["mask"] for row in mine} - known
        is_clear = others and not any(row["mask"] in known for row in mine if row not in became)
        elsewhere = f", but not under the mask {' or '.join(sorted(others))}" if is_clear else ""
        parts.append(
            f"in {len(became)} of {len(mine)} workloads what ran of {name} is PyTorch's {backends} kernel, which "
            f"nobody wrote there: the compiler knows the textbook form{elsewhere}. "
            f"It takes {_times(timed.ratios(name, source, [row['workload'] for row in became]))} the time of {source}"
        )
    return "; ".join(parts) + "." if parts else ""


def _explicit_mask(timed: Timed) -> str:
    """A mask as a tensor, where others run the same kernel without any operator on a mask."""
    pairs: dict[tuple[str, str, str], list[str]] = {}
    for row in timed.rows.values():
        if row["mask"] != "none" and row["backend"] and _operators(row, {"mask"}):
            for other in timed.others(row, _has_same_kernel_without_mask):
                key = row["implementation"], other["implementation"], row["mask"]
                pairs.setdefault(key, []).append(row["workload"])
    found = {key: timed.ratios(*key[:2], workloads) for key, workloads in pairs.items()}
    parts = [
        f"the {mask} mask as a tensor ({name}) takes {_times(ratios)} the time of the same kernel without one "
        f"({other}), most for {_where(ratios)}"
        for (name, other, mask), ratios in found.items()
        if _mean(ratios) >= CLEAR
    ]
    return f"{'; '.join(parts)}: a tensor must be read, and its kernel cannot skip what it hides." if parts else ""


def _has_same_kernel_without_mask(row: Row, other: Row) -> bool:
    return other["ran"] == row["ran"] and not _operators(other, {"mask"})


def _layer_for_each_head(timed: Timed) -> str:
    """A linear layer for each head, where others run the same operators with fewer, larger layers."""
    lengths: dict[tuple[str, str], dict[int, list[str]]] = {}
    layers: dict[str, int] = {}
    for row in (row for row in timed.rows.values() if row["scope"] == "module"):
        if _num_linear(row) <= row["num_heads"]:
            continue
        for other in timed.others(row, _has_same_products_with_fewer_layers):
            pair = row["implementation"], other["implementation"]
            lengths.setdefault(pair, {}).setdefault(row["seq_len"], []).append(row["workload"])
            layers |= {pair[0]: _num_linear(row), pair[1]: _num_linear(other)}
    parts = []
    for (name, fewer), workloads in lengths.items():
        ratios = {length: timed.ratios(name, fewer, workloads[length]) for length in sorted(workloads)}
        if max(map(_mean, ratios.values())) >= CLEAR:
            at = ", ".join(f"{_times(found)} at length {length}" for length, found in ratios.items())
            parts.append(
                f"a linear layer for each head ({name}, {layers[name]} of them) takes longer than {layers[fewer]} "
                f"for all heads ({fewer}), projections included: {at}"
            )
    return "; ".join(parts) + "." if parts else ""


def _has_same_products_with_fewer_layers(row: Row, other: Row) -> bool:
    is_same = _operators(other, PRODUCTS) == _operators(row, PRODUCTS)
    return is_same and _num_linear(other) < row["num_heads"]


def _baseline_beaten(timed: Timed) -> str:
    """Who is faster than the baseline, by verdict."""
    baseline = next((row["implementation"] for row in timed.rows.values() if row["is_baseline"]), "")
    won = [(row, 1 / row["ratio"]) for row in timed.rows.values() if row["verdict"] == Verdict.faster]
    faster = grouped(won, lambda one: str(one[0]["implementation"]))
    if not faster:
        return ""
    most = sorted(faster.items(), key=lambda item: -len(item[1]))
    others = f", and by {', '.join(name for name, _ in most[FEW:])}" if len(most) > FEW else ""
    number = timed.cells["implementation"].value_counts()
    parts = [
        f"{name} in {len(found)} of {number[name]} workloads (most for {_where(found)})" for name, found in most[:FEW]
    ]
    return f"{baseline} is beaten by {'; '.join(parts)}{others}."


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
    return f"{row['implementation']}, {row['title']}, length {cells.length(row)}: {significant(most, 2)} times"


def _why(ratios: Ratios) -> str:
    """What the row with the largest ratio spends more than the fastest of its workload, where that is known."""
    row, _ = max(ratios, key=lambda one: one[1])
    why = row["why_slower"] or ""
    return f" ({why} compared with the fastest there)" if "%" in why and why != NEAR else ""


LOOKS: dict[str, Callable[[Timed], str]] = {
    "Page faults": _page_faults,
    "Half precision": _half_precision,
    "Compiled": _compiled,
    "Explicit mask": _explicit_mask,
    "A layer for each head": _layer_for_each_head,
    "Baseline beaten": _baseline_beaten,
}
