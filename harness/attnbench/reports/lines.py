"""Plots of time and memory against length: a panel for each group, intervals, and names at the ends of lines."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, LogLocator

from attnbench.analysis.results import Results
from attnbench.analysis.table import Panel, Row, panels, rows, workload_of
from attnbench.reports import Picture, Report, cells, grouped, style
from attnbench.storage.records import Arm
from attnbench.units import plain, show

ENOUGH_LENGTHS = 5
"""Fewest lengths for the plot of time to be the picture of a run."""
X_LABELS = {"seq_len": "sequence length T", "kv_len": "key length S"}
MOST_PANELS, MOST_LINES = 6, 6
LABEL_HEIGHT = 0.07
"""Least distance of labels, as a share of the panel's height."""
GREY = "#c4c4c4"
"""Colour of lines without a label."""
LONG = 4.0
"""Intervals may reach beyond all points by this factor; longer ones are cut."""
MANY_TICKS, TITLE_LEN, EDGE = 7, 48, 1.2
LEAST_WIDTH = 7.2
"""Inches for the title and the legend next to it."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """The columns of the table of cells that a plot draws, and its texts."""

    label: str
    title: str
    unit: str
    column: str
    ends: tuple[str, str] = ("", "")  # columns of the interval


TIME = Quantity(
    label="time per call",
    title="Time per call against length (median; lower is faster)",
    unit="s",
    column="latency_s",
    ends=("latency_low_s", "latency_high_s"),
)
MEMORY = Quantity(
    label="peak memory",
    title="Peak memory of one call above its inputs, against length",
    unit="bytes",
    column="peak_memory_bytes",
)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The lines of one panel, from left to right, without rows that lack a value."""

    panel: Panel
    title: str
    lines: Mapping[Arm, Sequence[Row]]
    labelled: Sequence[Arm]


def draw(results: Results, quantity: Quantity, fewest_lengths: int = 1) -> Picture | None:
    """Plot a quantity in the first six groups with values at `fewest_lengths`; None if there is no such group."""
    chosen = [panel for panel in panels(cells.shown(results)) if len(panel.lengths) >= fewest_lengths]
    groups, absent = list[Group](), list[Row]()
    for panel, title in zip(chosen, titles(chosen), strict=True):
        absent += [row for members in panel.lines.values() for row in members if not row.get(quantity.column)]
        known = {arm: [row for row in members if row.get(quantity.column)] for arm, members in panel.lines.items()}
        lines = {arm: members for arm, members in known.items() if members}
        if lines:
            last = {arm: members[-1][quantity.column] for arm, members in lines.items()}
            names = labelled(last, style.label(cells.base(results.plan)))
            groups.append(Group(panel=panel, title=title, lines=lines, labelled=names))
    if not groups:
        return None
    drawn = groups[:MOST_PANELS]
    values = [row[quantity.column] for group in drawn for members in group.lines.values() for row in members]
    num_columns = min(len(drawn), 3 if len(drawn) != 4 else 2)  # noqa: PLR2004 - four panels make a square

    def fill(axes: Axes, group: Group) -> None:
        _draw_group(axes, group, quantity)
        axes.set_ylabel("" if drawn.index(group) % num_columns else quantity.label)

    def finish(axes: Axes, group: Group) -> None:
        _scale(axes, values, quantity.unit)
        _label(axes, group, quantity)

    return style.sheet(
        drawn,
        fill,
        (max(LEAST_WIDTH, 0.6 + 4.4 * num_columns), 1.0 + 3.2 * math.ceil(len(drawn) / num_columns)),
        title=quantity.title,
        subtitle=cells.shared([row for group in groups for row in rows(group.panel.cells)]),
        note=" ".join(_notes(groups, absent, quantity)),
        num_columns=num_columns,
        finish=finish,
        sharey=len(drawn) > 1,
    )


@lru_cache(maxsize=1)
def usual(results: Results) -> Picture | None:
    """The picture of a page: time against length, if some panel has enough lengths."""
    return draw(results, TIME, ENOUGH_LENGTHS)


def titles(members: Sequence[Panel]) -> list[str]:
    """Title each panel by its difference from the others."""
    first = [workload_of(rows(panel.cells.iloc[:1])[0]) for panel in members]
    labels = cells.labels(first)
    return [f"{labels[one.id]} {panel.other}".strip() for panel, one in zip(members, first, strict=True)]


def labelled(last: Mapping[Arm, float], base: str) -> list[Arm]:
    """Choose the arms with a colour and a label: the baseline, and those with the most distant last values."""
    ends = {arm: math.log(value) for arm, value in last.items()}
    chosen = [arm for arm in ends if style.label(arm) == base][:1] or list(ends)[:1]
    while len(chosen) < min(MOST_LINES, len(ends)):
        others = [arm for arm in ends if arm not in chosen]
        chosen.append(max(others, key=lambda arm: min(abs(ends[arm] - ends[other]) for other in chosen)))
    return chosen


