"""Series over stored runs, for people: a table for each workload, as Markdown and a picture."""

from collections.abc import Iterable, Sequence

from attnbench.analysis.history import FEWEST, RATIO, Change, Series
from attnbench.analysis.table import Row, arm_of
from attnbench.reports import Picture, cells, grouped, style
from attnbench.reports.plot import Line, Panel, Point, plot
from attnbench.storage.records import LATENCY
from attnbench.units import plain, show

MOST_TICKS = 6
NAMES = {RATIO: "ratio to the baseline's time", LATENCY: "time per call"}
NOTE = "Each point is a run, with its 95 % interval where it has one. A ring is the first run at a new level."


def commit(point: Row) -> str:
    """The first digits of a commit, or "unknown"."""
    return plain(point["commit"])[:10] or "unknown"


def day(point: Row) -> str:
    """The day of a run, in ISO 8601."""
    return plain(point["time"].partition("T")[0], limit=24)


def change(series: Series, level: Change) -> str:
    """A change in words: "+6.1 % from 0123abc (2026-11-02) on, before: 89ab012"."""
    at, before = series.points[level.place], series.points[level.place - 1]
    return f"{level.effect:+.1%} from {commit(at)} ({day(at)}) on, before: {commit(before)}".replace("%", " %")


def row(series: Series) -> dict[str, str]:
    """A row of the table, without blank cells."""
    few = f"- (fewer than {FEWEST} runs)" if len(series.points) < FEWEST else "none"
    return {
        "implementation": style.label(arm_of(series.cell)),
        "runs": str(len(series.points)),
        "first": show(series.points[0]["value"], series.unit),
        "last": show(series.points[-1]["value"], series.unit),
        "changes of level": "; ".join(change(series, level) for level in series.changes) or few,
    }


def machine_of(series: Series) -> str:
    """The machine of a series."""
    return f"{plain(series.machine)}, fingerprint {series.cell['fingerprint']}"


def headings(series: Iterable[Series]) -> dict[str, list[Series]]:
    """Series by machine and workload, in words; workloads with changes come first."""
    return grouped(
        sorted(series, key=lambda each: (machine_of(each), not each.changes)),
        lambda each: f"{cells.title(each.cell)}, T={cells.length(each.cell)}, on {machine_of(each)}",
    )


def picture(series: Sequence[Series]) -> Picture:
    """Draw the first workloads, with runs from left to right and a ring around each change."""
    first = series[0]
    name = NAMES.get(first.metric, first.metric.replace("_", " "))
    panels = [_panel(title, members) for title, members in headings(series).items()]
    return plot(panels, title=f"{name[0].upper()}{name[1:]}, run by run", y_label=name, unit=first.unit, note=NOTE)


def _panel(title: str, members: Sequence[Series]) -> Panel:
    points = [point for series in members for point in series.points]
    runs = sorted(grouped(points, lambda point: (point["time"], point["run"])).items())
    place = {run: number for number, ((_, run), _) in enumerate(runs)}
    lines = []
    for series in members:
        rings = {level.place for level in series.changes}
        drawn = [
            Point(x=place[row["run"]], y=row["value"], low=row["low"], high=row["high"], is_ringed=number in rings)
            for number, row in enumerate(series.points)
        ]
        lines.append(Line(arm=arm_of(series.cell), points=drawn))
    ticks = {round(step * (len(runs) - 1) / (MOST_TICKS - 1)) for step in range(MOST_TICKS)}
    texts = {float(tick): _label(runs[tick][1]) for tick in sorted(ticks)}
    return Panel(title=title, lines=lines, x_label="commit and day of the run", ticks=texts, is_log=False)


def _label(points: Sequence[Row]) -> str:
    """The commit of a run, of each side if it compared two, and its day."""
    return "\n".join([*dict.fromkeys(commit(point)[:7] for point in points), day(points[0])[5:]])
