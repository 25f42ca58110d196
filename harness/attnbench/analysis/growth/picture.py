"""Growth as a picture: what was measured, the curve that goes on, the limit, and the calls that checked it."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from attnbench.analysis.growth.series import Growth
from attnbench.analysis.growth.told import by_panel, number
from attnbench.reports import Picture, style
from attnbench.storage.records import Status
from attnbench.units import show

TITLE = "Peak memory of one call above its inputs, and where the limit is reached"
BEYOND = 4.0
"""How far a curve is drawn beyond what was measured, where its limit is further still."""
NOTE = (
    "Solid: measured. Dashed: the fitted curve a + b T + c T^2, drawn to the limit or to 4 times the longest length. "
    "Hollow: a call near the limit, measured. Cross: a call that ran out of memory."
)


def pictures(growths: Sequence[Growth]) -> list[Picture]:
    """One for each panel."""
    return [_picture(title, members) for title, members in by_panel(growths).items()]


def _picture(title: str, members: Sequence[Growth]) -> Picture:
    with mpl.rc_context(style.SETTINGS):
        figure = Figure(figsize=(9.2, 5.2), layout="constrained")
        axes = figure.subplots()
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for growth in members:
            _line(axes, growth)
        handles = [_handle(growth) for growth in members]
        if limit := max((growth.limit_bytes for growth in members), default=0.0):
            axes.axhline(limit, color="#AA3377", linewidth=1.2, zorder=1)
            handles.append(Line2D([], [], color="#AA3377", linewidth=1.2, label=f"limit: {show(limit, 'bytes')}"))
        axes.set_xlabel("sequence length T" if members[0].panel.axis == "seq_len" else "key length S")
        axes.set_ylabel("peak memory")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
        axes.yaxis.set_major_locator(LogLocator(base=4, numticks=12))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value, "bytes", digits=1)))
        figure.legend(handles=handles, loc="outside right upper", handlelength=3.2)
        figure.suptitle(f"{TITLE}\n{title}", x=0.01, ha="left", fontsize=11.5)
        note = "\n".join(textwrap.wrap(NOTE, 150))
        figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color="#555555")
    return style.picture(figure, TITLE, f"{TITLE}: {title}. {NOTE}")


def _handle(growth: Growth) -> Line2D:
    power = "" if growth.fit is None else f"  ~T^{growth.fit.exponent:.2f}"
    look = style.look(growth.implementation)
    return Line2D([], [], label=style.label(growth.implementation) + power, mec="white", mew=0.6, **look.options)


def _line(axes: Axes, growth: Growth) -> None:
    look = style.look(growth.implementation)
    x, y = zip(*growth.points, strict=True)
    axes.plot(x, y, mec="white", mew=0.6, **look.options)
    if growth.fit is not None:
        last, reach = growth.fit.lengths[-1], growth.reach
        furthest = [outcome.length for outcome in growth.outcomes if outcome.status is not None]
        end = max([min(reach.point if reach else math.inf, BEYOND * last), last, *furthest])
        further = np.geomspace(growth.fit.lengths[0], end, 65)
        curve = [growth.fit.predict(length) for length in further]
        axes.plot(further, curve, color=look.colour, linestyle=(0, (4, 3)), linewidth=1.2, zorder=1.5)
    for outcome in growth.outcomes:
        if outcome.measured_bytes is not None:
            ring: dict[str, Any] = {"ms": look.size + 2, "mfc": "white", "mec": look.colour, "mew": 1.6}
            axes.plot(outcome.length, outcome.measured_bytes, linestyle="", marker=look.marker, zorder=5, **ring)
        elif outcome.status is Status.out_of_memory:
            cross: dict[str, Any] = {"ms": 9, "mec": look.colour, "mew": 2.2}
            axes.plot(outcome.length, outcome.predicted_bytes, linestyle="", marker="x", zorder=5, **cross)
