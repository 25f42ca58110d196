"""What the pictures over length share: a panel for each workload group, lines, a legend, a note on what is missing."""

import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from harness.records import Workload
from harness.reports import Picture, style, words
from harness.reports.table import Row, rows
from harness.stats import growth_exponent
from harness.store import Results
from harness.units import show

PANELS_A_PAGE = 6
SPREAD = 0.3
"""How far apart, as a share of the gap between two lengths, points of one length are drawn where that misleads nobody:
a steep line must stay where it is, a flat one or a lone column of points may move sideways."""
MANY_LENGTHS = 7
FEW_DECADES = 2.5


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value over one length with its interval; hollow where it is less than it seems."""

    length: int
    value: float
    low: float | None = None
    high: float | None = None
    is_hollow: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """The rows of one workload group that differ in one length only."""

    title: str
    axis: str  # seq_len or kv_len
    rows: tuple[Row, ...]

    def length(self, workload: Workload) -> int:
        """Where a workload stands on the horizontal axis."""
        return workload.seq_len if self.axis == "seq_len" else workload.kv_len

    @property
    def lengths(self) -> list[int]:
        """All the lengths of the panel, measured or not."""
        return sorted({self.length(row.workload) for row in self.rows})


@dataclass(frozen=True, kw_only=True)
class Plot:
    """What one kind of picture adds: which number of a row it shows, how, and what else is drawn."""

    title: str
    y_label: str
    point: Callable[[Row, int], Point | None]
    finish: Callable[[Axes, Panel], None]
    hollow: str  # what a hollow marker says
    absent: str  # why an ok row may have no point
    is_steep: bool = True  # values grow with length: lines stay in place, and their growth is told
    is_absence_told: Callable[[Row], bool] = lambda _: True


def draw(results: Results, plot: Plot) -> list[Picture]:
    """The pictures of a run, at most six panels each; none where no row has a value."""
    panels = [panel for panel in _panels(rows(results)) if _series(plot, [panel])]
    pages = [panels[start : start + PANELS_A_PAGE] for start in range(0, len(panels), PANELS_A_PAGE)]
    return [_picture(plot, page) for page in pages]


def log_ticks(axis: Axis, unit: str) -> None:
    """Ticks at 1, 2, 5 of each decade, or at decades where there are many, with units: "500 us"."""
    low, high = axis.get_view_interval()
    few = math.log10(high / low) <= FEW_DECADES
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: show(value, unit, digits=1)))
    axis.set_minor_locator(NullLocator())


def _panels(table: Iterable[Row]) -> list[Panel]:
    found: dict[tuple[str, str, int], list[Row]] = {}
    grouped: dict[str, list[Row]] = {}
    for row in table:
        grouped.setdefault(row.group, []).append(row)
    for group, members in grouped.items():
        queries, keys = ({getattr(row.workload, axis) for row in members} for axis in words.LENGTHS)
        is_decoding = len(queries) == 1 < len(keys)
        for row in members:
            fixed = row.workload.seq_len if is_decoding else row.workload.kv_len
            if not is_decoding and row.workload.kv_len == row.workload.seq_len:
                fixed = 0
            found.setdefault((group, "kv_len" if is_decoding else "seq_len", fixed), []).append(row)
    axes = words.varying_axes(row.workload for members in grouped.values() for row in members)
    return [
        Panel(title=_title(members[0].workload, axes, axis, fixed), axis=axis, rows=tuple(members))
        for (_, axis, fixed), members in found.items()
    ]


def _title(workload: Workload, axes: set[str], axis: str, fixed: int) -> str:
    other = f"{'T' if axis == 'kv_len' else 'S'}={fixed}" if fixed else ""
    return " · ".join(part for part in (words.varying(workload, axes), other) if part)


def _series(plot: Plot, panels: list[Panel]) -> dict[str, list[list[Point]]]:
    """For each implementation with any value, its points in each panel; the largest last values first."""
    names = dict.fromkeys(row.implementation for panel in panels for row in panel.rows)
    found = {name: [_points(plot, panel, name) for panel in panels] for name in names}
    last = {name: max((line[-1].value for line in lines if line), default=0.0) for name, lines in found.items()}
    return {name: found[name] for name in sorted(names, key=lambda name: -last[name]) if any(found[name])}


def _points(plot: Plot, panel: Panel, name: str) -> list[Point]:
    mine = [row for row in panel.rows if row.implementation == name]
    points = [plot.point(row, panel.length(row.workload)) for row in mine]
    return sorted((point for point in points if point is not None), key=lambda point: point.length)


def _picture(plot: Plot, panels: list[Panel]) -> Picture:
    series = _series(plot, panels)
    num_columns = min(len(panels), 3 if len(panels) != 4 else 2)  # noqa: PLR2004 - four panels make a square
    num_rows = math.ceil(len(panels) / num_columns)
    width = 1.2 + 3.9 * num_columns + 2.4
    shared = words.shared(row.workload for panel in panels for row in panel.rows)
    notes = _notes(plot, panels, series)
    wrapped = textwrap.wrap(notes, int(width * 17.5))
    with mpl.rc_context(style.SETTINGS):
        figure = Figure(figsize=(width, 1.0 + 3.2 * num_rows + 0.17 * len(wrapped)), layout="constrained")
        grid = figure.subplots(num_rows, num_columns, squeeze=False, sharey=len(panels) > 1).ravel()
        for place, (axes, panel) in enumerate(zip(grid, panels, strict=False)):
            _draw_panel(axes, plot, panel, {name: lines[place] for name, lines in series.items()})
            axes.set_ylabel("" if place % num_columns else plot.y_label)
        for axes, panel in zip(grid, panels, strict=False):  # once all values are in: panels share their scale
            plot.finish(axes, panel)
        for axes in grid[len(panels) :]:
            axes.remove()
        _legend(figure, plot, panels, series)
        figure.suptitle(f"{plot.title}\n{shared}", x=0.01, ha="left", fontsize=11.5)
        figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=8, color="#555555")
    return style.picture(figure, plot.title, f"{plot.title}: {shared}. {notes}")


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
    axes.set_title(panel.title, loc="left")


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


def _legend(figure: Figure, plot: Plot, panels: list[Panel], series: dict[str, list[list[Point]]]) -> None:
    handles = []
    letter = _letter(panels)
    for name, lines in series.items():
        seen = style.look(name)
        growth = _growth(lines) if plot.is_steep else ""
        text = style.label(name) + (f"  ~{letter}^{growth}" if growth else "")
        handles.append(Line2D([], [], label=text, mec="white", mew=0.6, **seen.options))
    drawn: dict[str, Line2D] = {}
    for axes in figure.axes:
        drawn |= {str(line.get_label()): line for line in axes.lines if not str(line.get_label()).startswith("_")}
    figure.legend(handles=[*handles, *drawn.values()], loc="outside right upper", handlelength=3.2)


def _letter(panels: list[Panel]) -> str:
    return "S" if all(panel.axis == "kv_len" for panel in panels) else "T"


def _growth(lines: list[list[Point]]) -> str:
    """The growth exponent over length, as a range where panels differ: "1.6 to 1.8"."""
    found = [growth_exponent([p.length for p in line], [p.value for p in line]) for line in lines]
    told = sorted({f"{exponent:.1f}" for exponent in found if exponent is not None}, key=float)
    return " to ".join(dict.fromkeys((told[0], told[-1]))) if told else ""


def _notes(plot: Plot, panels: list[Panel], series: dict[str, list[list[Point]]]) -> str:
    """What the picture does not show and why, and how to read what it does."""
    told = _absences(plot, panels)
    notes = [f"Not shown: {'; '.join(told).rstrip('.')}."] if told else []
    if any(point.low is not None for lines in series.values() for line in lines for point in line):
        notes.append("Bars are 95 % intervals over visits.")
    if any(point.is_hollow for lines in series.values() for line in lines for point in line):
        notes.append(f"Hollow: {plot.hollow}.")
    if len(series) > 1 and (not plot.is_steep or any(len(panel.lengths) == 1 for panel in panels)):
        notes.append("Points of one length are set side by side so that none hides another.")
    if plot.is_steep and any(_growth(lines) for lines in series.values()):
        notes.append(f"~{_letter(panels)}^x: growth with length, a least-squares slope.")
    return " ".join(notes)


def _absences(plot: Plot, panels: list[Panel]) -> list[str]:
    """Each implementation that misses points: where and why, told once for all panels that share it."""
    missing: dict[tuple[str, str], dict[str, list[int]]] = {}
    for panel in panels:
        for row in panel.rows:
            length = panel.length(row.workload)
            if plot.point(row, length) is None and plot.is_absence_told(row):
                places = missing.setdefault((row.implementation, _why(plot, row)), {})
                places.setdefault(panel.title, []).append(length)
    lengths = {panel.title: panel.lengths for panel in panels}
    return [f"{style.label(name)}{_where(places, lengths)}: {why}" for (name, why), places in missing.items()]


def _why(plot: Plot, row: Row) -> str:
    status = row.cells["status"]
    if status == "ok":
        return plot.absent
    reason = words.plain(row.message, limit=64)
    return f"{status}, {reason}" if reason else status


def _where(places: dict[str, list[int]], lengths: dict[str, list[int]]) -> str:
    at = {", ".join(map(str, found)) if found != lengths[title] else "" for title, found in places.items()}
    where = f" at {at.pop()}" if len(at) == 1 and at != {""} else ""
    if len(places) < len(lengths):
        where += f" in {' and '.join(places)}"
    return where
