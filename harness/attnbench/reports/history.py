"""Series over stored runs, for people: a table for each workload, as Markdown and a picture."""

from collections.abc import Iterable, Mapping, Sequence

from attnbench.analysis.history import FEWEST, RATIO, Change, Series
from attnbench.analysis.table import Row, arm_of
from attnbench.reports import Picture, grouped, style
from attnbench.reports.cells import length, title
from attnbench.reports.plot import Line, Panel, Point, plot
from attnbench.storage.records import LATENCY
from attnbench.units import plain, show

NAME_LEN = 24
SHORT = 10
MOST_TICKS = 6
NAMES = {RATIO: "ratio to the baseline's time", LATENCY: "time per call"}
NOTE = "Each point is a run, with its 95 % interval where it has one. A ring is the first run at a new level."


def commit(point: Row) -> str:
    """The first digits of a commit, or "unknown"."""
    return plain(point["commit"])[:SHORT] or "unknown"


def day(point: Row) -> str:
    """The day of a run, in ISO 8601."""
    return plain(point["time"].partition("T")[0], limit=NAME_LEN)


def change(series: Series, found: Change) -> str:
    """A change in words: "+6.1 % from 0123abc (2026-11-02) on, before: 89ab012"."""
    at, before = series.points[found.place], series.points[found.place - 1]
    return f"{found.effect:+.1%} from {commit(at)} ({day(at)}) on, before: {commit(before)}".replace("%", " %")


def row(series: Series) -> dict[str, str]:
    """A row of the table, without blank cells."""
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
    """Series by machine and workload, in words; workloads with changes come first."""
    return {
        f"{where}, on {machine}": members
        for machine, rows in grouped(series, machine_of).items()
        for where, members in grouped(sorted(rows, key=lambda each: not each.changes), _where).items()
    }


def picture(series: Sequence[Series]) -> Picture:
    """Draw the first workloads, with runs from left to right and a ring around each change."""
    first = series[0]
    name = NAMES.get(first.metric, first.metric.replace("_", " "))
    panels = [_panel(title, members) for title, members in headings(series).items()]
    return plot(panels, title=f"{name[0].upper()}{name[1:]}, run by run", y_label=name, unit=first.unit, note=NOTE)


def _panel(title: str, members: Sequence[Series]) -> Panel:
    points = [point for each in members for point in each.points]
    runs = sorted(grouped(points, lambda point: (point["time"], point["run"])).items())
    place = {run: number for number, ((_, run), _) in enumerate(runs)}
    ticks = {round(step * (len(runs) - 1) / (MOST_TICKS - 1)) for step in range(MOST_TICKS)}
    return Panel(
        title=title,
        lines=[_line(each, place) for each in members],
        x_label="commit and day of the run",
        ticks={tick: _label(runs[tick][1]) for tick in sorted(ticks)},
        is_log=False,
    )


def _label(points: Sequence[Row]) -> str:
    """The commit of a run, of each side if it compared two, and its day."""
    return "\n".join([*dict.fromkeys(commit(point)[:7] for point in points), day(points[0])[5:]])


def _line(series: Series, place: Mapping[str, int]) -> Line:
    rings = {found.place for found in series.changes}
    points = [
        Point(x=place[row["run"]], y=row["value"], low=row["low"], high=row["high"], is_ringed=number in rings)
        for number, row in enumerate(series.points)
    ]
    return Line(arm=arm_of(series.cell), points=points)


def _where(series: Series) -> str:
    return f"{title(series.cell)}, T={length(series.cell)}"


def machine_of(series: Series) -> str:
    """The machine of a series."""
    return f"{plain(series.machine)}, fingerprint {series.cell['fingerprint']}"
