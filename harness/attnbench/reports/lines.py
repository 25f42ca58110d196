"""Plots of time and memory against length."""

from collections.abc import Sequence
from functools import lru_cache

from attnbench.analysis.results import Results
from attnbench.analysis.table import Panel, Row, panels, rows, workload_of
from attnbench.reports import Picture, Report, cells, grouped, plot, style
from attnbench.units import plain

ENOUGH_LENGTHS = 5
"""Fewest lengths for the plot of time to be the picture of a run."""
X_LABELS = {"seq_len": "sequence length T", "kv_len": "key length S"}


TITLES = {
    "time per call": "Time per call against length (median; lower is faster)",
    "peak memory": "Peak memory of one call above its inputs, against length",
}
COLUMNS = {
    "time per call": ("s", "latency_s", "latency_low_s", "latency_high_s"),
    "peak memory": ("bytes", "peak_memory_bytes", "", ""),
}
"""Unit, and columns of the value and of the ends of its interval, by the label of the axis."""


def draw(results: Results, label: str, fewest_lengths: int = 1) -> Picture | None:
    """Plot a value against length, a panel for each group; None if no panel has values at `fewest_lengths`."""
    unit, value, low, high = COLUMNS[label]
    chosen = [panel for panel in panels(cells.shown(results)) if len(panel.lengths) >= fewest_lengths]
    drawn, drawn_rows, absent = list[plot.Panel](), list[Row](), list[Row]()
    for panel, name in zip(chosen, titles(chosen), strict=True):
        lines = []
        for arm, members in panel.lines.items():
            present = [row for row in members if row.get(value)]
            absent += [row for row in members if not row.get(value)]
            points = [
                plot.Point(x=row[panel.axis], y=row[value], low=row.get(low), high=row.get(high)) for row in present
            ]
            lines += [plot.Line(arm=arm, points=points)] if points else []
        if lines:
            ticks = {float(length): str(length) for length in panel.lengths}
            drawn.append(plot.Panel(title=name, lines=lines, x_label=X_LABELS[panel.axis], ticks=ticks))
            drawn_rows += rows(panel.cells)
    if not drawn:
        return None
    base = style.label(cells.base(results.plan))
    texts = {"subtitle": cells.shared(drawn_rows), "note": _absences(absent), "base": base}
    return plot.plot(drawn, title=TITLES[label], y_label=label, unit=unit, **texts)


@lru_cache(maxsize=1)
def usual(results: Results) -> Picture | None:
    """The picture of a page: time against length, if some panel has enough lengths."""
    return draw(results, "time per call", ENOUGH_LENGTHS)


def titles(members: Sequence[Panel]) -> list[str]:
    """Title each panel by its difference from the others."""
    first = [workload_of(rows(panel.cells.iloc[:1])[0]) for panel in members]
    labels = cells.labels(first)
    return [f"{labels[one.id]} {panel.other}".strip() for panel, one in zip(members, first, strict=True)]


def _absences(absent: Sequence[Row]) -> str:
    """Name the implementations with missing points, with their lengths and statuses."""
    parts = []
    for (name, status), members in grouped(absent, lambda row: (cells.arm(row), cells.status(row))).items():
        lengths = ", ".join(dict.fromkeys(cells.length(row) for row in members))
        parts.append(f"{plain(name, limit=24)} at {lengths} ({'no value' if status == 'ok' else status})")
    return f"Not shown: {'; '.join(parts)}." if parts else ""


REPORT = {
    "latency_plot": Report(
        summary="time against length, with intervals",
        files=("latency_plot.svg", "latency_plot.png"),
        draw=lambda results: draw(results, "time per call"),
    ),
    "memory_plot": Report(
        summary="peak memory against length",
        files=("memory_plot.svg", "memory_plot.png"),
        draw=lambda results: draw(results, "peak memory"),
    ),
}
