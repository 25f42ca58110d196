"""The look of each implementation, stable across pictures and versions, and the frame of all pictures.

People with any kind of colour vision can distinguish the colours. As a second clue, each implementation has a marker,
and the lines of implementations that are not built in are dashed. Source: Okabe and Ito, Color Universal Design,
https://jfly.uni-koeln.de/color/; Paul Tol, Colour schemes, https://personal.sron.nl/~pault/.
"""

import hashlib
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from attnbench import plugins
from attnbench.reports import Picture
from attnbench.storage.records import BASE, Arm
from attnbench.units import sanitize_line, show, significant

T = TypeVar("T")
A = TypeVar("A", Arm, str)
SETTINGS = mpl.rc_params_from_file(Path(__file__).with_name("pictures.mplstyle"), use_default_template=False)
INK = SETTINGS["text.color"]
FEW_DECADES = 2.5  # a logarithmic axis with more decades has ticks only at decades
BEYOND_PT = 19.0  # distance in points between markers that belong to the same place at the plot's edge
TITLE_DENSITY, NOTE_DENSITY = 11.7, 16.5  # characters per inch in a title and in a note
Look = Mapping[str, Any]
"""Colour, marker and line of one implementation, as arguments of `Axes.plot`.

Line widths differ, and narrow lines are drawn above wide ones, so that lines at the same place stay visible.
"""
_COLOURS = ("#AA3377", "#228833", "#4477AA", "#EE6677", "#997700", "#44AA99", "#DDAA33", "#555555")
_MARKERS = ((4, 1, 0), (4, 1, 45), (6, 1, 0), (8, 1, 0), (3, 1, 0), "d")  # for implementations that are not built in
_LINES = ((0, (5, 2)), (0, (3, 1, 1, 1)), (0, (7, 2, 2, 2)))
_DOTTED = {"linestyle": (0, (1, 1)), "linewidth": 1.4}


def look(arm: Arm | str) -> Look:
    """Return the look of an implementation: fixed for built-in ones, derived from a hash of the name for all others.

    A variant such as fused+compile has the colour and the marker of fused, but a dotted and thinner line. If two states
    of the code are compared, the base has the colour and the marker of the candidate, but a dotted and thinner line.
    """
    name, side = (arm, "") if isinstance(arm, str) else (arm.implementation, arm.side)
    base, option = plugins.variant(name)
    if option or side == BASE:
        return {**look(base), **_DOTTED}
    if (own := plugins.catalogue()["looks"].get(name)) is not None:
        return {"color": own["colour"], "marker": own["marker"], "linewidth": own["width"]}
    digest = hashlib.sha256(name.encode(errors="replace")).digest()
    return {
        "color": _COLOURS[digest[0] % len(_COLOURS)],
        "marker": _MARKERS[digest[1] % len(_MARKERS)],
        "linestyle": _LINES[digest[2] % len(_LINES)],
        "linewidth": 2.4,
    }


def looks(arms: Iterable[A]) -> dict[A, Look]:
    """Choose a look for each implementation of a picture, if possible no two with the same colour and marker.

    Built-in implementations keep their look. Others keep their colour, and get another marker if theirs is taken.
    """
    own, taken, chosen = plugins.catalogue()["looks"], list[tuple[object, object]](), dict[A, Look]()
    for arm in sorted(arms, key=lambda arm: (str(arm) not in own, str(arm))):
        first = look(arm)
        markers = [first["marker"], *_MARKERS]
        colours = [first["color"], *_COLOURS]
        options = [{**first, "color": colour, "marker": marker} for colour in colours for marker in markers]
        markers_taken = [marker for _, marker in taken]
        chosen[arm] = min(
            options, key=lambda each: ((each["color"], each["marker"]) in taken, each["marker"] in markers_taken)
        )
        taken.append((chosen[arm]["color"], chosen[arm]["marker"]))
    return chosen


