"""Line plots: a panel for each group, values with intervals, and names at the ends of lines.

Used for time and memory against length, growth of memory, and histories, each with its own points.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter

from attnbench.reports import Picture, style
from attnbench.storage.records import Arm
from attnbench.units import show

MOST_PANELS, MOST_LINES = 6, 6
LABEL_HEIGHT, GREY = 0.07, "#c4c4c4"
"""Least distance of labels, as a share of the panel's height; lines without a label are grey."""
LONG = 4.0
"""Intervals may reach beyond all points by this factor; longer ones are cut."""
WIDE = 5.0
"""Values that span more than this factor get a logarithmic axis."""
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
    is_hollow: bool = False
    is_ringed: bool = False


@dataclass(frozen=True, kw_only=True)
class Line:
    """The points of one arm, from left to right; `label` follows its name, and `curve` is drawn dashed."""

    arm: Arm
    points: Sequence[Point]
    label: str = ""
    curve: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines over one horizontal axis; `ticks` maps its values to texts."""

    title: str
    lines: Sequence[Line]
    x_label: str
    ticks: Mapping[float, str]
    is_log: bool = True
    draw_more: Callable[[Axes], None] = field(default=lambda _: None)


def plot(  # noqa: PLR0913 - one parameter for each text
    panels: Sequence[Panel], *, title: str, y_label: str, unit: str, subtitle: str = "", note: str = "", base: str = ""
) -> Picture:
    """Draw the first six panels; `base` names the arm that is labelled in each of them."""
    drawn = panels[:MOST_PANELS]
    named = {panel.title: labelled(panel.lines, base) for panel in drawn}
    points = [point for panel in drawn for line in panel.lines for point in line.points]
    limits = reach(points)
    notes = [note] if note else []
    if any(point.low is not None for point in points):
        notes.append("Bars are 95 % intervals over processes.")
    if limits is not None:
        notes.append("A bar that leaves the picture goes on.")
    colourless = {line.arm for panel in drawn for line in panel.lines if line.arm not in named[panel.title]}
    if grey := sorted(style.label(arm) for arm in colourless.difference(*named.values())):
        notes.append(f"Grey, and close to one of the others: {', '.join(grey)}.")
    if len(panels) > MOST_PANELS:
        notes.append(f"{len(panels) - MOST_PANELS} more groups have their numbers in records.csv.")
    num_columns = min(len(drawn), 3 if len(drawn) != 4 else 2)  # noqa: PLR2004 - four panels make a square

    def fill(axes: Axes, panel: Panel) -> None:
        _draw_panel(axes, panel, named[panel.title])
        axes.set_ylabel("" if drawn.index(panel) % num_columns else y_label)

    def finish(axes: Axes, panel: Panel) -> None:
        if limits is not None:
            axes.set_ylim(*limits)
        _scale(axes, points, unit)
        panel.draw_more(axes)
        _label(axes, panel, named[panel.title])

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


def reach(points: Sequence[Point]) -> tuple[float, float] | None:
    """Limits of the vertical axis if a long interval would dwarf all points; else None."""
    low, high = min(point.y for point in points) / LONG, max(point.y for point in points) * LONG
    ends = [end for point in points for end in (point.low, point.high) if end is not None]
    if not ends or low <= 0 or (min(ends) >= low and max(ends) <= high):
        return None
    return max(min(ends), low), min(max(ends), high)


def _draw_panel(axes: Axes, panel: Panel, named: Sequence[Arm]) -> None:
    if panel.is_log:
        axes.set_xscale("log", base=2)
    for line in panel.lines:
        _draw_line(axes, line, is_named=line.arm in named)
    style.ticks(axes.xaxis, FixedLocator(list(panel.ticks)), lambda value: panel.ticks.get(value, ""))
    axes.tick_params(axis="x", labelrotation=45 if len(panel.ticks) > MANY_TICKS else 0)
    axes.tick_params(axis="y", labelleft=True)
    low, high = min(panel.ticks), max([*panel.ticks, *(x for line in panel.lines for x, _ in line.curve[-1:])])
    axes.set_xlim(*((low / EDGE, high * EDGE) if panel.is_log else (low - 0.5, high + 0.5)))
    axes.set_xlabel(panel.x_label)
    axes.set_title("\n".join(textwrap.wrap(panel.title, TITLE_LEN)), loc="left")


def _draw_line(axes: Axes, line: Line, *, is_named: bool) -> None:
    x, y = [point.x for point in line.points], [point.y for point in line.points]
    if not is_named:
        axes.plot(x, y, color=GREY, linewidth=1.2, marker=".", zorder=1.8)
        return
    look = style.look(line.arm)
    order = 4 - look.width / 5
    axes.plot(x, y, color=look.colour, linestyle=look.line, linewidth=look.width, alpha=0.8, zorder=order)
    if line.curve:
        curve_x, curve_y = zip(*line.curve, strict=True)
        axes.plot(curve_x, curve_y, color=look.colour, linestyle=(0, (4, 3)), linewidth=1.2, zorder=1.5)
    for point in line.points:
        ends = [0.0 if end is None else abs(point.y - end) for end in (point.low, point.high)]
        bar: dict[str, Any] = {"ecolor": look.colour, "elinewidth": 1.1, "capsize": 2.2, "zorder": order + 1}
        if any(ends):
            axes.errorbar([point.x], [point.y], yerr=[ends[:1], ends[1:]], fmt="none", **bar)
        face, edge, edge_width = ("white", look.colour, 1.3) if point.is_hollow else (look.colour, "white", 0.6)
        marker: dict[str, Any] = {"marker": look.marker, "mfc": face, "mec": edge, "mew": edge_width, "ms": look.size}
        axes.plot([point.x], [point.y], linestyle="", zorder=order + 2, **marker)
        if point.is_ringed:
            axes.plot([point.x], [point.y], "o", ms=13, mfc="none", mec=style.INK, mew=1.4, zorder=order + 2)


def _scale(axes: Axes, points: Sequence[Point], unit: str) -> None:
    values = [point.y for point in points]
    if unit == "bytes":
        style.byte_ticks(axes)
    elif 0 < min(values) < max(values) / WIDE or unit == "s":
        axes.set_yscale("log", base=10)
        style.log_ticks(axes.yaxis, unit)
    else:
        middle, half = (max(values) + min(values)) / 2, (max(values) - min(values)) / 2
        half = max(1.15 * half, 0.1 * middle)  # keep small changes small
        axes.set_ylim(middle - half, middle + half)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value, unit)))


def _label(axes: Axes, panel: Panel, named: Sequence[Arm]) -> None:
    """Name the lines at their ends, in their colours, moved apart to avoid overlaps."""
    scale: Callable[[float], float] = math.log if axes.get_yscale() == "log" else float
    low, high = map(scale, axes.get_ylim())
    lines = sorted((line for line in panel.lines if line.arm in named), key=lambda line: line.points[-1].y)
    heights = [(scale(line.points[-1].y) - low) / (high - low) for line in lines]
    for line, place in zip(lines, apart(heights, LABEL_HEIGHT), strict=True):
        end = line.points[-1].x
        short = "" if end >= max(panel.ticks) else f" (to {panel.ticks.get(end, '')})"
        ink = style.readable(style.look(line.arm).colour, style.LIGHT)
        text = f"{style.label(line.arm)}{line.label}{short}"
        axes.text(1.02, place, text, color=ink, va="center", fontsize=8.5, transform=axes.transAxes)


def apart(places: Sequence[float], least: float) -> list[float]:
    """Move ascending places as little as possible to be at least `least` apart, the last one below 1."""
    groups: list[list[float]] = []  # touching neighbours: each group is centred on the mean of its members
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _ends(groups[-2], least)[1] + least > _ends(groups[-1], least)[0]:
            last = groups.pop()
            groups[-1] += last
    return [_ends(group, least)[0] + number * least for group in groups for number in range(len(group))]


def _ends(group: Sequence[float], least: float) -> tuple[float, float]:
    """The first and the last place of a group, inside the axes if its labels fit."""
    half, room = (len(group) - 1) * least / 2, len(group) * least / 2
    middle = min(max(sum(group) / len(group), room), 1.0 - room)
    return middle - half, middle + half