def _notes(groups: Sequence[Group], absent: Sequence[Row], quantity: Quantity) -> list[str]:
    """Missing points with the reasons, and the meaning of bars and of grey lines."""
    notes, parts = list[str](), list[str]()
    for (name, status), members in grouped(absent, lambda row: (cells.arm(row), cells.status(row))).items():
        lengths = ", ".join(dict.fromkeys(cells.length(row) for row in members))
        parts.append(f"{plain(name, limit=24)} at {lengths} ({'no value' if status == 'ok' else status})")
    if parts:
        notes.append(f"Not shown: {'; '.join(parts)}.")
    if any(quantity.ends):
        notes.append("Bars are 95 % intervals over processes.")
    drawn = groups[:MOST_PANELS]
    colourless = {arm for group in drawn for arm in group.lines if arm not in group.labelled}
    if grey := sorted(style.label(arm) for arm in colourless.difference(*(group.labelled for group in drawn))):
        notes.append(f"Grey, and close to one of the others: {', '.join(grey)}.")
    if len(groups) > MOST_PANELS:
        notes.append(f"{len(groups) - MOST_PANELS} more groups have their numbers in records.csv.")
    return notes


def _draw_group(axes: Axes, group: Group, quantity: Quantity) -> None:
    axes.set_xscale("log", base=2)
    for arm, members in group.lines.items():
        x, y = [row[group.panel.axis] for row in members], [row[quantity.column] for row in members]
        if arm in group.labelled:
            _draw_line(axes, arm, (x, y), [[row.get(end) for row in members] for end in quantity.ends])
        else:
            axes.plot(x, y, color=GREY, linewidth=1.2, marker=".", zorder=1.8)
    lengths = group.panel.lengths
    style.ticks(axes.xaxis, FixedLocator([float(length) for length in lengths]))
    axes.tick_params(axis="x", labelrotation=45 if len(lengths) > MANY_TICKS else 0)
    axes.tick_params(axis="y", labelleft=True)
    axes.set_xlim(lengths[0] / EDGE, lengths[-1] * EDGE)
    axes.set_xlabel(X_LABELS[group.panel.axis])
    axes.set_title("\n".join(textwrap.wrap(group.title, TITLE_LEN)), loc="left")


def _draw_line(
    axes: Axes, arm: Arm, points: tuple[list[float], list[float]], ends: Sequence[Sequence[float | None]]
) -> None:
    """Draw a line with its markers, and bars to the lower and upper ends that are known."""
    look = style.look(arm)
    order = 4 - look.width / 5
    bars = [
        [0.0 if end is None else abs(value - end) for value, end in zip(points[1], side, strict=True)] for side in ends
    ]
    marker: dict[str, Any] = {"marker": look.marker, "ms": look.size, "mec": "white", "mew": 0.6}
    bar: dict[str, Any] = {"fmt": "none", "ecolor": look.colour, "elinewidth": 1.1, "capsize": 2.2}
    axes.plot(*points, color=look.colour, linestyle=look.line, linewidth=look.width, alpha=0.8, zorder=order)
    if any(map(any, bars)):
        axes.errorbar(*points, yerr=bars, zorder=order + 1, **bar)
    axes.plot(*points, linestyle="", color=look.colour, zorder=order + 2, **marker)


def _scale(axes: Axes, values: Sequence[float], unit: str) -> None:
    """Put ticks on the vertical axis; no interval takes more room than all points."""
    if unit == "bytes":
        axes.set_yscale("log", base=2)
        style.ticks(axes.yaxis, LogLocator(base=4, numticks=12), lambda value: show(value, unit, digits=1))
        return
    axes.set_yscale("log", base=10)
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bottom, min(values) / LONG), min(top, max(values) * LONG))
    style.log_ticks(axes.yaxis, unit)


def _label(axes: Axes, group: Group, quantity: Quantity) -> None:
    """Name the lines at their ends, in their colours, moved apart to avoid overlaps."""
    low, high = map(math.log, axes.get_ylim())
    last = sorted(((group.lines[arm][-1], arm) for arm in group.labelled), key=lambda end: end[0][quantity.column])
    heights = [(math.log(row[quantity.column]) - low) / (high - low) for row, _ in last]
    for (row, arm), place in zip(last, apart(heights, LABEL_HEIGHT), strict=True):
        end = row[group.panel.axis]
        short = "" if end >= group.panel.lengths[-1] else f" (to {end})"
        ink = style.readable(style.look(arm).colour, style.LIGHT)
        text = f"{style.label(arm)}{short}"
        axes.text(1.02, place, text, color=ink, va="center", fontsize=8.5, transform=axes.transAxes)


def apart(places: Sequence[float], least: float) -> list[float]:
    """Move ascending places up to be at least `least` apart, and then down as far as needed to stay below 1."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + least if moved else least / 2))
    top = 1 - least / 2
    for number in reversed(range(len(moved))):
        moved[number] = min(moved[number], top)
        top = moved[number] - least
    return moved


REPORT = {
    "latency_plot": Report(
        summary="time against length, with intervals",
        files=("latency_plot.svg", "latency_plot.png"),
        draw=lambda results: draw(results, TIME),
    ),
    "memory_plot": Report(
        summary="peak memory against length",
        files=("memory_plot.svg", "memory_plot.png"),
        draw=lambda results: draw(results, MEMORY),
    ),
}
