"""Series as pictures: a panel for each workload, runs from left to right, a mark where a level changed."""

import math
import textwrap
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from attnbench.analysis.history.series import LATENCY, RATIO, Point, Series
from attnbench.analysis.history.told import commit, day, machines, title
from attnbench.reports import Picture, style
from attnbench.reports.lines import log_ticks
from attnbench.reports.words import length
from attnbench.reports.words import title as workload_title
from attnbench.units import show

PANELS_A_PAGE = 6
MOST_TICKS = 6
NAMES = {RATIO: "ratio to the baseline's time", LATENCY: "time per call"}
WIDE = 5.0
"""Values further apart than this many times stand on a logarithmic axis."""


def pictures(series: Sequence[Series]) -> list[Picture]:
    """At most six panels each; those of one machine together."""
    found = []
    for rows in machines(series).values():
        panels: dict[str, list[Series]] = {}
        for each in rows:
            panels.setdefault(each.workload.id, []).append(each)
        every = list(panels.values())
        pages = [every[start : start + PANELS_A_PAGE] for start in range(0, len(every), PANELS_A_PAGE)]
        found += [_picture(page) for page in pages]
    return found


def _picture(panels: list[list[Series]]) -> Picture:
    first = panels[0][0]
    name = NAMES.get(first.metric, first.metric.replace("_", " "))
    num_columns = min(2, len(panels))
    num_rows = math.ceil(len(panels) / num_columns)
    heading = f"{name[0].upper()}{name[1:]}, run by run\n{title(panels[0])}"
    note = "Each point is a run, with its 95 % interval where it has one. A ring is the first run at a new level."
    with mpl.rc_context(style.SETTINGS):
        figure = Figure(figsize=(2.6 + 4.6 * num_columns, 1.2 + 3.0 * num_rows), layout="constrained")
        grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
        for axes, rows in zip(grid, panels, strict=False):
            _panel(axes, rows, name)
        for axes in grid[len(panels) :]:
            axes.remove()
        names = dict.fromkeys(each.implementation for rows in panels for each in rows)
        handles = [
            Line2D([], [], label=style.label(name), mec="white", mew=0.6, **style.look(name).options) for name in names
        ]
        figure.legend(handles=handles, loc="outside right upper", handlelength=3.2)
        figure.suptitle(heading, x=0.01, ha="left", fontsize=11.5)
        figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color="#555555")
    return style.picture(figure, heading.partition("\n")[0], f"{heading}. {note}")


def _panel(axes: Axes, rows: list[Series], name: str) -> None:
    found: dict[tuple[str, str], list[Point]] = {}
    for point in (point for each in rows for point in each.points):
        found.setdefault((point.time, point.run), []).append(point)
    runs = sorted(found.items())
    place = {run: number for number, ((_, run), _) in enumerate(runs)}
    for each in rows:
        _line(axes, each, [place[point.run] for point in each.points])
    values = [point.value for each in rows for point in each.points]
    if 0 < min(values) < max(values) / WIDE:
        axes.set_yscale("log")
        log_ticks(axes.yaxis, rows[0].unit)
    else:
        middle, half = (max(values) + min(values)) / 2, (max(values) - min(values)) / 2
        half = max(1.15 * half, 0.1 * middle)  # so that what hardly moves is not blown up
        axes.set_ylim(middle - half, middle + half)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value, rows[0].unit)))
    ticks = sorted({round(step * (len(runs) - 1) / (MOST_TICKS - 1)) for step in range(MOST_TICKS)})
    axes.set_xticks(ticks, [_label(runs[tick][1]) for tick in ticks], fontsize=8)
    axes.set_xlim(-0.5, len(runs) - 0.5)
    axes.set_xlabel("commit and day of the run")
    axes.set_ylabel(name)
    told = f"{workload_title(rows[0].workload)}, T={length(rows[0].workload)}"
    axes.set_title("\n".join(textwrap.wrap(told, 52)), loc="left")


def _label(points: Sequence[Point]) -> str:
    """The commit of a run, of each side where it compared two, and its day."""
    return "\n".join([*dict.fromkeys(commit(point)[:7] for point in points), day(points[0])[5:]])


def _line(axes: Axes, series: Series, places: list[int]) -> None:
    seen = style.look(series.implementation)
    values = [point.value for point in series.points]
    down = [0.0 if p.low is None else p.value - p.low for p in series.points]
    up = [0.0 if p.high is None else p.high - p.value for p in series.points]
    axes.plot(places, values, color=seen.colour, linestyle=seen.line, linewidth=min(seen.width, 2.0), alpha=0.7)
    axes.errorbar(places, values, yerr=[down, up], fmt="none", ecolor=seen.colour, elinewidth=1.0, capsize=2.0)
    axes.plot(places, values, linestyle="", marker=seen.marker, ms=5.5, mfc=seen.colour, mec="white", mew=0.5)
    rings = [found.place for found in series.changes]
    axes.plot([places[r] for r in rings], [values[r] for r in rings], "o", ms=13, mfc="none", mec=style.INK, mew=1.4)
