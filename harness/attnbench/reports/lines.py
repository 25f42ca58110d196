"""Panels of lines over length as figures: dots with intervals, rings where they coincide, a legend outside."""

import math
import textwrap
from collections.abc import Iterable

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from attnbench.analysis.results import Results
from attnbench.reports import Picture, style, words
from attnbench.reports.panels import (
    Panel,
    Plot,
    Point,
    Series,
    growth,
    length_letter,
    notes,
    panels_of,
    reach,
    series_of,
    titled,
)
from attnbench.reports.table import shown
from attnbench.units import show

PANELS_A_PAGE = 6
SPREAD = 0.3
"""How far apart, as a share of the gap between two lengths, points of one length are drawn where that misleads nobody:
a steep line must stay where it is, a flat one or a lone column of points may move sideways."""
MANY_LENGTHS = 7
FEW_DECADES = 2.5
TITLE_LEN = 48


def draw(results: Results, plot: Plot) -> list[Picture]:
    """The pictures of a run, at most six panels each; none where no row has a value."""
    found = panels_of(shown(results))
    panels = [panel for panel in found if series_of(plot, [panel])]
    empty = [panel.rows[0].group for panel in found if panel not in panels]
    pages = [panels[start : start + PANELS_A_PAGE] for start in range(0, len(panels), PANELS_A_PAGE)]
    return [_picture(plot, titled(page), empty if page is pages[-1] else ()) for page in pages]


def log_ticks(axis: Axis, unit: str) -> None:
    """Ticks at 1, 2, 5 of each decade, or at decades where there are many, with units: "500 us"."""
    low, high = axis.get_view_interval()
    few = math.log10(high / low) <= FEW_DECADES
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: show(value, unit, digits=1)))
    axis.set_minor_locator(NullLocator())


def _picture(plot: Plot, panels: list[Panel], empty: Iterable[str]) -> Picture:
    series = series_of(plot, panels)
    num_columns = min(len(panels), 3 if len(panels) != 4 else 2)  # noqa: PLR2004 - four panels make a square
    num_rows = math.ceil(len(panels) / num_columns)
    width = 1.2 + 3.9 * num_columns + 2.4
    shared = words.shared(row.workload for panel in panels for row in panel.rows)
    told = " ".join([notes(plot, panels, series), *(f"No panel, for want of any value: {group}." for group in empty)])
    wrapped = textwrap.wrap(told, int(width * 16.5))
    with mpl.rc_context(style.SETTINGS):
        figure = Figure(figsize=(width, 1.0 + 3.2 * num_rows + 0.17 * len(wrapped)), layout="constrained")
        grid = figure.subplots(num_rows, num_columns, squeeze=False, sharey=len(panels) > 1).ravel()
        for place, (axes, panel) in enumerate(zip(grid, panels, strict=False)):
            _draw_panel(axes, plot, panel, {name: lines[place] for name, lines in series.items()})
            axes.set_ylabel("" if place % num_columns else plot.y_label)
        limits = reach(series)
        if limits is not None:
            grid[0].set_ylim(*limits)
        for axes, panel in zip(grid, panels, strict=False):  # once all values are in: panels share their scale
            plot.finish(axes, panel)
        for axes in grid[len(panels) :]:
            axes.remove()
        _legend(figure, plot, panels, series)
        figure.suptitle(f"{plot.title}\n{shared}", x=0.01, ha="left", fontsize=11.5)
        figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=8, color="#555555")
    return style.picture(figure, plot.title, f"{plot.title}: {shared}. {told}")


def _draw_panel(axes: Axes, plot: Plot, panel: Panel, series: dict[str, list[Point]]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    gap = min((math.log(b / a) for a, b in zip(panel.lengths, panel.lengths[1:], strict=False)), default=2.0)
    spread = gap * SPREAD * (not plot.is_steep or len(panel.lengths) == 1)
    for place, (name, points) in enumerate(series.items()):
        if points:
            _draw_line(axes, name, points, math.exp(spread * ((place + 0.5) / len(series) - 0.5)))
    axes.xaxis.set_major_locator(FixedLocator(panel.lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.tick_params(axis="x", labelrotation=45 if len(panel.lengths) > MANY_LENGTHS else 0)
    axes.tick_params(axis="y", labelleft=True)
    edge = math.exp(0.25 * gap)
    axes.set_xlim(panel.lengths[0] / edge, panel.lengths[-1] * edge)
    axes.set_xlabel("sequence length T" if panel.axis == "seq_len" else "key length S")
    axes.set_title("\n".join(textwrap.wrap(panel.title, TITLE_LEN)), loc="left")


def _draw_line(axes: Axes, name: str, points: list[Point], shift: float) -> None:
    seen = style.look(name)
    x = [point.length * shift for point in points]
    down = [0.0 if point.low is None else point.value - point.low for point in points]
    up = [0.0 if point.high is None else point.high - point.value for point in points]
    y = [point.value for point in points]
    order = 4 - seen.width / 5
    axes.plot(x, y, color=seen.colour, linestyle=seen.line, linewidth=seen.width, alpha=0.8, zorder=order)
    axes.errorbar(x, y, yerr=[down, up], fmt="none", ecolor=seen.colour, elinewidth=1.1, capsize=2.2, zorder=order + 1)
    for point, place in zip(points, x, strict=True):
        _marker(axes, seen, place, point, order + 2)


def _marker(axes: Axes, seen: style.Look, x: float, point: Point, order: float) -> None:
    face, edge = ("white", seen.colour) if point.is_hollow else (seen.colour, "white")
    width = 1.3 if point.is_hollow else 0.6
    axes.plot(x, point.value, marker=seen.marker, ms=seen.size, mfc=face, mec=edge, mew=width, zorder=order)


def _legend(figure: Figure, plot: Plot, panels: list[Panel], series: Series) -> None:
    handles = []
    letter = length_letter(panels)
    for name, lines in series.items():
        seen = style.look(name)
        power = growth(lines) if plot.is_steep else ""
        text = style.label(name) + (f"  ~{letter}^{power}" if power else "")
        handles.append(Line2D([], [], label=text, mec="white", mew=0.6, **seen.options))
    drawn: dict[str, Line2D] = {}
    for axes in figure.axes:
        drawn |= {str(line.get_label()): line for line in axes.lines if not str(line.get_label()).startswith("_")}
    figure.legend(handles=[*handles, *drawn.values()], loc="outside right upper", handlelength=3.2)
