"""What the pictures over length show: panels, one for each workload group, and a note on what they leave out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnbench.reports import words
from attnbench.reports.table import Row
from attnbench.statistics.intervals import growth_exponent
from attnbench.workloads.workload import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = dict[str, list[list["Point"]]]
"""For each implementation its points in each panel."""
FEWEST_LENGTHS = 3
"""Two lengths always lie on a line: their slope says nothing of how time or memory grows."""
REASON_LEN = 72
LONG = 4.0
"""By what factor a bar may go beyond all points."""


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

    axis: str  # seq_len or kv_len
    other: str  # the other length where it is not the same: "T=1"
    rows: tuple[Row, ...]
    letter: str = ""  # by which notes refer to it, where there are several
    title: str = ""

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
    finish: Callable[["Axes", Panel], None]
    hollow: str  # what a hollow marker says
    absent: str  # why an ok row may have no point
    is_steep: bool = True  # values grow with length: lines stay in place, and their growth is told
    is_absence_told: Callable[[Row], bool] = lambda _: True


def panels_of(table: Iterable[Row]) -> list[Panel]:
    """The panels of a run, not yet titled: a group over its query length, or over its key length in decoding."""
    grouped: dict[str, list[Row]] = {}
    for row in table:
        grouped.setdefault(row.group, []).append(row)
    found: dict[tuple[str, str, str], list[Row]] = {}
    for group, members in grouped.items():
        queries, keys = ({getattr(row.workload, axis) for row in members} for axis in words.LENGTHS)
        axis = "kv_len" if len(queries) == 1 < len(keys) else "seq_len"
        for row in members:
            found.setdefault((group, axis, _other(row.workload, axis)), []).append(row)
    return [Panel(axis=axis, other=other, rows=tuple(members)) for (_, axis, other), members in found.items()]


def titled(panels: Sequence[Panel]) -> list[Panel]:
    """The panels of one page, each with a letter and what sets it apart from the others on the page."""
    axes = words.varying_axes(row.workload for panel in panels for row in panel.rows)
    letters = "abcdefghijklmnopqrstuvwxyz" if len(panels) > 1 else [""]
    named = []
    for letter, panel in zip(letters, panels, strict=False):
        told = (words.varying(panel.rows[0].workload, axes), panel.other)
        title = " · ".join(part for part in told if part)
        named.append(replace(panel, letter=letter, title=f"({letter}) {title}" if letter else title))
    return named


def series_of(plot: Plot, panels: Sequence[Panel]) -> Series:
    """The points of each implementation that has any; the largest last values first."""
    names = dict.fromkeys(row.implementation for panel in panels for row in panel.rows)
    found = {name: [_points(plot, panel, name) for panel in panels] for name in names}
    last = {name: max((line[-1].value for line in lines if line), default=0.0) for name, lines in found.items()}
    return {name: found[name] for name in sorted(names, key=lambda name: -last[name]) if any(found[name])}


def _points(plot: Plot, panel: Panel, name: str) -> list[Point]:
    mine = [row for row in panel.rows if row.implementation == name]
    points = [plot.point(row, panel.length(row.workload)) for row in mine]
    return sorted((point for point in points if point is not None), key=lambda point: point.length)


def growth(lines: Sequence[Sequence[Point]]) -> str:
    """The growth exponent over three lengths or more, as a range where panels differ: "1.6 to 1.8"; "" without any."""
    long = [line for line in lines if len({point.length for point in line}) >= FEWEST_LENGTHS]
    found = [growth_exponent([point.length for point in line], [point.value for point in line]) for line in long]
    told = sorted({f"{exponent:.1f}" for exponent in found if exponent is not None}, key=float)
    return " to ".join(dict.fromkeys((told[0], told[-1]))) if told else ""


def reach(series: Series) -> tuple[float, float] | None:
    """From where to where the vertical axis goes where a bar is so long that it would dwarf all points; else None.

    A bar is cut where it goes beyond LONG times the greatest value, or below the least divided by LONG.
    """
    points = [point for lines in series.values() for line in lines for point in line]
    ends = [end for point in points for end in (point.low, point.high) if end is not None]
    if not ends:
        return None
    low, high = min(point.value for point in points), max(point.value for point in points)
    if min(ends) >= low / LONG and max(ends) <= high * LONG:
        return None
    return max(min(ends), low / LONG), min(max(ends), high * LONG)


def length_letter(panels: Sequence[Panel]) -> str:
    """The letter of the length that the panels are drawn over."""
    return "S" if all(panel.axis == "kv_len" for panel in panels) else "T"


def notes(plot: Plot, panels: Sequence[Panel], series: Series) -> str:
    """What the picture does not show and why, and how to read what it does."""
    told = _absences(plot, panels)
    said = [f"Not shown: {'; '.join(told).removesuffix('.')}."] if told else []
    if any(point.low is not None for lines in series.values() for line in lines for point in line):
        said.append("Bars are 95 % intervals over visits.")
    if reach(series) is not None:
        said.append("A bar that leaves the picture goes on.")
    if any(point.is_hollow for lines in series.values() for line in lines for point in line):
        said.append(f"Hollow: {plot.hollow}.")
    if len(series) > 1 and (not plot.is_steep or any(len(panel.lengths) == 1 for panel in panels)):
        said.append("Points of one length are set side by side so that none hides another.")
    if plot.is_steep and any(growth(lines) for lines in series.values()):
        said.append(f"~{length_letter(panels)}^x: growth with length, a least-squares slope.")
    return " ".join(said)


def _absences(plot: Plot, panels: Sequence[Panel]) -> list[str]:
    """Each implementation that misses points: where, and why where there is one reason for all of them."""
    places: dict[tuple[str, str], dict[str, list[int]]] = {}
    reasons: dict[tuple[str, str], set[str]] = {}
    for panel in panels:
        for row in panel.rows:
            length = panel.length(row.workload)
            if plot.point(row, length) is None and plot.is_absence_told(row):
                key = (words.plain(row.implementation, limit=24), row.cells["status"])
                places.setdefault(key, {}).setdefault(panel.letter, []).append(length)
                reasons.setdefault(key, set()).add(_reason(plot, row))
    return [
        f"{name}{_where(where, panels)}: {_why(status, reasons[name, status])}"
        for (name, status), where in places.items()
    ]


def _reason(plot: Plot, row: Row) -> str:
    if row.cells["status"] == "ok":
        return plot.absent
    return words.plain(row.message.partition(";")[0], limit=REASON_LEN)


def _why(status: str, reasons: set[str]) -> str:
    one = next(iter(reasons)) if len(reasons) == 1 else ""
    if status == "ok" and one:
        return one
    return f"{status}, {one}" if one else status


def _where(places: dict[str, list[int]], panels: Sequence[Panel]) -> str:
    """The lengths and the panels by their letters: " at 2048 in a, b and in c"; nothing where it is all of them."""
    every = {panel.letter: panel.lengths for panel in panels}
    shared: dict[str, list[str]] = {}
    for letter, lengths in places.items():
        at = "" if sorted(lengths) == every[letter] else f" at {', '.join(map(str, lengths))}"
        shared.setdefault(at, []).append(letter)
    if len(shared) == 1 and len(places) == len(every):
        return next(iter(shared))
    return " and".join(f"{at} in {', '.join(letters)}" for at, letters in shared.items())


def _other(workload: Workload, axis: str) -> str:
    if axis == "kv_len":
        return f"T={workload.seq_len}"
    return "" if workload.kv_len == workload.seq_len else f"S={workload.kv_len}"
