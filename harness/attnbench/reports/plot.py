"""Line plots: a panel for each group, values with intervals, and names at the ends of lines.

Used for time and memory against length, and for growth of memory.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, LogLocator

from attnbench.reports import Picture, style
from attnbench.storage.records import Arm
from attnbench.units import show

MOST_PANELS, MOST_LINES = 6, 6
LABEL_HEIGHT = 0.07
"""Least distance of labels, as a share of the panel's height."""
GREY, LIMIT = "#c4c4c4", "#AA3377"
"""Colours of lines without a label, and of a limit."""
LONG = 4.0
"""Intervals may reach beyond all points by this factor; longer ones are cut."""
MANY_TICKS, TITLE_LEN, EDGE = 7, 48, 1.2
LEAST_WIDTH = 7.2
"""Inches for the title and the legend next to it."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value with an optional 95 % interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """The points of one arm, from left to right; `curve` is drawn dashed."""

    arm: Arm
    points: Sequence[Point]
    curve: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines over one horizontal axis; `ticks` maps its values to texts."""

    title: str
    lines: Sequence[Line]
    x_label: str
    ticks: Mapping[float, str]
    limit: float = 0.0  # a horizontal line, if above 0


def plot(  # noqa: PLR0913 - one parameter for each text
    panels: Sequence[Panel], *, title: str, y_label: str, unit: str, subtitle: str = "", note: str = "", base: str = ""
) -> Picture:
    """Draw the first six panels; `base` names the arm that is labelled in each of them."""
    drawn = panels[:MOST_PANELS]
    labelled_arms = {panel.title: labelled(panel.lines, base) for panel in drawn}
    points = [point for panel in drawn for line in panel.lines for point in line.points]
    notes = [note] if note else []
    if any(point.low is not None for point in points):
        notes.append("Bars are 95 % intervals over processes.")
    colourless = {line.arm for panel in drawn for line in panel.lines if line.arm not in labelled_arms[panel.title]}
    if grey := sorted(style.label(arm) for arm in colourless.difference(*labelled_arms.values())):
        notes.append(f"Grey, and close to one of the others: {', '.join(grey)}.")
    if len(panels) > MOST_PANELS:
        notes.append(f"{len(panels) - MOST_PANELS} more groups have their numbers in records.csv.")
    num_columns = min(len(drawn), 3 if len(drawn) != 4 else 2)  # noqa: PLR2004 - four panels make a square

    def fill(axes: Axes, panel: Panel) -> None:
        _draw_panel(axes, panel, labelled_arms[panel.title])
        axes.set_ylabel("" if drawn.index(panel) % num_columns else y_label)

    def finish(axes: Axes, panel: Panel) -> None:
        _scale(axes, points, unit)
        if panel.limit:
            axes.axhline(panel.limit, color=LIMIT, linewidth=1.2, zorder=1)
        _label(axes, panel, labelled_arms[panel.title])

    return style.sheet(
        drawn,
        fill,
        (max(LEAST_WIDTH, 0.6 + 4.4 * num_columns), 1.0 + 3.2 * math.ceil(len(drawn) / num_columns)),
        title=title,
        subtitle=subtitle,
        note=" ".join(notes),
        num_columns=num_columns,
        finish=finish,
        sharey=len(drawn) > 1,
    )


def labelled(lines: Sequence[Line], base: str) -> list[Arm]:
    """Choose the arms with a colour and a label: the baseline, and those with the most distant ends."""
    ends = {line.arm: math.log(max(line.points[-1].y, 1e-300)) for line in lines}
    chosen = [arm for arm in ends if style.label(arm) == base][:1] or list(ends)[:1]
    while len(chosen) < min(MOST_LINES, len(ends)):
        others = [arm for arm in ends if arm not in chosen]
        chosen.append(max(others, key=lambda arm: min(abs(ends[arm] - ends[other]) for other in chosen)))
    return chosen


def _draw_panel(axes: Axes, panel: Panel, with_label: Sequence[Arm]) -> None:
    axes.set_xscale("log", base=2)
    for line in panel.lines:
        _draw_line(axes, line, has_label=line.arm in with_label)
    style.ticks(axes.xaxis, FixedLocator(list(panel.ticks)), lambda value: panel.ticks.get(value, ""))
    axes.tick_params(axis="x", labelrotation=45 if len(panel.ticks) > MANY_TICKS else 0)
    axes.tick_params(axis="y", labelleft=True)
    low, high = min(panel.ticks), max([*panel.ticks, *(x for line in panel.lines for x, _ in line.curve[-1:])])
    axes.set_xlim(low / EDGE, high * EDGE)
    axes.set_xlabel(panel.x_label)
    axes.set_title("\n".join(textwrap.wrap(panel.title, TITLE_LEN)), loc="left")


def _draw_line(axes: Axes, line: Line, *, has_label: bool) -> None:
    x, y = [point.x for point in line.points], [point.y for point in line.points]
    if not has_label:
        axes.plot(x, y, color=GREY, linewidth=1.2, marker=".", zorder=1.8)
        return
    look = style.look(line.arm)
    order = 4 - look.width / 5
    ends = [
        [0.0 if low is None else abs(value - low) for value, low in zip(y, lows, strict=True)]
        for lows in ([point.low for point in line.points], [point.high for point in line.points])
    ]
    marker: dict[str, Any] = {"marker": look.marker, "ms": look.size, "mec": "white", "mew": 0.6}
    bars: dict[str, Any] = {"fmt": "none", "ecolor": look.colour, "elinewidth": 1.1, "capsize": 2.2}
    axes.plot(x, y, color=look.colour, linestyle=look.line, linewidth=look.width, alpha=0.8, zorder=order)
    if any(map(any, ends)):
        axes.errorbar(x, y, yerr=ends, zorder=order + 1, **bars)
    axes.plot(x, y, linestyle="", color=look.colour, zorder=order + 2, **marker)
    if line.curve:
        axes.plot(*zip(*line.curve, strict=True), color=look.colour, linestyle=(0, (4, 3)), linewidth=1.2, zorder=1.5)


def _scale(axes: Axes, points: Sequence[Point], unit: str) -> None:
    """Put ticks on the vertical axis; no interval takes more room than all points."""
    if unit == "bytes":
        axes.set_yscale("log", base=2)
        style.ticks(axes.yaxis, LogLocator(base=4, numticks=12), lambda value: show(value, unit, digits=1))
        return
    axes.set_yscale("log", base=10)
    bottom, top = axes.get_ylim()
    values = [point.y for point in points]
    axes.set_ylim(max(bottom, min(values) / LONG), min(top, max(values) * LONG))
    style.log_ticks(axes.yaxis, unit)


def _label(axes: Axes, panel: Panel, with_label: Sequence[Arm]) -> None:
    """Name the lines at their ends, in their colours, moved apart to avoid overlaps."""
    low, high = map(math.log, axes.get_ylim())
    lines = sorted((line for line in panel.lines if line.arm in with_label), key=lambda line: line.points[-1].y)
    heights = [(math.log(line.points[-1].y) - low) / (high - low) for line in lines]
    for line, place in zip(lines, apart(heights, LABEL_HEIGHT), strict=True):
        end = line.points[-1].x
        short = "" if end >= max(panel.ticks) else f" (to {panel.ticks.get(end, '')})"
        ink = style.readable(style.look(line.arm).colour, style.LIGHT)
        text = f"{style.label(line.arm)}{short}"
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
