"""Dot plot of ratios to the baseline with intervals: a row for each implementation, a panel for each shape.

Colours show verdicts, and rows are sorted by overall speed. Source: W. S. Cleveland, dot plots, The American
Statistician 38, 1984, https://doi.org/10.1080/00031305.1984.10483223.
"""

import math
import textwrap
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator

from attnbench.analysis.conclusion import TIMED, Mark
from attnbench.analysis.results import Results
from attnbench.reports import Picture, Report, answers, cells, lines, style
from attnbench.reports.answers import Cell, Shape
from attnbench.units import plain, significant

MOST_SHAPES, MOST_COLUMNS = 12, 6
FURTHEST = 4.0
"""Largest factor on the axes; larger ratios are arrows with their number."""
NARROWEST = 1.25
ROW = 0.235
LEAST_WIDTH = 6.0
"""Inches for the title."""
COLOURS = {Mark.faster: "#0072B2", Mark.slower: "#D55E00", Mark.equal: "#555555"}
"""Colours of verdicts: blue and vermilion differ for every kind of colour vision, and the side of the line repeats
them."""
GREY, BAD = "#8a8a8a", "#B00020"
LEGEND = (
    "Dots are medians of paired ratios, bars their 95 % intervals; the number is the ratio. Blue is faster, orange "
    "slower, grey equal, and hollow undecided."
)
TITLE_LEN = 24


def draw(results: Results, most: int = MOST_SHAPES, row: float = ROW) -> Picture | None:
    """Draw the first `most` shapes of a run, each row `row` inches high; None if nothing was compared."""
    compared = [shape for shape in answers.shapes(results) if any(map(_has_ratio, shape.others))]
    shapes = compared[:most]
    if not shapes:
        return None
    names = order(shapes)
    reach = _reach(shapes)
    num_columns = min(len(shapes), MOST_COLUMNS if len(shapes) != 8 else 4)  # noqa: PLR2004 - two even rows
    num_rows = math.ceil(len(shapes) / num_columns)

    def fill(panel: Axes, shape: Shape) -> None:
        has_names = shapes.index(shape) % num_columns == 0
        _draw_shape(panel, shape, names, reach, has_names=has_names)

    left_out = len(compared) - len(shapes)
    more = f"{left_out} more shapes have their numbers in records.csv. " if left_out else ""
    is_doubtful = any(cell.mark is Mark.doubtful for shape in shapes for cell in shape.others)
    doubt = "Doubtful, the session was disturbed: see the summary. " if is_doubtful else ""
    return style.sheet(
        shapes,
        fill,
        (max(LEAST_WIDTH, 1.5 + 1.95 * num_columns), 1.25 + num_rows * (0.75 + row * len(names))),
        title=f"Which is faster: time as a ratio to {style.label(cells.base(results.plan))}, left of 1 is faster",
        subtitle=cells.shared([shape.workload.axes() for shape in shapes]),
        note=f"{doubt}{more}{LEGEND}",
        num_columns=num_columns,
    )


def order(shapes: Sequence[Shape]) -> list[str]:
    """The names with some ratio, the fastest overall first, the baseline among them."""
    logs: dict[str, list[float]] = {}
    for shape in shapes:
        for cell in shape.cells:
            if _has_ratio(cell) or cell is shape.base:
                logs.setdefault(cell.name, []).append(math.log(cell.ratio or 1.0))
    return sorted(logs, key=lambda name: (fmean(logs[name]), name))


def _has_ratio(cell: Cell) -> bool:
    return cell.mark in TIMED and (cell.ratio or 0.0) > 0


def _reach(shapes: Sequence[Shape]) -> float:
    """The factor at which all axes end, in both directions."""
    furthest = max(max(each.speedup, 1 / each.speedup) for shape in shapes for each in shape.others if _has_ratio(each))
    return min(FURTHEST, max(NARROWEST, 1.15 * furthest))


def _draw_shape(panel: Axes, shape: Shape, names: Sequence[str], reach: float, *, has_names: bool) -> None:
    panel.set_title("\n".join(textwrap.wrap(shape.name, TITLE_LEN)), loc="left", fontsize=9)
    panel.set_xscale("log", base=2)
    panel.set_xlim(1 / reach, reach)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.axvline(1.0, color=style.INK, linewidth=1.0, zorder=2)
    own = {cell.name: cell for cell in shape.cells}
    for place, name in enumerate(names):
        cell = own.get(name)
        if cell is not None and _has_ratio(cell):
            _draw_dot(panel, cell, place, reach)
        else:
            _write(panel, cell, place, is_base=cell is shape.base)
    steps = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)
    ends = (0.8, 1.25) if reach < 2 else (0.25, 0.5, 2.0, 4.0)  # noqa: PLR2004 - otherwise they touch
    style.ticks(panel.xaxis, FixedLocator([step for step in steps if step == 1.0 or step in ends]), "{:g}".format)
    panel.set_yticks(range(len(names)), [style.label(name) for name in names] if has_names else [])
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False, axis="y")


def _draw_dot(panel: Axes, cell: Cell, place: int, reach: float) -> None:
    ratio = cell.ratio or 1.0
    colour = COLOURS.get(cell.mark or Mark.undecided, GREY)
    at = min(max(ratio, 1 / reach), reach)
    marker = "o" if at == ratio else ">" if ratio > 1 else "<"
    ends = [min(max(end or ratio, 1 / reach), reach) for end in (cell.low, cell.high)]
    panel.plot(ends, [place, place], color=colour, linewidth=1.6, solid_capstyle="butt", zorder=3)
    face = colour if cell.mark in COLOURS else "white"
    panel.plot([at], [place], marker=marker, ms=6, mfc=face, mec=colour, mew=1.2, zorder=4, clip_on=False)
    _text(panel, place, f"{significant(ratio, 3)}{'?' * (cell.mark not in COLOURS)}", colour, is_left=ratio >= 1)


def _write(panel: Axes, cell: Cell | None, place: int, *, is_base: bool) -> None:
    """Write the reason for a missing dot in a word or two."""
    if cell is None:
        _text(panel, place, "not asked for", GREY, is_left=True)
    elif is_base:
        _text(panel, place, "baseline", "#555555", is_left=False)
    else:
        is_bad = cell.mark in {Mark.wrong, Mark.failed}
        words = "not timed" if cell.status == "ok" else plain(cell.words, limit=20)
        _text(panel, place, words, BAD if is_bad else GREY, is_left=True)


def _text(panel: Axes, place: int, text: str, colour: str, *, is_left: bool) -> None:
    """Write a text at one side of a row, on white."""
    x, side = (0.02, "left") if is_left else (0.98, "right")
    look: dict[str, Any] = {"ha": side, "va": "center", "fontsize": 7.5, "transform": panel.get_yaxis_transform()}
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    panel.text(x, place, text, color=style.readable(colour, style.LIGHT), bbox=behind, zorder=5, **look)


REPORT = {
    "picture": Report(
        summary="the one picture of a run: time against length, or ratios",
        files=("picture.png",),
        draw=lambda results: lines.usual(results) or draw(results),
        is_usual=True,
    ),
    "ratio_plot": Report(
        summary="which is faster on each shape, with intervals and verdicts",
        files=("ratio_plot.svg", "ratio_plot.png"),
        draw=draw,
    ),
}
