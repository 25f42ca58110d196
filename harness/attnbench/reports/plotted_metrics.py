"""Plots of time, ratio and memory against length: a panel for each group of cells, a line for each implementation."""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, LogLocator

from attnbench.analysis.results import Results
from attnbench.analysis.table import by_length
from attnbench.reports import Picture, Report, cells, style, titles
from attnbench.reports.cells import Cell
from attnbench.statistics.verdict import FEWEST_PROCESSES
from attnbench.storage.records import Arm
from attnbench.units import grouped, sanitize_line, show

ENOUGH_LENGTHS = 5  # with fewer lengths in every panel, the picture of a run shows ratios instead of times
X_LABELS = {"seq_len": "sequence length T", "kv_len": "key length S"}
MOST_PANELS, HEIGHT = 6, 3.2  # largest number of panels of a picture, and their height in inches
FEW_PANELS = 2  # the note names the panels in which an implementation lacks points if there are at most this many
FURTHEST = 4.0  # a plot shows ratios from 1 / FURTHEST to FURTHEST, and draws others as numbers at its edge
MANY_TICKS, TITLE_LEN = 7, 40
"""MANY_TICKS: labels of more lengths than this are rotated. TITLE_LEN: most characters in a line of a panel's title."""
SPREAD, EDGE = 0.8, 1.2
"""SPREAD: powers of two over which the points of a panel with a single length are spread. EDGE: factor by which the
horizontal axis extends beyond the first and the last length."""
ABOVE_NUMBERS_PT = 18.0  # distance from a panel to its title, in points, if there are numbers at the panel's edge
LEAST_WIDTH, LEGEND_WIDTH = 5.4, 1.8  # least width of all panels, and width of the legend, in inches


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number that a plot draws for each cell, with its label, title and unit."""

    label: str
    title: str
    unit: str
    value: Callable[[Cell], float | None]
    ends: Callable[[Cell], tuple[float | None, float | None]] = lambda _: (None, None)


TIME = Quantity(
    label="time per call",
    title="Time per call against length (lower is faster)",
    unit="s",
    value=lambda cell: cell.seconds,
    ends=lambda cell: cell.ends,
)
RATIO = Quantity(
    label="time / baseline's time",
    title="Time as a ratio to the baseline's, below 1 is faster",
    unit="",
    value=lambda cell: cell.ratio,
    ends=lambda cell: cell.ratio_ends,
)
MEMORY = Quantity(
    label="peak memory",
    title="Peak memory of one call above its inputs, against length",
    unit="bytes",
    value=lambda cell: cell.peak_bytes,
)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Cells of one group, on workloads that differ in one length only."""

    axis: str  # seq_len or kv_len
    other: str  # the other length, as in "T=1"; "" if query and key length are equal
    cells: Sequence[Cell]

    @property
    def lengths(self) -> list[int]:
        """The lengths of all cells in increasing order, measured or not."""
        return sorted({int(cell.workload.axes()[self.axis]) for cell in self.cells})


def panels(results: Results) -> Iterator[Panel]:
    """Yield the panels of a run: its groups of cells, split so that only one length varies in each panel."""
    for members in cells.groups(results).values():
        for (axis, other), alike in by_length(members, lambda cell: cell.workload).items():
            yield Panel(axis=axis, other=other, cells=alike)


def draw(
    results: Results, quantity: Quantity, fewest_lengths: int = 1, *, most: int = MOST_PANELS, height: float = HEIGHT
) -> Picture | None:
    """Plot a quantity in the first `most` panels that have a value and at least `fewest_lengths` lengths.

    Each panel is `height` inches high. Return None if there is no such panel.
    """
    chosen = [panel for panel in panels(results) if len(panel.lengths) >= fewest_lengths]
    known = [panel for panel in chosen if any(map(quantity.value, panel.cells))]
    if not known:
        return None
    drawn = known[:most]
    labels = titles.labels([panel.cells[0].workload for panel in drawn])
    looks = style.looks({cell.record.arm for panel in drawn for cell in panel.cells})
    num_columns = min(len(drawn), 3 if len(drawn) != 4 else 2)  # noqa: PLR2004 - four panels make a square

    def fill(axes: Axes, panel: Panel) -> None:
        _draw_panel(axes, panel, quantity, looks)
        title = f"{labels[panel.cells[0].workload.id]} {panel.other}".strip()
        pad = ABOVE_NUMBERS_PT if axes.texts else None
        axes.set_title("\n".join(textwrap.wrap(title, TITLE_LEN)), loc="left", pad=pad)
        axes.set_ylabel("" if drawn.index(panel) % num_columns else quantity.label)
        _scale(axes, quantity.unit)

    num_rows, width = math.ceil(len(drawn) / num_columns), max(LEAST_WIDTH, 0.6 + 3.8 * num_columns)
    return style.sheet(
        drawn,
        fill,
        (LEGEND_WIDTH + width, 1.0 + height * num_rows),
        title=f"{titles.caveat(results)}{quantity.title}",
        subtitle=titles.shared([cell.workload for panel in drawn for cell in panel.cells], "title"),
        note=" ".join(_notes(chosen, len(known) - len(drawn), quantity)),
        num_columns=num_columns,
        sharey=len(drawn) > 1,
    )


@lru_cache(maxsize=1)
def usual(results: Results) -> Picture | None:
    """Draw the picture of report.html, time against length; return None if no panel has ENOUGH_LENGTHS lengths."""
    return draw(results, TIME, ENOUGH_LENGTHS)