def draw_line(  # noqa: PLR0913, PLR0917 - parameters as in Axes.errorbar
    axes: Axes, arm: Arm, line: Look, x: Sequence[float], y: Sequence[float], ends: Sequence[Sequence[float]]
) -> None:
    """Draw a line with its markers, and bars from `ends[0]` (lower) to `ends[1]` (upper) where these differ from `y`.

    Where `y` is NaN, the line has a gap.
    """
    name = sanitize_line(str(arm), limit=24) or "(no name)"

    def lengths(side: Sequence[float]) -> list[float]:
        return [abs(end - value) for end, value in zip(side, y, strict=True)]

    bars = list(map(lengths, ends))
    if any(map(any, bars)):
        axes.errorbar(x, y, yerr=bars, fmt="none", ecolor=line["color"], elinewidth=1.1, capsize=2.2)
    axes.plot(x, y, label=name, alpha=0.85, zorder=4 - line["linewidth"] / 5, **line, **_marker(line))


def draw_beyond(axes: Axes, place: tuple[float, float], points: Sequence[tuple[Look, float]]) -> None:
    """Draw ratios beyond the plot side by side at `place`, a point (x, y) of the plot's edge in data coordinates.

    Each of `points`, a look and a ratio, gets a marker, an arrow, and the ratio as a number.
    """
    is_above = place[1] > 1
    for number, (line, ratio) in enumerate(points):
        x = BEYOND_PT * (number - (len(points) - 1) / 2)
        there = axes.transData + ScaledTranslation(x / 72, 0, axes.figure.dpi_scale_trans)  # 72 points are an inch
        marker = {**line, **_marker(line), "linestyle": "none"}
        axes.plot(*place, transform=there, zorder=5, **marker)
        text = f"{'↑' if is_above else '↓'}{significant(ratio, 2)}"
        offset: dict[str, Any] = {"xytext": (x, 9 if is_above else -9), "textcoords": "offset points"}
        axes.annotate(
            text, place, **offset, color=line["color"], ha="center", va="center", fontsize=7, annotation_clip=False
        )


def _marker(line: Look) -> dict[str, Any]:
    return {"ms": 4.2 + 1.7 * line["linewidth"], "mec": "white", "mew": 0.6, "clip_on": False}


def ticks(axis: Axis, locator: Locator, text: Callable[[float], str] = "{:g}".format) -> None:
    """Put labelled ticks at the positions of `locator`, and no minor ticks between them."""
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def log_ticks(axis: Axis, unit: str) -> None:
    """Put ticks with units ("500 us") at 1, 2 and 5 of each decade, or only at decades if there are many."""
    low, high = axis.get_view_interval()
    few = math.log10(high / low) <= FEW_DECADES
    locator = LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=12)
    ticks(axis, locator, lambda value: show(value, unit, digits=1))


def sheet(  # noqa: PLR0913 - one parameter for each text
    panels: Sequence[T],
    draw: Callable[[Axes, T], None],
    size: tuple[float, float],
    *,
    title: str,
    subtitle: str = "",
    note: str = "",
    num_columns: int = 1,
    **options: Any,  # noqa: ANN401 - the arguments of subplots
) -> Picture:
    """Draw a figure of panels in rows, with a title, a subtitle, a note at its foot, and a legend of all lines.

    `draw` fills the axes of one panel. `size` is (width, height) in inches, without the note.
    """
    width, height = size
    wrapped = textwrap.wrap(note, int(width * NOTE_DENSITY))
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height + 0.17 * len(wrapped)), layout="constrained")
        FigureCanvasAgg(figure)
        num_rows = math.ceil(len(panels) / num_columns)
        grid = list(figure.subplots(num_rows, num_columns, squeeze=False, **options).ravel())
        for axes in grid[len(panels) :]:
            axes.remove()
        for axes, panel in zip(grid, panels, strict=False):
            draw(axes, panel)
        lines = {
            text: line for axes in figure.axes for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        if lines:
            figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize=8.5)
        room = max(24, int((width - 0.2) * TITLE_DENSITY))
        texts = [line for text in (title, subtitle) for line in textwrap.wrap(text, room)]
        figure.suptitle("\n".join(texts), x=0.01, ha="left", fontsize=11.5)
        figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=8, color="#555555")
    return Picture(title=title, caption=f"{title}: {subtitle}. {note}".rstrip(), figure=figure)
