"""The table of cells for people: which rows are shown, in which order, under which titles, each column as text.

Titles are derived from the axes of workloads, so that new axes appear automatically.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from attnbench.analysis import comparisons as pairs
from attnbench.analysis.conclusion import factor
from attnbench.analysis.results import Results
from attnbench.analysis.table import (
    GROUP_AXES,
    MetricColumn,
    Row,
    arm_of,
    metric_columns,
    rows,
    table,
)
from attnbench.reports import grouped
from attnbench.statistics.verdict import Reason
from attnbench.storage.events import Plan
from attnbench.storage.records import BASE, Status, Verdict
from attnbench.units import MISSING, SCALES, duration, percent, plain, show, significant, span
from attnbench.workloads.workload import Workload, following

if TYPE_CHECKING:
    import pandas as pd

Axes = Mapping[str, Any]
"""The value of every axis: a row of the table, or `Workload.axes()`."""
SIZES = {
    "batch_size": "B",
    "num_heads": "H",
    "num_kv_heads": "G",
    "head_dim": "K",
    "value_dim": "V",
    "embed_dim": "D",
}
SCOPES = {"attention": "attention only", "module": "whole module"}
BIASES = {
    "all": "all biases",
    "qkv": "biases of query, key and value alone",
    "out": "a bias of the output alone",
    "none": "no biases",
}
WORDS: dict[str, Callable[[Any], str]] = {
    "scope": lambda scope: SCOPES.get(scope, scope),
    "direction": lambda direction: str(direction).replace("_", " and "),
    "dtype": str,
    "mask": lambda mask: "no mask" if mask == "none" else plain(mask.replace("_", " "), limit=LONG_MASK),
    **{axis: f"{letter}={{}}".format for axis, letter in SIZES.items()},
    "bias": lambda bias: BIASES.get(bias, f"biases of {bias} alone"),
    "dropout": lambda dropout: f"dropout {dropout:g}" if dropout else "no dropout",
    "device": lambda device: f"on {device}",
    "num_threads": lambda number: f"{number} thread{'s' * (number > 1)}" if number else "a thread for each core",
    "seed": lambda seed: f"seed {seed}",
    "layout": lambda layout: "values in the keys" if layout == "value_in_key" else f"{layout} in memory",
    "scale": lambda scale: f"scale {scale:.3g}" if scale else "scale 1/sqrt(K)",
    "rotary": lambda rotary: "no rotary positions" if rotary == "none" else f"rotary positions {rotary}",
    "sinks": lambda sinks: "no sinks" if sinks == "none" else f"{sinks} sinks",
    "world_size": lambda number: f"{number} ranks" if number > 1 else "one process",
    "float32_matmul_precision": lambda precision: f"{precision} precision of float32 products",
}
"""Format of an axis in a title, in the order of titles."""
ALWAYS = {"scope", "direction", "dtype", "mask", "batch_size", "num_heads", "head_dim"}
"""Axes that every title names."""
NAMED = (*WORDS, *(axis for axis in GROUP_AXES if axis not in WORDS))
"""All axes in the order of titles; those without a format of their own are shown as axis=value."""
DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Workload)}
LABELLED = ("mask",)
"""Axes that every label names if they vary; others are named only for unusual shapes."""
SHORT = {"scope": {"attention": "attention", "module": "module"}, "direction": {"forward_backward": "fwd+bwd"}}
"""Shorter words than in titles: a line has 80 columns."""
LARGEST_EFFECT = 1.0
"""Larger detectable differences are left out of tables."""
HUGE = 1000.0
LONG_MASK = 60
"""Most characters of a mask: some have long lists of numbers."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the tables for people."""

    heading: str
    text: Callable[[Row], str]  # never blank
    explanation: str = ""  # completes "`heading` is ..."


def columns(results: Results) -> list[Column]:
    """The columns of a run's tables, including one for each measured metric."""
    metrics = [_metric(each) for each in metric_columns(results)]
    return [*FIRST, *metrics, *LAST]


def legend(shown_columns: Iterable[Column]) -> str:
    """Explain each column in a sentence."""
    explained = [column for column in shown_columns if column.explanation]
    return " ".join(f"{column.heading.capitalize()} is {column.explanation}." for column in explained)


def absent(results: Results) -> dict[str, str]:
    """Implementations that are unsupported in all their cells, with the first reason.

    Empty if nothing else would be left to show. Also empty for two sides, where losses on one side must be visible.
    """
    supported = {record.implementation for record in results.records if record.status is not Status.unsupported}
    if results.plan.sides is not None or not supported:
        return {}
    reasons = {record.implementation: record.message for record in reversed(results.records)}
    names = dict.fromkeys(record.implementation for record in results.records)
    return {name: reasons[name] for name in names if name not in supported}