def _notes(chosen: Sequence[Panel], num_left_out: int, quantity: Quantity) -> Iterator[str]:
    """Yield sentences about missing points with their reasons, points beyond the plot, bars, and groups not plotted."""
    missing = [cell for panel in chosen for cell in panel.cells if not quantity.value(cell)]
    parts = []
    labels = titles.labels([panel.cells[0].workload for panel in chosen])
    titled = [(labels[panel.cells[0].workload.id], cell) for panel in chosen for cell in panel.cells]
    for (arm, status), members in grouped(missing, lambda cell: (cell.record.arm, cells.status(cell))).items():
        lengths, unseen = (
            ", ".join(dict.fromkeys(titles.length(cell.workload.axes()) for cell in members)),
            set(members),
        )
        where = dict.fromkeys(f'"{label}"' for label, cell in titled if cell in unseen)
        is_elsewhere = any(f'"{label}"' not in where for label, cell in titled if cell.record.arm == arm)
        place = f" in {', '.join(where)}" if is_elsewhere and len(where) <= FEW_PANELS else ""
        reason = "no value" if status == "ok" else status
        parts.append(f"{sanitize_line(str(arm), limit=24)} at {lengths}{place} ({reason})")
    if parts:
        yield f"Not shown: {'; '.join(parts)}."
    values = [(quantity.value(cell), quantity.ends(cell)) for panel in chosen for cell in panel.cells]
    if any(value and _is_beyond(value, quantity.unit) for value, _ in values):
        yield "Arrows with a number mark ratios beyond the plot."
    if any(value and _is_beyond(end, quantity.unit) for value, ends in values for end in ends if end):
        yield "A bar that reaches the plot's edge ends beyond it."
    if quantity is not MEMORY:
        yield "Bars are 95 % intervals over processes."
        if any(value and value != 1.0 and None in ends for value, ends in values):
            yield f"Points without a bar have too few processes for an interval: {FEWEST_PROCESSES} or more are needed."
    if num_left_out:
        yield f"{num_left_out} more group{'s' * (num_left_out > 1)} not plotted: see records.csv."


def _draw_panel(axes: Axes, panel: Panel, quantity: Quantity, looks: Mapping[Arm, style.Look]) -> None:
    lengths, lines = panel.lengths, grouped(filter(quantity.value, panel.cells), lambda cell: cell.record.arm)
    spread = SPREAD if len(lengths) == 1 else 0.0
    axes.set_xscale("log", base=2)
    beyond: dict[tuple[float, float], list[tuple[style.Look, float]]] = {}
    for number, (arm, members) in enumerate(lines.items()):
        shift = 2.0 ** (spread * ((number + 0.5) / len(lines) - 0.5))
        x = [shift * cell.workload.axes()[panel.axis] for cell in members]
        values = [quantity.value(cell) or 1.0 for cell in members]
        y = [math.nan if _is_beyond(value, quantity.unit) else value for value in values]
        lows, highs = zip(*map(quantity.ends, members), strict=True)
        sides = [_bar_ends(lows, y, quantity.unit), _bar_ends(highs, y, quantity.unit)]
        style.draw_line(axes, arm, looks[arm], x, y, sides)
        for cell, value in zip(members, values, strict=True):
            if _is_beyond(value, quantity.unit):
                place = float(cell.workload.axes()[panel.axis]), _inside(value, quantity.unit)
                beyond.setdefault(place, []).append((looks[arm], value))
    for place, points in beyond.items():
        style.draw_beyond(axes, place, points)
    style.ticks(axes.xaxis, FixedLocator([float(length) for length in lengths]))
    axes.tick_params(axis="x", labelrotation=45 if len(lengths) > MANY_TICKS else 0)
    axes.tick_params(axis="y", labelleft=True)
    axes.set_xlim(lengths[0] / EDGE / 2 ** (spread / 2), lengths[-1] * EDGE * 2 ** (spread / 2))
    axes.set_xlabel(X_LABELS[panel.axis])


def _bar_ends(ends: Sequence[float | None], values: Sequence[float], unit: str) -> list[float]:
    """Return the lower or the upper ends of bars, limited to the plot. A missing bar ends at the value of its point."""
    return [_inside(end or value, unit) for end, value in zip(ends, values, strict=True)]


def _inside(value: float, unit: str) -> float:
    """Clip a ratio (a value without a unit) to the range that the plot shows; return any other value unchanged."""
    return value if unit else min(max(value, 1 / FURTHEST), FURTHEST)


def _is_beyond(value: float, unit: str) -> bool:
    """Return whether the value is a ratio (a value without a unit) outside of the range that the plot shows."""
    return _inside(value, unit) != value


def _scale(axes: Axes, unit: str) -> None:
    """Make the vertical axis logarithmic, with ticks and, for ratios, a line at 1, the baseline's ratio."""
    axes.set_yscale("log", base=2)
    if unit == "s":
        style.log_ticks(axes.yaxis, unit)
        return
    style.ticks(axes.yaxis, LogLocator(base=4 if unit else 2, numticks=12), lambda value: show(value, unit, digits=2))
    if not unit:
        axes.axhline(1.0, color=style.INK, linewidth=1.0, zorder=2)


REPORT = {
    "picture": Report(
        summary="the one picture of a run: time against length, or ratios",
        file="picture.png",
        draw=lambda results: usual(results) or draw(results, RATIO),
        is_usual=True,
    ),
    **{
        f"{name}_plot": Report(summary=each.title, file=f"{name}_plot.png", draw=partial(draw, quantity=each))
        for name, each in {"latency": TIME, "ratio": RATIO, "memory": MEMORY}.items()
    },
}
