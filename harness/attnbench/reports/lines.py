"""Time and memory over length: panels of lines, and a note on what is missing.

Dots have intervals, rings show where lines coincide, and a hollow dot is less than it seems.
"""

import math
import string
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator

from attnbench.analysis.results import Results
from attnbench.analysis.table import Panel, Row, panels, rows, workload_of
from attnbench.reports import Picture, cells, grouped, style
from attnbench.statistics.intervals import growth_exponent
from attnbench.storage.records import Arm
from attnbench.units import plain
from attnbench.workloads.workload import DTYPE_BYTES

MOST_PANELS, MOST_LINES = 6, 6
LABEL_HEIGHT, GREY = 0.07, "#c4c4c4"
"""Names at the ends of lines lie so far apart, as a share of the panel's height; lines without a name are grey."""
FEWEST_LENGTHS = 3
"""Two lengths always lie on a line: their slope says nothing of how time or memory grows."""
REASON_LEN = 72
LONG = 4.0
"""By what factor a bar may go beyond all points."""
SPREAD = 0.3
"""How far apart, as a share of a gap between lengths, the points of a lone length are drawn; lines stay in place."""
MANY_LENGTHS = 7
TITLE_LEN = 48
LEAST_WIDTH = 7.2
"""Inches that the title and the legend next to it need."""
X_LABELS = {"seq_len": "sequence length T", "kv_len": "key length S"}


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One kind of picture: which column it shows, how, and what else is drawn."""

    title: str
    y_label: str
    column: str
    low: str = ""  # the columns of the interval, where there is one
    high: str = ""
    is_drawn: Callable[[Row], bool] = lambda _: True  # else the value is no point
    is_hollow: Callable[[Row], bool] = lambda _: False
    hollow: str = ""  # what a hollow marker says
    absent: str  # why an ok row may have no point
    is_absence_listed: Callable[[Row], bool] = lambda _: True
    finish: Callable[[Axes, Panel], None]  # ticks and extra lines, once all values are in

    def has_point(self, row: Row) -> bool:
        """Whether a cell has a point."""
        return (row.get(self.column) or 0) > 0 and self.is_drawn(row)


def titled(found: Sequence[Panel]) -> list[Panel]:
    """The panels of one picture with their titles, and marks where they are several."""
    first = [workload_of(rows(panel.cells.iloc[:1])[0]) for panel in found]
    labels = cells.labels(first)
    marked = []
    marks = string.ascii_lowercase if len(found) > 1 else [""]
    for mark, panel, workload in zip(marks, found, first, strict=False):
        title = " ".join(filter(None, (labels[workload.id], panel.other)))
        marked.append(replace(panel, mark=mark, title=f"({mark}) {title}" if mark else title))
    return marked


def cells_of(found: Sequence[Panel]) -> pd.DataFrame:
    """The cells of all panels."""
    return pd.concat([panel.cells for panel in found])


def draw(results: Results, plot: Plot, fewest_lengths: int = 1) -> list[Picture]:
    """The picture of a run, with its first six panels at most; none where no row has a value.

    Panels have that many lengths at least.
    """
    found = [panel for panel in panels(cells.shown(results)) if len(panel.lengths) >= fewest_lengths]
    full = [panel for panel in found if any(map(plot.has_point, rows(panel.cells)))]
    empty = [str(panel.cells["title"].iloc[0]) for panel in found if panel not in full]
    more = [f"No panel, as there is no value: {group}." for group in empty]
    if len(full) > MOST_PANELS:
        more.append(f"{len(full) - MOST_PANELS} more groups have their numbers in records.csv.")
    return [_picture(plot, titled(full[:MOST_PANELS]), more, cells.base(results.plan))] if full else []


def _picture(plot: Plot, shown: Sequence[Panel], more: Iterable[str], base: str) -> Picture:
    points, number = points_of(plot, shown), len(shown)
    num_columns = min(number, 3 if number != 4 else 2)  # noqa: PLR2004 - four panels make a square
    limits = reach(points)

    def fill(axes: Axes, place: int) -> None:
        _draw_panel(axes, shown[place], points[points["panel"] == place], named[place])
        axes.set_ylabel("" if place % num_columns else plot.y_label)
        axes.set_title("\n".join(textwrap.wrap(shown[place].title, TITLE_LEN)), loc="left")
        if limits is not None:
            axes.set_ylim(*limits)

    named = [chosen(points[points["panel"] == place], style.label(base)) for place in range(number)]
    grey = [style.label(arm) for arm in dict.fromkeys(points["arm"]) if not any(arm in own for own in named)]
    if grey:
        more = [*more, f"Grey, and close to one of the others: {', '.join(grey)}."]

    def finish(axes: Axes, place: int) -> None:
        plot.finish(axes, shown[place])
        _label(axes, points[points["panel"] == place], named[place], shown[place])

    return style.sheet(
        range(number),
        fill,
        (max(LEAST_WIDTH, 0.6 + 4.4 * num_columns), 1.0 + 3.2 * math.ceil(number / num_columns)),
        title=plot.title,
        subtitle=cells.shared(cells_of(shown)),
        note=" ".join([notes(plot, shown, points), *more]),
        num_columns=num_columns,
        finish=finish,
        legend={"loc": "outside upper right", "ncols": 3},
        sharey=number > 1,
    )


def chosen(points: pd.DataFrame, base: str) -> list[Arm]:
    """The arms of a panel that have a colour and a name: the baseline, and those that lie furthest from one another."""
    arms: list[Arm] = list(dict.fromkeys(points["arm"]))
    last = {arm: math.log(points[points["arm"] == arm]["value"].iloc[-1]) for arm in arms}
    named = [arm for arm in arms if style.label(arm) == base][:1] or arms[:1]
    while len(named) < min(MOST_LINES, len(arms)):
        others = [arm for arm in arms if arm not in named]
        named.append(max(others, key=lambda arm: min(abs(last[arm] - last[other]) for other in named)))
    return named


def _draw_panel(axes: Axes, panel: Panel, points: pd.DataFrame, named: Sequence[Arm]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    lengths = panel.lengths
    gap = min((math.log(b / a) for a, b in pairwise(lengths)), default=2.0)
    spread = gap * SPREAD * (len(lengths) == 1)
    arms = list(dict.fromkeys(points["arm"]))
    for place, arm in enumerate(arms):
        line, shift = points[points["arm"] == arm], math.exp(spread * ((place + 0.5) / len(arms) - 0.5))
        if arm in named:
            _draw_line(axes, style.look(arm), line, shift)
        else:
            axes.plot(line["length"] * shift, line["value"], color=GREY, linewidth=1.2, marker=".", zorder=1.8)
    style.ticks(axes.xaxis, FixedLocator(lengths), "{:.0f}".format)
    axes.tick_params(axis="x", labelrotation=45 if len(lengths) > MANY_LENGTHS else 0)
    axes.tick_params(axis="y", labelleft=True)
    edge = math.exp(0.25 * gap)
    axes.set_xlim(lengths[0] / edge, lengths[-1] * edge)
    axes.set_xlabel(X_LABELS[panel.axis])


def _label(axes: Axes, points: pd.DataFrame, named: Sequence[Arm], panel: Panel) -> None:
    """Name the lines at their ends, in their colours, moved apart where they would overlap."""
    ends = {arm: points[points["arm"] == arm].iloc[-1] for arm in named}
    low, high = (math.log(limit) for limit in axes.get_ylim())
    at = {arm: (math.log(end["value"]) - low) / (high - low) for arm, end in ends.items()}
    ordered = sorted(at, key=lambda arm: at[arm])
    for arm, place in zip(ordered, apart([at[arm] for arm in ordered], LABEL_HEIGHT), strict=True):
        power = growth(points[points["arm"] == arm])
        text = style.label(arm) + (f"  ~{panel.letter}^{power}" if power else "")
        short = "" if ends[arm]["length"] == panel.lengths[-1] else f" (to {ends[arm]['length']})"
        ink = style.readable(style.look(arm).colour, style.LIGHT)
        axes.text(1.02, place, text + short, color=ink, va="center", fontsize=8.5, transform=axes.transAxes)


def apart(places: Sequence[float], least: float) -> list[float]:
    """Places in ascending order, moved as little as it takes to lie `least` apart, and the last one below 1."""
    moved: list[list[float]] = []  # groups that touch: each lies about the mean of what its members ask for
    for place in places:
        moved.append([place])
        while len(moved) > 1 and _ends(moved[-2], least)[1] + least > _ends(moved[-1], least)[0]:
            last = moved.pop()
            moved[-1] += last
    return [_ends(group, least)[0] + number * least for group in moved for number in range(len(group))]


def _ends(group: Sequence[float], least: float) -> tuple[float, float]:
    """The first and the last place of a group of neighbours, whole names inside the axes as far as they fit."""
    half, room = (len(group) - 1) * least / 2, len(group) * least / 2
    middle = min(max(sum(group) / len(group), room), 1.0 - room)
    return middle - half, middle + half


def _draw_line(axes: Axes, seen: style.Look, points: pd.DataFrame, shift: float) -> None:
    x, y = points["length"] * shift, points["value"]
    down, up = (y - points["low"]).fillna(0.0), (points["high"] - y).fillna(0.0)
    order = 4 - seen.width / 5
    axes.plot(x, y, color=seen.colour, linestyle=seen.line, linewidth=seen.width, alpha=0.8, zorder=order)
    axes.errorbar(x, y, yerr=[down, up], fmt="none", ecolor=seen.colour, elinewidth=1.1, capsize=2.2, zorder=order + 1)
    for is_hollow in (False, True):
        chosen = points["is_hollow"] == is_hollow
        face, edge = ("white", seen.colour) if is_hollow else (seen.colour, "white")
        dot: dict[str, Any] = {"ms": seen.size, "mfc": face, "mec": edge, "mew": 1.3 if is_hollow else 0.6}
        axes.plot(x[chosen], y[chosen], linestyle="", marker=seen.marker, zorder=order + 2, **dot)


def points_of(plot: Plot, found: Sequence[Panel]) -> pd.DataFrame:
    """Every point with `panel` (its place), `arm`, `length`, `value`, `low`, `high` and `is_hollow`.

    Points of one arm stand together, in the order of panels and lengths; the arms with the largest last values first.
    """
    made = [
        {
            "panel": place,
            "arm": arm,
            "length": row[panel.axis],
            "value": row[plot.column],
            "low": row.get(plot.low),
            "high": row.get(plot.high),
            "is_hollow": plot.is_hollow(row),
        }
        for place, panel in enumerate(found)
        for arm, line in panel.lines.items()
        for row in line
        if plot.has_point(row)
    ]
    points = pd.DataFrame(made).astype({"low": float, "high": float})
    last = points.groupby(["arm", "panel"], sort=False)["value"].last().groupby("arm", sort=False).max()
    order = {arm: place for place, arm in enumerate(last.sort_values(ascending=False, kind="stable").index)}
    return points.sort_values("arm", key=lambda arms: arms.map(order), kind="stable")


def growth(points: pd.DataFrame) -> str:
    """The growth exponent over three lengths or more, as a range where panels differ: "1.6 to 1.8"; "" without any."""
    long = [line for _, line in points.groupby("panel") if line["length"].nunique() >= FEWEST_LENGTHS]
    found = [growth_exponent(line["length"].tolist(), line["value"].tolist()) for line in long]
    parts = sorted({f"{exponent:.1f}" for exponent in found if exponent is not None}, key=float)
    return " to ".join(dict.fromkeys((parts[0], parts[-1]))) if parts else ""


def reach(points: pd.DataFrame) -> tuple[float, float] | None:
    """From where to where the vertical axis goes where a bar is so long that it would dwarf all points; else None.

    A bar is cut where it goes beyond LONG times the greatest value, or below the least divided by LONG.
    """
    low, high = points["value"].min() / LONG, points["value"].max() * LONG
    ends = pd.concat([points["low"], points["high"]]).dropna()
    if ends.empty or (ends.min() >= low and ends.max() <= high):
        return None
    return max(ends.min(), low), min(ends.max(), high)


def notes(plot: Plot, shown: Sequence[Panel], points: pd.DataFrame) -> str:
    """What the picture does not show and why, and how to read what it does."""
    absent = absences(shown, lambda row: plot.has_point(row) or not plot.is_absence_listed(row), plot.absent)
    said = [absent] if absent else []
    if points["low"].notna().any():
        said.append("Bars are 95 % intervals over processes.")
    if reach(points) is not None:
        said.append("A bar that leaves the picture goes on.")
    if points["is_hollow"].any():
        said.append(f"Hollow: {plot.hollow}.")
    if len(set(points["arm"])) > 1 and any(len(panel.lengths) == 1 for panel in shown):
        said.append("Points of one length are set side by side so that none hides another.")
    if any(growth(line) for _, line in points.groupby("arm", sort=False)):
        said.append(f"~{_letter(shown)}^x: growth with length, a least-squares slope.")
    return " ".join(said)


def _letter(shown: Sequence[Panel]) -> str:
    """Of the length that the panels are drawn over."""
    return "S" if all(panel.letter == "S" for panel in shown) else "T"


def absences(shown: Sequence[Panel], is_shown: Callable[[Row], bool], absent: str) -> str:
    """Each implementation that misses points: where, and why where there is one reason for all of them."""
    missing = [(panel, row) for panel in shown for row in rows(panel.cells) if not is_shown(row)]
    alike = grouped(missing, lambda cell: (plain(cells.arm(cell[1]), limit=24), cells.status(cell[1])))
    parts = []
    for (name, ended), found in alike.items():
        messages = [absent if row["status"] == "ok" else (row["message"] or "") for _, row in found]
        reasons = {plain(message.partition(";")[0], limit=REASON_LEN) for message in messages}
        reason = reasons.pop() if len(reasons) == 1 else ""
        why = reason if reason and ended == "ok" else f"{ended}, {reason}" if reason else ended
        parts.append(f"{name}{_where(found, len(shown))}: {why}")
    return f"Not shown: {'; '.join(parts).removesuffix('.')}." if parts else ""


def _where(found: Sequence[tuple[Panel, Row]], num_panels: int) -> str:
    """The lengths and the panels by their marks: " at 2048 in a, b and in c"; nothing where it is all of them."""
    at = {}
    for panel, members in grouped(found, lambda cell: cell[0]).items():
        lengths = [row[panel.axis] for _, row in members]
        at[panel.mark] = "" if sorted(lengths) == panel.lengths else f" at {', '.join(map(str, lengths))}"
    shared = grouped(at, lambda mark: at[mark])
    if len(shared) == 1 and len(at) == num_panels:
        return next(iter(shared))
    return " and".join(f"{text} in {', '.join(marks)}" for text, marks in shared.items())


def _draw_theory(axes: Axes, panel: Panel) -> None:
    """The score matrix, twice that, and the output."""
    cell = rows(panel.cells.iloc[:1])[0]
    low, high = axes.get_xlim()
    x = np.geomspace(low, high, 33)
    is_square = cell["seq_len"] == cell["kv_len"]
    queries = x if panel.axis == "seq_len" else np.full_like(x, cell["seq_len"])
    keys = x if panel.axis == "kv_len" or is_square else np.full_like(x, cell["kv_len"])
    heads = cell["batch_size"] * cell["num_heads"] * DTYPE_BYTES[cell["dtype"]]
    faint: dict[str, Any] = {"color": "#666666", "linewidth": 1.1, "zorder": 1.5}
    axes.plot(x, 2 * heads * queries * keys, linestyle="--", label="2 x score matrix", **faint)
    axes.plot(x, heads * queries * keys, linestyle="-.", label="score matrix (B H T S)", **faint)
    axes.plot(x, heads * queries * cell["value_dim"], linestyle=":", label="output (B H T V), linear", **faint)
    style.byte_ticks(axes)


LATENCIES = Plot(
    title="Time per call against length (median; lower is faster)",
    y_label="time per call",
    column="latency_s",
    low="latency_low_s",
    high="latency_high_s",
    is_hollow=lambda row: row["latency_low_s"] is None,
    hollow="too few visits for an interval",
    absent="agrees, not timed",
    finish=lambda axes, _: style.log_ticks(axes.yaxis, "s"),
)
MEMORY = Plot(
    title="Peak memory of one call above its inputs, against length",
    y_label="peak memory",
    column="peak_memory_bytes",
    absent="peak memory not measured, or none above the inputs",
    finish=_draw_theory,
)

ENOUGH_LENGTHS = 5
"""Lengths of a panel that show how time grows."""


def usual(results: Results) -> list[Picture]:
    """The one picture of a page: time against length where some panel has enough lengths."""
    return draw(results, LATENCIES, ENOUGH_LENGTHS)


REPORT = {
    "latency_plot": style.report(
        "latency_plot", "time against length with intervals, as SVG and PNG", lambda results: draw(results, LATENCIES)
    ),
    "memory_plot": style.report(
        "memory_plot", "peak memory against length with theory, as SVG and PNG", lambda results: draw(results, MEMORY)
    ),
}
