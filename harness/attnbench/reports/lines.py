"""Plots of time and memory against length."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from attnbench.analysis.results import Results
from attnbench.analysis.table import Panel, Row, panels, rows, workload_of
from attnbench.reports import Picture, Report, cells, grouped, plot, style
from attnbench.statistics.intervals import growth_exponent
from attnbench.units import plain
from attnbench.workloads.workload import DTYPE_BYTES

FEWEST_LENGTHS, ENOUGH_LENGTHS = 3, 5
"""Fewest lengths for a growth exponent, and for a useful plot of time."""
X_LABELS = {"seq_len": "sequence length T", "kv_len": "key length S"}


def latencies(results: Results, fewest_lengths: int = 1) -> Picture | None:
    """Plot the time of a call against length; None if no panel has times at `fewest_lengths`."""
    title = "Time per call against length (median; lower is faster)"
    return _draw(results, _time, (title, "time per call", "s"), fewest_lengths)


def memory(results: Results) -> Picture | None:
    """Draw the peak memory of a call against length, with the sizes of score matrix and output."""
    title = "Peak memory of one call above its inputs, against length"
    return _draw(results, _bytes, (title, "peak memory", "bytes"))


@lru_cache(maxsize=1)
def usual(results: Results) -> Picture | None:
    """The picture of a page: time against length, if some panel has enough lengths."""
    return latencies(results, ENOUGH_LENGTHS)


def _time(x: int, row: Row) -> plot.Point | None:
    if row["latency_s"] is None:
        return None
    low, high = row["latency_low_s"], row["latency_high_s"]
    return plot.Point(x=x, y=row["latency_s"], low=low, high=high, is_hollow=low is None)


def _bytes(x: int, row: Row) -> plot.Point | None:
    value = row.get("peak_memory_bytes")
    return plot.Point(x=x, y=value) if value else None


def _draw(
    results: Results,
    point: Callable[[int, Row], plot.Point | None],
    texts: tuple[str, str, str],
    fewest_lengths: int = 1,
) -> Picture | None:
    title, y_label, unit = texts
    chosen = [panel for panel in panels(cells.shown(results)) if len(panel.lengths) >= fewest_lengths]
    drawn, seen, absent, exponents = list[plot.Panel](), list[Row](), list[Row](), list[str]()
    for panel, name in zip(chosen, titles(chosen), strict=True):
        lines = []
        for arm, members in panel.lines.items():
            points = [(row, point(row[panel.axis], row)) for row in members]
            absent += [row for row, value in points if value is None]
            if values := [value for _, value in points if value is not None]:
                lines.append(plot.Line(arm=arm, points=values, label=_growth(panel.letter, values)))
        if not lines:
            continue
        seen += rows(panel.cells)
        exponents += [f"~{panel.letter}^x: growth with length, a least-squares slope."] * any(
            line.label for line in lines
        )
        drawn.append(
            plot.Panel(
                title=name,
                lines=lines,
                x_label=X_LABELS[panel.axis],
                ticks={length: str(length) for length in panel.lengths},
                draw_more=partial(_draw_theory, panel) if unit == "bytes" else lambda _: None,
            )
        )
    if not drawn:
        return None
    is_hollow = any(value.is_hollow for panel in drawn for line in panel.lines for value in line.points)
    theory = "Grey lines: two score matrices (B H T S, dashed), one (dash-dotted), the output (B H T V, dotted)."
    notes = [
        theory * (unit == "bytes"),
        _absences(absent),
        "Hollow: too few visits for an interval." * is_hollow,
        *exponents[:1],
    ]
    note = " ".join(filter(None, notes))
    base = style.label(cells.base(results.plan))
    return plot.plot(drawn, title=title, subtitle=cells.shared(seen), y_label=y_label, unit=unit, note=note, base=base)


def titles(shown: Sequence[Panel]) -> list[str]:
    """Title each panel by its difference from the others."""
    first = [workload_of(rows(panel.cells.iloc[:1])[0]) for panel in shown]
    labels = cells.labels(first)
    return [f"{labels[one.id]} {panel.other}".strip() for panel, one in zip(shown, first, strict=True)]


def _growth(letter: str, points: Sequence[plot.Point]) -> str:
    """The growth exponent over at least three lengths, as a suffix of a name; "" with fewer."""
    if len(points) < FEWEST_LENGTHS:
        return ""
    exponent = growth_exponent([int(point.x) for point in points], [point.y for point in points])
    return "" if exponent is None else f"  ~{letter}^{exponent:.1f}"


def _absences(absent: Sequence[Row]) -> str:
    """Name the implementations with missing points, with their lengths and statuses."""
    parts = []
    for (name, ended), members in grouped(absent, lambda row: (cells.arm(row), cells.status(row))).items():
        lengths = ", ".join(dict.fromkeys(cells.length(row) for row in members))
        parts.append(f"{plain(name, limit=24)} at {lengths} ({'no value' if ended == 'ok' else ended})")
    return f"Not shown: {'; '.join(parts)}." if parts else ""


def _draw_theory(panel: Panel, axes: Axes) -> None:
    """Draw the sizes of one score matrix, of two, and of the output."""
    cell = rows(panel.cells.iloc[:1])[0]
    low, high = axes.get_xlim()
    x = np.geomspace(low, high, 33)
    is_square = cell["seq_len"] == cell["kv_len"]
    queries = x if panel.axis == "seq_len" else np.full_like(x, cell["seq_len"])
    keys = x if panel.axis == "kv_len" or is_square else np.full_like(x, cell["kv_len"])
    heads = cell["batch_size"] * cell["num_heads"] * DTYPE_BYTES[cell["dtype"]]
    faint: dict[str, Any] = {"color": "#666666", "linewidth": 1.1, "zorder": 1.5}
    axes.plot(x, 2 * heads * queries * keys, linestyle="--", **faint)
    axes.plot(x, heads * queries * keys, linestyle="-.", **faint)
    axes.plot(x, heads * queries * cell["value_dim"], linestyle=":", **faint)
    axes.set_xlim(low, high)


REPORT = {
    "latency_plot": Report(
        summary="time against length with intervals", files=("latency_plot.svg", "latency_plot.png"), draw=latencies
    ),
    "memory_plot": Report(
        summary="peak memory against length with theory", files=("memory_plot.svg", "memory_plot.png"), draw=memory
    ),
}
