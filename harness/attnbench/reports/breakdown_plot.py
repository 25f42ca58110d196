"""What the time of a call went into: a stacked bar by kind of operator for each implementation of a workload."""

import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from attnbench.analysis.breakdown import ran, times
from attnbench.analysis.cached import once
from attnbench.analysis.results import Results
from attnbench.reports import Picture, Report, style, words
from attnbench.reports.panels import Panel, Plot, Point, notes, titled
from attnbench.reports.table import Row, shown
from attnbench.storage.operator_kinds import PAGE_FAULTS
from attnbench.units import show, significant

PANELS_A_PAGE = 8
BAR_INCHES = 0.26
NOTE = (
    "Shares of one profiled call, operators' own time; page faults (hatched) are an estimate: their number times what "
    "one costs, taken from the kinds that asked for memory. Right of a bar: the time of an unprofiled call, its ratio "
    "to the fastest, and what ran."
)


def shares(row: Row) -> dict[str, float]:
    """The share of each kind in the time of a call, in the order of style.KINDS; empty where nothing is known."""
    if row.operators is None or row.cells["status"] != "ok":
        return {}
    call_s = sum(one.self_s for one in row.operators.calls) if row.time is None else row.time.point
    found = times(row.operators, call_s)
    return {kind: found[kind] / call_s for kind in style.KINDS if found.get(kind)}


def _point(row: Row, length: int) -> Point | None:
    return Point(length=length, value=1.0) if shares(row) else None


def _finish(axes: Axes, panel: Panel) -> None:
    """Nothing is drawn over length here."""


PLOT = Plot(
    title="What the time of a call went into, by kind of operator",
    y_label="",
    point=_point,
    finish=_finish,
    hollow="",
    absent="what ran was not seen",
    is_steep=False,
)


def panels_of(table: Iterable[Row]) -> list[Panel]:
    """One panel for each workload with a bar, and with the rows that have none, for the note."""
    found: dict[str, list[Row]] = {}
    for row in table:
        found.setdefault(row.workload.id, []).append(row)
    return [
        Panel(axis="seq_len", other=f"length {words.length(members[0].workload)}", rows=tuple(members))
        for members in found.values()
        if any(shares(row) for row in members)
    ]


@once
def pictures(results: Results) -> list[Picture]:
    """One panel for each workload, at most eight on a picture."""
    panels = panels_of(shown(results))
    pages = [panels[start : start + PANELS_A_PAGE] for start in range(0, len(panels), PANELS_A_PAGE)]
    return [_picture(titled(page)) for page in pages]


def _picture(panels: list[Panel]) -> Picture:
    num_columns = min(len(panels), 2)
    heights = [max(_num_bars(panel) for panel in panels[at : at + num_columns]) for at in _starts(panels, num_columns)]
    shared = words.shared(row.workload for panel in panels for row in panel.rows)
    told = f"{NOTE} {notes(PLOT, panels, {})}".strip()
    width = 1.6 + 5.4 * num_columns
    wrapped = textwrap.wrap(told, int(width * 16.5))
    inches = [1.0 + BAR_INCHES * height for height in heights]
    with mpl.rc_context(style.SETTINGS):
        figure = Figure(figsize=(width, 0.7 + sum(inches) + 0.17 * len(wrapped)), layout="constrained")
        grid = figure.subplots(len(heights), num_columns, squeeze=False, height_ratios=inches).ravel()
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel)
        for axes in grid[len(panels) :]:
            axes.remove()
        present = {kind for panel in panels for row in panel.rows for kind in shares(row)}
        handles = [Patch(label=_label(kind), **_fill(kind)) for kind in style.KINDS if kind in present]
        figure.legend(handles=handles, loc="outside right upper", title="kind of operator", alignment="left")
        figure.suptitle(f"{PLOT.title}\n{shared}", x=0.01, ha="left", fontsize=11.5)
        figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=8, color="#555555")
    return style.picture(figure, PLOT.title, f"{PLOT.title}: {shared}. {told}")


def _starts(panels: list[Panel], num_columns: int) -> list[int]:
    return [row * num_columns for row in range(math.ceil(len(panels) / num_columns))]


def _num_bars(panel: Panel) -> int:
    return sum(bool(shares(row)) for row in panel.rows)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    drawn = [row for row in panel.rows if shares(row)]
    fastest = min((row.cost_s for row in drawn if row.time is not None), default=0.0)
    for place, row in enumerate(drawn):
        left = 0.0
        for kind, share in shares(row).items():
            axes.barh(place, share, left=left, height=0.76, linewidth=0.4, **_fill(kind))
            left += share
        axes.text(1.015, place, _beside(row, fastest), va="center", fontsize=8)
    axes.set_yticks(range(len(drawn)), [style.label(row.implementation) for row in drawn])
    axes.set_ylim(len(drawn) - 0.4, -0.6)  # the fastest on top
    axes.set_xlim(0, 1.42)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("share of the time of a call")
    axes.set_title("\n".join(textwrap.wrap(panel.title, 60)), loc="left")


def _beside(row: Row, fastest: float) -> str:
    """The time, its ratio to the fastest, and what ran."""
    kernel = "" if row.operators is None else words.plain(ran(row.operators), limit=26)
    if row.time is None:
        return f"not timed, {kernel}"
    return f"{show(row.time.point, 's')}, {significant(row.cost_s / fastest, 2)} x, {kernel}"


def _label(kind: str) -> str:
    return f"{kind} (estimate)" if kind == PAGE_FAULTS else kind


def _fill(kind: str) -> dict[str, Any]:
    return {"facecolor": style.KINDS[kind], "edgecolor": "white", "hatch": "////" if kind == PAGE_FAULTS else ""}


def write(results: Results, folder: Path) -> list[Path]:
    """Write breakdown_plot.svg and .png."""
    return style.save(pictures(results), folder, "breakdown_plot")


REPORT = Report(summary="what the time of a call went into, as SVG and PNG", write=write, draw=pictures)