def shown(results: Results) -> "pd.DataFrame":
    """The table of cells without the implementations that are absent from this run."""
    cells = table(results)
    return cells[~cells["implementation"].isin(list(absent(results)))]


@lru_cache(maxsize=1)
def shown_rows(results: Results) -> list[Row]:
    """Rows for tables and charts, with titles; where the baseline has no time, they are compared with its substitute.

    Groups are in the order of the plan; inside a group rows are sorted by length, then by ratio, not by time: cells
    that were decided early saw the machine in another state.
    """
    replaced, names = pairs.substitutes(results), titles(results)
    found = rows(shown(results))
    for row in found:
        row["title"] = names[row["workload"]]
        if row["workload"] in replaced:
            row["than"] = str(replaced[row["workload"]])
    members = grouped(found, lambda row: tuple(row[axis] for axis in GROUP_AXES)).values()
    assert len(members) == len({row["title"] for row in found}), "two groups of workloads have one title"
    return [row for group in members for row in sorted(group, key=_by_length_and_ratio)]


def _by_length_and_ratio(row: Row) -> tuple[float, ...]:
    return row["seq_len"], row["kv_len"], row["paired_latency_s"] or row["latency_s"] or math.inf


def groups(results: Results) -> dict[str, list[Row]]:
    """Rows of cells by the title of their group."""
    return grouped(shown_rows(results), lambda row: str(row["title"]))


def title(axes: Axes, leave_out: Collection[str] = ()) -> str:
    """A workload without its lengths: "attention only, forward, float32, causal, B=1 H=8 K=64".

    Axes that follow from others, hold their default or are in `leave_out` are omitted.
    """
    defaults = DEFAULTS | following(axes)
    names = [axis for axis in NAMED if axis not in leave_out and (axis in ALWAYS or axes[axis] != defaults[axis])]
    return ", ".join(
        (" " if are_sizes else ", ").join(word(axis, axes) for axis in group)
        for are_sizes, group in groupby(names, lambda axis: axis in SIZES)
    )


def titles(results: Results) -> dict[str, str]:
    """The title of each workload of a run by id; workloads that differ in more than length have different titles."""
    return {workload.id: title(workload.axes()) for workload in results.plan.workloads}


def length(axes: Axes) -> str:
    """The query length, with the key length if it differs: "512" or "1 x 512"."""
    same = axes["kv_len"] == axes["seq_len"]
    return str(axes["seq_len"]) if same else f"{axes['seq_len']} x {axes['kv_len']}"


def shared(members: Sequence[Axes]) -> str:
    """Describe the axes that all of them share."""
    return title(members[0], leave_out={axis for axis in NAMED if len({axes[axis] for axes in members}) > 1})


def labels(workloads: Sequence[Workload]) -> dict[str, str]:
    """Short labels by workload id: the axes that distinguish it from the others, lengths excluded."""
    by_id = {workload.id: workload.axes() for workload in workloads}
    usual = usual_values(workloads)
    differing = [axis for axis in NAMED if axis in usual and len({axes[axis] for axes in by_id.values()}) > 1]
    ordered = sorted(differing, key=lambda axis: ("dtype", *LABELLED, axis).index(axis))
    return {
        name: " ".join(
            SHORT.get(axis, {}).get(str(axes[axis])) or word(axis, axes)
            for axis in ordered
            if axis in LABELLED or axes[axis] != usual[axis]
        )
        for name, axes in by_id.items()
    }


def usual_values(workloads: Sequence[Workload]) -> dict[str, object]:
    """The most common value of each axis, lengths excluded."""
    members = [workload.axes() for workload in workloads]
    values = {axis: Counter(axes[axis] for axes in members) for axis in GROUP_AXES}
    return {axis: counts.most_common(1)[0][0] for axis, counts in values.items() if counts}


def names(results: Results) -> dict[str, str]:
    """Label and length by workload id: "causal T=512"."""
    by_id = labels(results.plan.workloads)
    return {each.id: f"{by_id[each.id]} T={length(each.axes())}".strip() for each in results.plan.workloads}


def base(plan: Plan) -> str:
    """Name the baseline of a run."""
    return plain(plan.baseline) if plan.sides is None else BASE


def word(axis: str, axes: Axes) -> str:
    """The value of one axis in words."""
    value = axes[axis]
    if axis in WORDS:
        return WORDS[axis](value)
    return f"{axis}={f'{value:g}' if isinstance(value, float) else value}"


def arm(row: Row) -> str:
    """The implementation, marked if it is on the base's side: "fused (base)"."""
    return plain(str(arm_of(row))) or MISSING


