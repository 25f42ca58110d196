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
FURTHEST, NARROWEST = 4.0, 1.25
"""Largest and smallest factor at which the axes end; dots beyond are drawn at the end, with their number."""
ROW, LEAST_WIDTH = 0.235, 6.0
"""Inches for a row, and for the title."""
COLOURS = {Mark.faster: "#0072B2", Mark.slower: "#D55E00", Mark.equal: "#555555"}
"""Colours of verdicts: blue and vermilion differ for every kind of colour vision, and the side of the line repeats
them."""
GREY, BAD = "#8a8a8a", "#B00020"
LEGEND = (
    "Dots are medians of paired ratios, bars their 95 % intervals; the number is the ratio. Blue is faster, orange "
    "slower, grey equal, and hollow undecided. A dot at the edge lies beyond it: read its number."
)
TITLE_LEN = 24


def draw(results: Results, most: int = MOST_SHAPES, row: float = ROW) -> Picture | None:
    """Draw the first `most` shapes of a run, each row `row` inches high; None if nothing was compared."""
    compared = [shape for shape in answers.shapes(results) if any(map(_has_ratio, shape.others))]
    shapes, base = compared[:most], cells.base(results.plan)
    if not shapes:
        return None
    logs: dict[str, list[float]] = {}
    for cell in (cell for shape in shapes for cell in shape.cells if _has_ratio(cell) or cell is shape.base):
        logs.setdefault(cell.name, []).append(math.log(cell.ratio or 1.0))
    names = sorted(logs, key=lambda name: (fmean(logs[name]), name))
    furthest = max(abs(value) for values in logs.values() for value in values)
    reach = min(FURTHEST, max(NARROWEST, 1.15 * math.exp(furthest)))
    num_columns = min(len(shapes), MOST_COLUMNS if len(shapes) != 8 else 4)  # noqa: PLR2004 - two even rows

    def fill(panel: Axes, shape: Shape) -> None:
        _draw_shape(panel, shape, names, reach)
        if shape.base is not None and shape.base.name != base:
            panel.set_xlabel(f"ratio to {style.label(shape.base.name)}", fontsize=8)
        if shapes.index(shape) % num_columns:
            panel.set_yticklabels([])

    left_out = len(compared) - len(shapes)
    more = f"{left_out} more shapes have their numbers in records.csv. " if left_out else ""
    is_doubtful = any(shape.having(Mark.doubtful) for shape in shapes)
    doubt = "Doubtful, the session was disturbed: see the summary. " if is_doubtful else ""
    num_rows = math.ceil(len(shapes) / num_columns)
    return style.sheet(
        shapes,
        fill,
        (max(LEAST_WIDTH, 1.5 + 1.95 * num_columns), 1.25 + num_rows * (0.75 + row * len(names))),
        title=f"Which is faster: time as a ratio to {style.label(base)}, left of 1 is faster",
        subtitle=cells.shared([shape.workload.axes() for shape in shapes]),
        note=f"{doubt}{more}{LEGEND}",
        num_columns=num_columns,
    )


def _has_ratio(cell: Cell) -> bool:
    return cell.mark in TIMED and (cell.ratio or 0.0) > 0


def _draw_shape(panel: Axes, shape: Shape, names: Sequence[str], reach: float) -> None:
    panel.set_title("\n".join(textwrap.wrap(shape.name, TITLE_LEN)), loc="left", fontsize=9)
    panel.set_xscale("log", base=2)
    panel.set_xlim(1 / reach, reach)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.axvline(1.0, color=style.INK, linewidth=1.0, zorder=2)
    by_name = {cell.name: cell for cell in shape.cells}
    for place, name in enumerate(names):
        _draw_row(panel, by_name.get(name), place, reach, is_base=shape.base is not None and name == shape.base.name)
    ends = (0.8, 1.25) if reach < 2 else (0.25, 0.5, 2.0, 4.0)  # noqa: PLR2004 - otherwise they touch
    style.ticks(panel.xaxis, FixedLocator([1.0, *ends]))
    panel.set_yticks(range(len(names)), [style.label(name) for name in names])
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False, axis="y")


def _draw_row(panel: Axes, cell: Cell | None, place: int, reach: float, *, is_base: bool) -> None:
    """Draw a dot with its interval and its number, or the reason for a missing one in a word or two."""
    is_left, colour = True, GREY
    if is_base:
        text, is_left = "baseline", False
    elif cell is None:
        text = "not asked for"
    elif cell.comparison is None or not _has_ratio(cell):
        text = "not timed" if cell.record.status == "ok" else plain(cell.words, limit=20)
        colour = BAD if cell.mark in {Mark.wrong, Mark.failed} else GREY
    else:
        ratio, is_decided = cell.ratio or 1.0, cell.mark in COLOURS
        text, is_left = f"{significant(ratio, 3)}{'?' * (not is_decided)}", ratio >= 1
        colour = COLOURS.get(cell.mark or Mark.undecided, GREY)
        ends = (cell.comparison.low, ratio, cell.comparison.high)
        low, at, high = (min(max(end or ratio, 1 / reach), reach) for end in ends)
        panel.plot([low, high], [place, place], color=colour, linewidth=1.6, solid_capstyle="butt", zorder=3)
        dot: dict[str, Any] = {"ms": 6, "mfc": colour if is_decided else "white", "mec": colour, "mew": 1.2}
        panel.plot([at], [place], marker="o", zorder=4, clip_on=False, **dot)
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
