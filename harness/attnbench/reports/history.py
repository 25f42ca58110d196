"""Series over stored runs, for people: a table for each workload, as Markdown and as CSV, and pictures.

In a picture each workload has a panel, with runs from left to right and a ring where a level changed.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from attnbench.analysis.history import FEWEST, RATIO, Change, Series
from attnbench.analysis.table import Row, arm_of
from attnbench.reports import Picture, grouped, style
from attnbench.reports.cells import length, title
from attnbench.reports.csv import spreadsheet
from attnbench.storage.records import LATENCY
from attnbench.units import escaped, markdown_table, plain, show

NAME_LEN = 24
SHORT = 10
MOST_TICKS = 6
NAMES = {RATIO: "ratio to the baseline's time", LATENCY: "time per call"}
WIDE = 5.0
"""Values further apart than this many times stand on a logarithmic axis."""
COLUMNS = (
    *("fingerprint", "workload", "implementation", "metric", "unit", "run", "time", "commit"),
    *("value", "low", "high", "is_change"),
)
"""Of the CSV."""
NOTE = "Each point is a run, with its 95 % interval where it has one. A ring is the first run at a new level."


def commit(point: Row) -> str:
    """The first digits of a commit, or that it is not known."""
    return plain(point["commit"])[:SHORT] or "unknown"


def day(point: Row) -> str:
    """Of the run, in ISO 8601."""
    return plain(point["time"].partition("T")[0], limit=NAME_LEN)


def change(series: Series, found: Change) -> str:
    """A change in words: "+6.1 % from 0123abc (2026-11-02) on, before: 89ab012"."""
    at, before = series.points[found.place], series.points[found.place - 1]
    return f"{found.effect:+.1%} from {commit(at)} ({day(at)}) on, before: {commit(before)}".replace("%", " %")


def row(series: Series) -> dict[str, str]:
    """A line of the table; nothing is left blank."""
    changed = "; ".join(change(series, found) for found in series.changes)
    few = f"- (fewer than {FEWEST} runs)" if len(series.points) < FEWEST else "none"
    return {
        "implementation": style.label(arm_of(series.cell)),
        "runs": str(len(series.points)),
        "first": show(series.points[0]["value"], series.unit),
        "last": show(series.points[-1]["value"], series.unit),
        "changes of level": changed or few,
    }


def headings(series: Iterable[Series]) -> dict[str, list[Series]]:
    """By machine and workload, in words; workloads on which something changed come first."""
    return {
        f"{where}, on {machine}": members
        for machine, rows in grouped(series, machine_of).items()
        for where, members in grouped(sorted(rows, key=lambda each: not each.changes), _where).items()
    }


def markdown(series: Sequence[Series], notes: Sequence[str]) -> str:
    """A table for each workload on each machine, and what was noticed while gathering."""
    parts = [f"# {escaped(series[0].metric)} over stored runs"]
    for heading, rows in headings(series).items():
        parts += [f"## {escaped(heading)}", markdown_table([row(each) for each in rows])]
    parts += ["\n".join(f"- {escaped(plain(note))}" for note in notes)]
    return "\n\n".join(parts).rstrip() + "\n"


def csv(series: Sequence[Series]) -> str:
    """Every point of every series as CSV, with whether a new level begins there."""
    points = pd.DataFrame(
        point
        | {
            "implementation": str(arm_of(point)),
            "metric": each.metric,
            "unit": each.unit or "ratio",
            "commit": plain(point["commit"]) or "unknown",
            "is_change": any(found.place == place for found in each.changes),
        }
        for each in series
        for place, point in enumerate(each.points)
    )
    return spreadsheet(points[list(COLUMNS)], missing="none")


def pictures(series: Sequence[Series]) -> list[Picture]:
    """At most six panels each; those of one machine together."""
    return [
        _picture(page)
        for rows in grouped(series, machine_of).values()
        for page in style.pages(list(grouped(rows, lambda each: each.cell["workload"]).values()))
    ]


def _picture(panels: Sequence[list[Series]]) -> Picture:
    first = panels[0][0]
    name = NAMES.get(first.metric, first.metric.replace("_", " "))
    num_columns = min(2, len(panels))
    arms = dict.fromkeys(arm_of(each.cell) for members in panels for each in members)
    return style.sheet(
        panels,
        lambda axes, members: _panel(axes, members, name),
        (2.6 + 4.6 * num_columns, 1.2 + 3.0 * math.ceil(len(panels) / num_columns)),
        title=f"{name[0].upper()}{name[1:]}, run by run",
        subtitle=machine_of(first),
        note=NOTE,
        num_columns=num_columns,
        legend={"handles": [style.handle(arm) for arm in arms]},
    )


def _panel(axes: Axes, members: list[Series], name: str) -> None:
    points = [point for each in members for point in each.points]
    runs = sorted(grouped(points, lambda point: (point["time"], point["run"])).items())
    place = {run: number for number, ((_, run), _) in enumerate(runs)}
    for each in members:
        _line(axes, each, [place[point["run"]] for point in each.points])
    values = [point["value"] for point in points]
    if 0 < min(values) < max(values) / WIDE:
        axes.set_yscale("log")
        style.log_ticks(axes.yaxis, members[0].unit)
    else:
        middle, half = (max(values) + min(values)) / 2, (max(values) - min(values)) / 2
        half = max(1.15 * half, 0.1 * middle)  # so that what hardly moves is not blown up
        axes.set_ylim(middle - half, middle + half)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value, members[0].unit)))
    ticks = sorted({round(step * (len(runs) - 1) / (MOST_TICKS - 1)) for step in range(MOST_TICKS)})
    axes.set_xticks(ticks, [_label(runs[tick][1]) for tick in ticks], fontsize=8)
    axes.set_xlim(-0.5, len(runs) - 0.5)
    axes.set_xlabel("commit and day of the run")
    axes.set_ylabel(name)
    axes.set_title("\n".join(textwrap.wrap(_where(members[0]), 52)), loc="left")


def _label(points: Sequence[Row]) -> str:
    """The commit of a run, of each side where it compared two, and its day."""
    return "\n".join([*dict.fromkeys(commit(point)[:7] for point in points), day(points[0])[5:]])


def _line(axes: Axes, series: Series, places: list[int]) -> None:
    seen = style.look(arm_of(series.cell))
    points = pd.DataFrame(series.points, columns=["value", "low", "high"], dtype=float)
    values = points["value"]
    down, up = (values - points["low"]).fillna(0.0), (points["high"] - values).fillna(0.0)
    axes.plot(places, values, color=seen.colour, linestyle=seen.line, linewidth=min(seen.width, 2.0), alpha=0.7)
    axes.errorbar(places, values, yerr=[down, up], fmt="none", ecolor=seen.colour, elinewidth=1.0, capsize=2.0)
    axes.plot(places, values, linestyle="", marker=seen.marker, ms=5.5, mfc=seen.colour, mec="white", mew=0.5)
    rings = [found.place for found in series.changes]
    axes.plot([places[r] for r in rings], [values[r] for r in rings], "o", ms=13, mfc="none", mec=style.INK, mew=1.4)


def _where(series: Series) -> str:
    """The workload in words."""
    return f"{title(series.cell)}, T={length(series.cell)}"


def machine_of(series: Series) -> str:
    """Which machine the series is of."""
    return f"{plain(series.machine)}, fingerprint {series.cell['fingerprint']}"