def status(row: Row) -> str:
    """How the cell ended, in words."""
    return f"{row['status']} (predicted)" if row["is_predicted"] else str(row["status"])


def time(row: Row) -> str:
    """The time of a call with its interval, adjusted so that times of one workload differ by exactly their ratios.

    The ratio comes from common blocks, but the median from all of a cell's samples, and some may have seen another
    state of the machine.
    """
    paired_s: float | None = row["paired_latency_s"]
    if row["latency_s"] is None or paired_s is None:
        return MISSING
    moved = paired_s / row["latency_s"]
    low, high = (None if end is None else moved * end for end in (row["latency_low_s"], row["latency_high_s"]))
    return span(paired_s, low, high, "s")


def ratio(row: Row) -> str:
    """The ratio with its interval; 1 for a reference."""
    if row["verdict"] is None:
        return MISSING if row["ratio"] is None else "1"
    return span(row["ratio"], row["ratio_low"], row["ratio_high"])


def verdict(row: Row) -> str:
    """The verdict with its factor, or the detectable difference; only "doubtful" if its times are."""
    if row["reason"] == Reason.doubtful:
        return "doubtful"
    effect, more_s = row["minimum_detectable_effect"], row["more_s"]
    seen = "" if effect is None or effect > LARGEST_EFFECT else f"{percent(effect)} would show"
    kernel = ", same kernel" if row["is_same_kernel"] else ""
    match row["verdict"]:
        case None:
            return MISSING if row["latency_s"] is None else "baseline" if row["is_baseline"] else "no baseline"
        case Verdict.equivalent:
            return f"equal within {percent(row['margin'])}{kernel}"
        case Verdict.undecided:
            more = "" if more_s is None else f"; about {duration(more_s)} more needed"
            return f"undecided ({seen or row['reason']}{more}){kernel}"
        case _:
            return f"{factor(row['ratio'], than=row.get('than', ''))}{kernel}"


def error(row: Row) -> str:
    """The largest error / tolerance."""
    if row["error_ratio"] is None:
        return "not finite" if row["num_tensors"] else MISSING
    return multiple(row["error_ratio"])


def multiple(value: float) -> str:
    """An error as a multiple of its tolerance: "0.12", or "3e+04" above a thousand."""
    return significant(value, 2) if value < HUGE else f"{value:.0e}"


def notes(row: Row) -> str:
    """The warnings about an ok cell, or why another one is not ok."""
    reason = row["warnings"] or row["message"] or row["diagnosis"] or ""
    return plain(reason) or (MISSING if row["status"] == Status.ok else "no reason was recorded")


def _metric(measured: MetricColumn) -> Column:
    """A metric in its unit; sizes also as multiples of the score matrix: "17.0 MiB (2.1 S)"."""
    explanation = measured.explanation or "a metric that is not installed here"
    if measured.unit == "bytes":
        explanation += ", in brackets as multiples of the textbook's score matrix S"

    def text(row: Row) -> str:
        value: float | None = row[measured.name]
        if value is None or measured.unit in SCALES:
            is_multiple = measured.unit == "bytes" and value
            suffix = f" ({significant(value / row['score_matrix_bytes'], 2)} S)" if value and is_multiple else ""
            return show(value, measured.unit) + suffix
        return f"{value:,.6g} {'' if measured.unit in measured.heading else measured.unit}".rstrip()

    return Column(heading=measured.heading, text=text, explanation=explanation)


def _rate(row: Row) -> str:
    text = show(row["flops_per_s"], "flops/s")
    return text if row["matmul_share"] is None else f"{text} ({percent(row['matmul_share'])})"


FIRST = (
    Column(heading="length", text=length),
    Column(heading="implementation", text=arm),
    Column(heading="status", text=status),
    Column(
        heading="time per call",
        text=time,
        explanation="the baseline's median times the ratio, with the 95 % interval of its own median in brackets",
    ),
    Column(
        heading="ratio",
        text=ratio,
        explanation="the time divided by the baseline's in the same block: below 1 is faster",
    ),
    Column(heading="verdict", text=verdict),
    Column(
        heading="ran",
        text=lambda row: plain(row["ran"] or MISSING),
        explanation="the backend of PyTorch's SDPA, or else the operator with the most time",
    ),
)
LAST = (
    Column(
        heading="FLOP/s",
        text=_rate,
        explanation="useful FLOPs (of visible pairs) per second, in brackets as a share of the fastest matrix product "
        "of this run",
    ),
    Column(
        heading="error",
        text=error,
        explanation="the largest error / tolerance over all compared tensors: above 1 it is wrong and is not timed",
    ),
    Column(heading="notes", text=notes),
)
"""Columns left and right of the metrics."""
