"""Growth of memory, for people: sentences, tables, JSON, and pictures of the curves."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes

from attnbench.analysis.growth import Fit, Growth
from attnbench.analysis.results import Results
from attnbench.analysis.table import MetricColumn, metric_columns, rows
from attnbench.reports import Picture, cells, grouped
from attnbench.reports.lines import X_LABELS
from attnbench.reports.plot import Line, Panel, Point, plot
from attnbench.storage.records import Arm
from attnbench.units import MISSING, escaped, markdown_table, plain, show
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
    return grouped(growths, lambda growth: f"{cells.shared(growth.panel.cells)} {growth.panel.other}".rstrip())


def markdown(growths: Sequence[Growth], results: Results, pictures: Sequence[str]) -> str:
    """Format the page: the question, the sentences, metrics at the longest length, and the pictures."""
    parts = ["# Memory against length", "\n".join(_asked(growths, results))]
    for title, members in by_panel(growths).items():
        parts += [f"## {escaped(title)}", "\n".join(f"- {escaped(sentence(growth))}." for growth in members)]
        parts.append(markdown_table(_metrics(members, metric_columns(results))))
    parts.append("\n".join(f"![{name}]({name}.png)" for name in pictures))
    return "\n\n".join(parts).rstrip() + "\n"


def _asked(growths: Sequence[Growth], results: Results) -> Iterator[str]:
    environment = next((record.environment for record in results.records if record.environment is not None), None)
    where = "" if environment is None else f" on {escaped(environment.cpu)}, torch {environment.versions.get('torch')}"
    limits = sorted({growth.limit_bytes for growth in growths if growth.limit_bytes})
    ends = list(dict.fromkeys([*limits[:1], *limits[-1:]]))
    at = f", with a limit of {' to '.join(show(limit, 'bytes') for limit in ends)}" if ends else ""
    yield f"Written by `attnbench growth`{where}{at}. {answered_for(growths)}"
    yield "Bytes are those of one call beyond its inputs. Memory is counted and does not scatter: the interval of an"
    yield "exponent says how well a line fits."


def _metrics(members: Sequence[Growth], metrics: Sequence[MetricColumn]) -> list[dict[str, str]]:
    """Every metric of each implementation at its longest length; empty columns are left out."""
    texts = [
        {"implementation": cells.arm(row), "length": cells.length(row)}
        | {metric.heading: cells.metric(row, metric) for metric in metrics}
        for growth in members
        for row in rows(growth.panel.cells)
        if row["implementation"] == growth.implementation and row[growth.panel.axis] == growth.points[-1][0]
    ]
    shown = [column for column in texts[0] if any(text[column] != MISSING for text in texts)]
    return [{column: text[column] for column in shown} for text in texts]


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


def curves(growths: Sequence[Growth]) -> list[Picture]:
    """Draw measurements, fitted curve and limit, for each panel."""
    return [
        plot([_panel(title, members)], title=CURVES, y_label="peak memory", unit="bytes", note=NOTE)
        for title, members in by_panel(growths).items()
    ]


def _panel(title: str, members: Sequence[Growth]) -> Panel:
    limit = max(growth.limit_bytes for growth in members)
    lines = [_line(growth) for growth in members]
    lengths = {point.x for line in lines for point in line.points}

    def draw_limit(axes: Axes) -> None:
        if limit:
            axes.axhline(limit, color="#AA3377", linewidth=1.2, zorder=1, label=f"limit: {show(limit, 'bytes')}")

    return Panel(
        title=title,
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
