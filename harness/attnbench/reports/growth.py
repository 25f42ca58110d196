"""Growth of memory as sentences, JSON, and a picture of the curves."""

import math
from collections.abc import Sequence

import numpy as np

from attnbench.analysis.growth import Growth
from attnbench.analysis.table import rows
from attnbench.reports import Picture, cells, grouped
from attnbench.reports.lines import X_LABELS
from attnbench.reports.plot import Line, Panel, Point, plot
from attnbench.storage.records import Arm
from attnbench.units import plain, show

CURVES = "Peak memory of one call above its inputs, and where the limit is reached"
BEYOND = 4.0
"""Largest extension of a curve beyond the longest length, as a factor, if its limit is further away."""
NOTE = "Solid: measured. Dashed: the fitted curve a + b T + c T^2, drawn to the limit or to 4 times the longest length."


def sentence(growth: Growth) -> str:
    """Describe the growth of one implementation in a line."""
    fit, letter, reach = growth.fit, growth.panel.letter, growth.reach
    name, limit = plain(growth.implementation), show(growth.limit_bytes, "bytes")
    if fit is None:
        return f"{name}: growth needs three lengths or more; {len(growth.points)} could be measured"
    fitted = f"fitted over {letter}={fit.lengths[0]} to {fit.lengths[-1]}"
    text = f"memory grows with {letter}^{growth.exponent:.2f}"
    if growth.limit_bytes <= 0:
        return f"{name}: {text}, {fitted}"
    if reach is None:
        return f"{name}: {limit} are never reached, or are less than it takes at any length; {text}, {fitted}"
    between = "" if reach.is_exact else f" ({number(reach.low)} to {number(reach.high)})"
    return f"{name}: {limit} are reached at {letter}={number(reach.point)}{between}; there {text}, {fitted}"


def number(value: float) -> str:
    """A length with at most four digits."""
    digits = max(0, len(str(int(value))) - 4)
    return f"{round(value, -digits):.0f}"


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
        "fitted_lengths": fit and list(fit.lengths),
        "exponent": growth.exponent,
        "curve_bytes": fit and list(fit.parts),
        "limit_bytes": growth.limit_bytes or None,
        "reached_at": reach and reach.point,
        "reached_at_low": reach and reach.low,
        "reached_at_high": reach and reach.high,
    }


def curves(growths: Sequence[Growth]) -> Picture:
    """Draw measurements, fitted curve and limit, for each panel."""
    drawn = [_panel(title, members) for title, members in by_panel(growths).items()]
    return plot(drawn, title=CURVES, y_label="peak memory", unit="bytes", note=NOTE)


def _panel(title: str, members: Sequence[Growth]) -> Panel:
    limit = max(growth.limit_bytes for growth in members)
    lengths = sorted({length for growth in members for length, _ in growth.points})
    return Panel(
        title=f"{title}, limit {show(limit, 'bytes')}" if limit else title,
        lines=[_line(growth) for growth in members],
        x_label=X_LABELS[members[0].panel.axis],
        ticks={length: number(length) for length in lengths},
        limit=limit,
    )


def _line(growth: Growth) -> Line:
    points = [Point(x=length, y=value) for length, value in growth.points]
    arm, fit, reach = Arm(implementation=growth.implementation), growth.fit, growth.reach
    if fit is None:
        return Line(arm=arm, points=points)
    furthest = min(reach.point if reach else math.inf, BEYOND * fit.lengths[-1])
    lengths = np.geomspace(fit.lengths[0], max(furthest, *(point.x for point in points)), 65)
    return Line(arm=arm, points=points, curve=[(length, fit.predict(length)) for length in lengths])
