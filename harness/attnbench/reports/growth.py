"""Growth of memory, for people: sentences, JSON, and a picture of the curves."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from attnbench.analysis.growth import Fit, Growth
from attnbench.analysis.table import rows
from attnbench.reports import Picture, cells, grouped
from attnbench.reports.lines import X_LABELS
from attnbench.reports.plot import Line, Panel, Point, plot
from attnbench.storage.records import Arm
from attnbench.units import plain, show
from attnbench.workloads.workload import DIRECTIONS

CURVES = "Peak memory of one call above its inputs, and where the limit is reached"
BEYOND = 4.0
"""Largest extension of a curve beyond the longest length, as a factor, if its limit is further away."""
NOTE = "Solid: measured. Dashed: the fitted curve a + b T + c T^2, drawn to the limit or to 4 times the longest length."


def sentence(growth: Growth) -> str:
    """Describe the growth of one implementation in a line."""
    fit, letter = growth.fit, growth.panel.letter
    if fit is None:
        name = plain(growth.implementation)
        return f"{name}: growth needs three lengths or more; {len(growth.points)} could be measured"
    exponent = f"{letter}^{fit.exponent:.2f} ({fit.low:.2f} to {fit.high:.2f})"
    over = f"over {letter}={fit.lengths[0]} to {fit.lengths[-1]}, {letter}^{fit.end:.2f} at the end"
    parts = [_reached(growth, fit), f"memory grows with {exponent} {over}"]
    return f"{plain(growth.implementation)}: {'; '.join(filter(None, parts))}"


def _reached(growth: Growth, fit: Fit) -> str:
    letter, limit = growth.panel.letter, show(growth.limit_bytes, "bytes")
    if growth.limit_bytes <= 0:
        return ""
    if growth.reach is None:
        return f"{limit} are never reached, or are less than it takes at any length"
    found = growth.reach
    between = "" if found.is_exact else f" ({number(found.low)} to {number(found.high)})"
    there = f"{letter}^{fit.slope(found.point):.2f}"
    return f"{limit} are reached at {letter}={number(found.point)}{between}, growing with {there}"


def number(value: float) -> str:
    """A length with at most four digits."""
    digits = max(0, len(str(int(value))) - 4)
    return f"{round(value, -digits):.0f}"


def answered_for(growths: Sequence[Growth]) -> str:
    """The directions of the measured calls, and how to measure the others."""
    directions = dict.fromkeys(growth.workload.direction for growth in growths)
    others = [each for each in DIRECTIONS if each not in directions]
    words = " and ".join(each.replace("_", " and ") for each in directions) or "no direction"
    return f"These are calls of {words}; for others: --set direction={','.join(others)}."


def by_panel(growths: Sequence[Growth]) -> dict[str, list[Growth]]:
    """Implementations by the title of their panel."""
    return grouped(growths, lambda growth: f"{cells.shared(rows(growth.panel.cells))} {growth.panel.other}".rstrip())


def facts(growth: Growth) -> dict[str, object]:
    """All facts of a growth, for JSON."""
    fit, reach = growth.fit, growth.reach
    return {
        "workload": growth.workload.id,
        "direction": growth.workload.direction,
        "axis": growth.panel.axis,
        "implementation": growth.implementation,
        "lengths": [length for length, _ in growth.points],
        "peak_bytes": [value for _, value in growth.points],
        "fitted_lengths": None if fit is None else list(fit.lengths),
        "exponent": None if fit is None else fit.exponent,
        "exponent_low": None if fit is None else fit.low,
        "exponent_high": None if fit is None else fit.high,
        "exponent_at_the_end": None if fit is None else fit.end,
        "curve_bytes": None if fit is None else list(fit.parts),
        "limit_bytes": growth.limit_bytes or None,
        "reached_at": None if reach is None else reach.point,
        "reached_at_low": None if reach is None else reach.low,
        "reached_at_high": None if reach is None else reach.high,
    }


def curves(growths: Sequence[Growth]) -> Picture:
    """Draw measurements, fitted curve and limit, for each panel."""
    drawn = [_panel(title, members) for title, members in by_panel(growths).items()]
    return plot(drawn, title=CURVES, y_label="peak memory", unit="bytes", note=NOTE)


def _panel(title: str, members: Sequence[Growth]) -> Panel:
    limit = max(growth.limit_bytes for growth in members)
    lines = [_line(growth) for growth in members]
    lengths = {point.x for line in lines for point in line.points}

    def draw_limit(axes: Axes) -> None:
        if limit:
            axes.axhline(limit, color="#AA3377", linewidth=1.2, zorder=1)

    return Panel(
        title=f"{title}, limit {show(limit, 'bytes')}" if limit else title,
        lines=lines,
        x_label=X_LABELS[members[0].panel.axis],
        ticks={length: number(length) for length in sorted(lengths)},
        draw_more=draw_limit,
    )


def _line(growth: Growth) -> Line:
    points = [Point(x=length, y=value) for length, value in growth.points]
    arm, fit, reach = Arm(implementation=growth.implementation), growth.fit, growth.reach
    if fit is None:
        return Line(arm=arm, points=points)
    furthest = min(reach.point if reach else math.inf, BEYOND * fit.lengths[-1])
    lengths = np.geomspace(fit.lengths[0], max(furthest, *(point.x for point in points)), 65)
    label = f"  ~{growth.panel.letter}^{fit.exponent:.2f}"
    return Line(arm=arm, points=points, label=label, curve=[(length, fit.predict(length)) for length in lengths])
