"""The look of each implementation, stable across pictures and versions, and the conversion of figures to files.

Colours differ for any kind of colour vision, and are never the only clue: each name has a marker too, and
names from outside are dashed. Source: Okabe and Ito, Color Universal Design, https://jfly.uni-koeln.de/color/; Paul
Tol, Colour schemes, https://personal.sron.nl/~pault/.
"""

import hashlib
import io
import math
import re
import textwrap
import tomllib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, NullLocator

from attnbench import plugins
from attnbench.reports import Picture
from attnbench.storage.records import BASE, Arm
from attnbench.units import plain, show

T = TypeVar("T")
SETTINGS = mpl.rc_params_from_file(Path(__file__).with_name("pictures.mplstyle"), use_default_template=False)
INK = SETTINGS["text.color"]
FEW_DECADES = 2.5
LIGHT, DARK = "#ffffff", "#0d1117"
"""Backgrounds of pictures, and of a report's page in a dark scheme."""
TEXT_CONTRAST, MARK_CONTRAST = 4.5, 3.0
"""Least contrast of text and of lines with their background. Source: WCAG 2.2, criteria 1.4.3 and 1.4.11."""
TITLE_DENSITY, NOTE_DENSITY = 11.7, 16.5
"""Characters per inch in a title and in a note."""
PNG: dict[str, Any] = {"metadata": {"Software": None}, "pil_kwargs": {"compress_level": 3}}
"""Saves a third of the time of the usual compression, for 2 % more bytes."""


Marker = str | tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Look:
    """Colour, marker and line of one implementation.

    Widths differ so that coinciding lines and markers stay visible as rings: wide below, narrow on top.
    """

    colour: str
    marker: Marker
    line: str | tuple[int, tuple[int, ...]] = "-"
    width: float

    @property
    def size(self) -> float:
        """The marker's size in points."""
        return 4.2 + 1.7 * self.width


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, from 1 to 21. Source: WCAG 2.2, "contrast ratio"."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    knee = 0.04045  # below it sRGB is linear
    linear = [part / 12.92 if part <= knee else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def readable(colour: str, ground: str, least: float = TEXT_CONTRAST) -> str:
    """Mix a colour with black (on a light background) or white (on a dark one) to a contrast of at least `least`."""
    far = 0.0 if _luminance(ground) > 0.5 else 1.0  # noqa: PLR2004 - half way from black to white
    red, green, blue = to_rgb(colour)
    shares = [step / 20 for step in range(21)]
    mixed = (to_hex((red + (far - red) * k, green + (far - green) * k, blue + (far - blue) * k)) for k in shares)
    return next(each for each in mixed if contrast(each, ground) >= least)


_COLOURS = ("#AA3377", "#228833", "#4477AA", "#EE6677", "#997700", "#117733", "#994455", "#555555")
_MARKERS: tuple[Marker, ...] = ((4, 1, 0), (4, 1, 45), (6, 1, 0), (8, 1, 0), (3, 1, 0), "d")  # stars: from outside
_LINES = ((0, (5, 2)), (0, (3, 1, 1, 1)), (0, (7, 2, 2, 2)))


@cache
def built_in() -> dict[str, Look]:
    """The looks of the project's own implementations, from their catalogue."""
    text = files(plugins.PACKAGE).joinpath("catalogue.toml").read_text(encoding="utf-8")
    return {name: Look(**look) for name, look in tomllib.loads(text)["looks"].items()}


def look(arm: Arm | str) -> Look:
    """The look of an implementation: fixed for built-in ones, derived from a hash of the name for all others.

    A variant such as fused+compile is dotted and thinner, with the colour and the marker of its base implementation; so
    is the base of two sides.
    """
    name, side = (arm, "") if isinstance(arm, str) else (arm.implementation, arm.side)
    base, option = plugins.variant(name)
    if option or side == BASE:
        return replace(look(base), line=(0, (1, 1)), width=1.4)  # dotted and thin
    if name in built_in():
        return built_in()[name]
    digest = hashlib.sha256(name.encode(errors="replace")).digest()
    return Look(
        colour=_COLOURS[digest[0] % len(_COLOURS)],
        marker=_MARKERS[digest[1] % len(_MARKERS)],
        line=_LINES[digest[2] % len(_LINES)],
        width=2.4,
    )


def label(arm: Arm | str) -> str:
    """A name or an arm for legends and axes: one short line."""
    return plain(str(arm), limit=24) or "(no name)"


def ticks(axis: Axis, locator: Locator, text: Callable[[float], str] = "{:g}".format) -> None:
    """Put ticks at the places of `locator`, with their texts, and none between them."""
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def log_ticks(axis: Axis, unit: str) -> None:
    """Ticks at 1, 2, 5 of each decade, or only at decades if there are many, with units: "500 us"."""
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
    finish: Callable[[Axes, T], None] = lambda *_: None,
    **options: Any,  # noqa: ANN401 - the arguments of subplots
) -> Picture:
    """A figure with rows of panels drawn by `draw`, a title, a subtitle, and a note at its foot.

    `size` is in inches without the note. `finish` is called after all panels are drawn, since they may share a scale.
    """
    width, height = size
    wrapped = textwrap.wrap(note, int(width * NOTE_DENSITY))
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height + 0.17 * len(wrapped)), layout="constrained")
        num_rows = math.ceil(len(panels) / num_columns)
        grid = list(figure.subplots(num_rows, num_columns, squeeze=False, **options).ravel())
        for axes in grid[len(panels) :]:
            axes.remove()
        for each in (draw, finish):
            for axes, panel in zip(grid, panels, strict=False):
                each(axes, panel)
        room = max(24, int((width - 0.2) * TITLE_DENSITY))
        lines = [line for text in (title, subtitle) for line in textwrap.wrap(text, room)]
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=11.5)
        figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=8, color="#555555")
    return picture(figure, title, f"{title}: {subtitle}. {note}".rstrip())


def picture(figure: Figure, title: str, caption: str) -> Picture:
    """The figure as SVG, with the same bytes at every call, and as PNG."""
    vector = _drawn(FigureCanvasSVG(figure).print_svg, metadata={"Date": None, "Creator": None})
    figure.set_layout_engine("none")  # the layout is final: recomputing it takes as long as drawing
    figure.set_dpi(160)
    return Picture(
        title=title,
        caption=caption,
        svg=_fit_for_a_page(vector.decode()),
        png=cache(lambda: _drawn(FigureCanvasAgg(figure).print_png, **PNG)),  # cached: a second drawing differs
    )


def _drawn(write: Callable[..., object], **options: object) -> bytes:
    """Bytes of a canvas. `Figure.savefig` would draw everything twice, the first time for the layout."""
    file = io.BytesIO()
    with mpl.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # characters that the font lacks are drawn as boxes
        write(file, **options)
    return file.getvalue()


def _fit_for_a_page(svg: str) -> str:
    """The SVG without XML declaration, document type, comments and metadata, with names renumbered.

    Matplotlib names a clip by a digest of all digits of its place, the last of which may differ between calls.
    """
    bare = re.sub(r"^.*?(?=<svg )|<!--.*?-->\s*|<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    digest = re.compile(r"(?<=[\"#])([hmp])[0-9a-f]{10}\b")
    numbers: dict[str, int] = {}
    return digest.sub(lambda name: f"{name[1]}{numbers.setdefault(name[0], len(numbers))}", bare)
