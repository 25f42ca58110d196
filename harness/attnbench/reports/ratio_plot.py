"""Dot plot of ratios to the baseline with intervals: a row for each implementation, a column for each shape.

Colours show verdicts, and rows are sorted by overall speed. Source: W. S. Cleveland, dot plots, The American
Statistician 38, 1984, https://doi.org/10.1080/00031305.1984.10483223.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from attnbench.analysis.comparisons import doubts
from attnbench.analysis.results import Results
from attnbench.analysis.table import Row, arm_of, rows
from attnbench.reports import Picture, Report, cells, grouped, lines, style
from attnbench.storage.records import Arm, Verdict
from attnbench.units import plain, significant

MOST_SHAPES, MOST_COLUMNS = 12, 6
FURTHEST = 4.0
"""Largest factor on the axes; larger ratios are arrows with their number."""
NARROWEST = 1.25
ROW = 0.235
LEAST_WIDTH = 6.0
"""Inches for the title and the legend next to it."""
COLOURS = {
    Verdict.faster: "#0072B2",
    Verdict.slower: "#D55E00",
    Verdict.equivalent: "#555555",
    Verdict.undecided: "#8a8a8a",
}
"""Colours of verdicts: blue and vermilion differ for every kind of colour vision, and the side of the line repeats
them."""
TITLE_LEN = 24


Rows = Mapping[Arm, Row]
"""The rows of one shape by arm."""


def draw(results: Results, most: int = MOST_SHAPES, row: float = ROW) -> Picture | None:
    """Draw the first `most` shapes of a run, each row `row` inches high; None if nothing was compared."""
    table = cells.shown(results)
    by_shape = grouped(rows(table), lambda each: str(each["workload"]))
    compared = {name: members for name, members in by_shape.items() if any(map(_has_ratio, members))}
    names = list(compared)[:most]
    if not names:
        return None
    titles = cells.names(results)
    shapes = [{arm_of(each): each for each in compared[name]} for name in names]
    arms = order(shapes)
    reach = _reach(shapes)
    num_columns = min(len(shapes), MOST_COLUMNS if len(shapes) != 8 else 4)  # noqa: PLR2004 - two even rows
    num_rows = math.ceil(len(shapes) / num_columns)

    def fill(panel: Axes, place: int) -> None:
        title = "\n".join(textwrap.wrap(titles[names[place]], TITLE_LEN))
        _draw_shape(panel, shapes[place], arms, reach, has_names=place % num_columns == 0)
        panel.set_title(title, loc="left", fontsize=9)

    more = f"{len(compared) - most} more shapes have their numbers in records.csv. " if compared.keys() - names else ""
    doubt = "Doubtful, the session was disturbed: see the summary. " if doubts(results) else ""
    return style.sheet(
        range(len(shapes)),
        fill,
        (max(LEAST_WIDTH, 1.5 + 1.95 * num_columns), 1.25 + num_rows * (0.75 + row * len(arms))),
        title=f"Which is faster: time as a ratio to {style.label(cells.base(results.plan))}, left of 1 is faster",
        subtitle=cells.shared(table[table["workload"].isin(names)]),
        note=f"{doubt}{more}Dots are medians of paired ratios, bars their 95 % intervals; the number is the ratio.",
        num_columns=num_columns,
        legend={"handles": _handles(shapes), "loc": "outside upper right", "ncols": 5, "handlelength": 1.2},
    )


def order(shapes: Sequence[Rows]) -> list[Arm]:
    """The arms with some ratio, the fastest overall first, the baseline among them."""
    logs: dict[Arm, list[float]] = {}
    for shape in shapes:
        for arm, row in shape.items():
            if _has_ratio(row) or row["is_baseline"]:
                logs.setdefault(arm, []).append(math.log(row["ratio"] or 1.0))
    return sorted(logs, key=lambda arm: (fmean(logs[arm]), str(arm)))


def _has_ratio(row: Row) -> bool:
    return row["verdict"] is not None and (row["ratio"] or 0.0) > 0 and not row["is_baseline"]


def _reach(shapes: Sequence[Rows]) -> float:
    """The factor at which all axes end, in both directions."""
    ratios = [row["ratio"] for shape in shapes for row in shape.values() if _has_ratio(row)]
    furthest: float = max(max(ratio, 1 / ratio) for ratio in ratios)
    return min(FURTHEST, max(NARROWEST, 1.15 * furthest))


def _draw_shape(panel: Axes, shape: Rows, arms: Sequence[Arm], reach: float, *, has_names: bool) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xlim(1 / reach, reach)
    panel.set_ylim(len(arms) - 0.5, -0.5)
    panel.axvline(1.0, color=style.INK, linewidth=1.0, zorder=2)
    for place, arm in enumerate(arms):
        _draw_row(panel, shape.get(arm), place, reach)
    steps = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)
    ends = (0.8, 1.25) if reach < 2 else (0.25, 0.5, 2.0, 4.0)  # noqa: PLR2004 - otherwise they touch
    style.ticks(panel.xaxis, FixedLocator([step for step in steps if step == 1.0 or step in ends]), "{:g}".format)
    panel.set_yticks(range(len(arms)), [style.label(arm) for arm in arms] if has_names else [])
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False, axis="y")


def _draw_row(panel: Axes, row: Row | None, place: int, reach: float) -> None:
    """Draw a dot with its bar and number, or the reason for its absence."""
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    text: dict[str, Any] = {"va": "center", "fontsize": 7.5, "transform": panel.get_yaxis_transform()}
    if row is None or (not _has_ratio(row) and not row["is_baseline"]):
        words, colour = _absence(row)
        panel.text(
            0.02, place, words, color=style.readable(colour, style.LIGHT), ha="left", bbox=behind, zorder=5, **text
        )
        return
    if row["is_baseline"]:
        panel.text(0.98, place, "baseline", color="#555555", ha="right", **text)
        return
    verdict, ratio = Verdict(row["verdict"]), row["ratio"]
    colour, is_open = COLOURS[verdict], verdict is Verdict.undecided
    low, high = row["ratio_low"] or ratio, row["ratio_high"] or ratio
    at = min(max(ratio, 1 / reach), reach)
    marker = "o" if at == ratio else ">" if ratio > 1 else "<"
    ends = [min(max(end, 1 / reach), reach) for end in (low, high)]
    panel.plot(ends, [place, place], color=colour, linewidth=1.6, solid_capstyle="butt", zorder=3)
    face = "white" if is_open else colour
    panel.plot([at], [place], marker=marker, ms=6, mfc=face, mec=colour, mew=1.2, zorder=4, clip_on=False)
    number = f"{significant(ratio, 3)}{'?' * is_open}"
    x, side = (0.98, "right") if ratio < 1 else (0.02, "left")  # away from the dot
    panel.text(x, place, number, color=style.readable(colour, style.LIGHT), ha=side, bbox=behind, zorder=5, **text)


def _absence(row: Row | None) -> tuple[str, str]:
    """The reason for a missing dot, in a word or two, and its colour."""
    if row is None:
        return "not asked for", "#999999"
    if row["status"] == "ok":
        return "not timed", "#999999"
    is_bad = row["status"] not in {"unsupported", "timeout"} and not row["is_predicted"]
    return plain(cells.status(row), limit=20), "#B00020" if is_bad else "#999999"


def _handles(shapes: Sequence[Rows]) -> list[Line2D]:
    """Legend entries of the verdicts that occur."""
    seen = {row["verdict"] for shape in shapes for row in shape.values() if _has_ratio(row)}
    return [
        Line2D(
            [],
            [],
            linestyle="",
            marker="o",
            mec=colour,
            mfc="white" if verdict is Verdict.undecided else colour,
            label={Verdict.equivalent: "equal", Verdict.undecided: "undecided?"}.get(verdict, str(verdict)),
        )
        for verdict, colour in COLOURS.items()
        if verdict in seen
    ]


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
