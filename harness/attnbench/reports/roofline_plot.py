"""Useful FLOPs per second against arithmetic intensity, under the ceilings that the run measured.

Source: S. Williams, A. Waterman, D. Patterson, Roofline, 2009, https://doi.org/10.1145/1498765.1498785.
"""

import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from attnbench.analysis.cached import once
from attnbench.analysis.results import Results
from attnbench.reports import Picture, Report, style
from attnbench.reports.lines import log_ticks
from attnbench.reports.table import Row, shown
from attnbench.storage.ceilings import Ceilings, Place
from attnbench.units import show
from attnbench.workloads.counts import arithmetic_intensity

TITLE = "Roofline: useful FLOP/s against arithmetic intensity (higher is nearer to the ceiling)"
PANELS_A_PAGE = 4
ROOFS: tuple[tuple[str, Any, float], ...] = (("copy in a cache", "--", 0.0), ("copy in main memory", "-", math.inf))
"""Name, line (as matplotlib has it) and bytes of the copies whose slope is drawn."""
NOTE = (
    "A point is a cell: useful FLOPs (of visible pairs) over its median time; intensity is useful FLOPs for each "
    "compulsory byte. Flat: the fastest matrix product of this run; slopes: the fastest copies. Small cells stay in a "
    "cache and may lie above the slope of main memory."
)
ABOVE = (
    " A cell above the flat line makes its products in another dtype than its inputs have, or the line was taken in a "
    "bad moment."
)


@once
def pictures(results: Results) -> list[Picture]:
    """One panel for each device, dtype and number of threads whose ceilings were measured."""
    places: dict[Place, list[Row]] = {}
    for row in shown(results):
        found = results.ceilings.get(row.workload.place)
        if row.rates is not None and found is not None and found.matmul is not None and row.rates.flops_per_s > 0:
            places.setdefault(row.workload.place, []).append(row)
    keys = list(places)
    pages = [keys[start : start + PANELS_A_PAGE] for start in range(0, len(keys), PANELS_A_PAGE)]
    return [_picture({key: places[key] for key in page}, results.ceilings) for page in pages]


def _picture(places: dict[Place, list[Row]], ceilings: dict[Place, Ceilings]) -> Picture:
    num_columns = min(2, len(places))
    num_rows = math.ceil(len(places) / num_columns)
    width = 3.6 + 4.8 * num_columns
    note = NOTE + (
        ABOVE if any(_is_above(row, ceilings[key]) for key, found in places.items() for row in found) else ""
    )
    wrapped = textwrap.wrap(note, int(width * 16.5))
    with mpl.rc_context(style.SETTINGS):
        size = (width, 1.2 + 3.6 * num_rows + 0.17 * len(wrapped))
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
        for axes, (key, found) in zip(grid, places.items(), strict=False):
            _draw_panel(axes, ceilings[key], found)
        for axes in grid[len(places) :]:
            axes.remove()
        _legend(figure, (row for found in places.values() for row in found))
        figure.suptitle(TITLE, x=0.01, ha="left", fontsize=11.5)
        figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=8, color="#555555")
    told = "; ".join(f"{_title(key)}: {_told(ceilings[key])}" for key in places)
    return style.picture(figure, TITLE, f"{TITLE}. {told}. {note}")


def _is_above(row: Row, found: Ceilings) -> bool:
    return row.rates is not None and found.matmul is not None and row.rates.flops_per_s > found.matmul.rate


def _draw_panel(axes: Axes, found: Ceilings, members: list[Row]) -> None:
    matmul = found.matmul
    assert matmul is not None
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    intensities = [arithmetic_intensity(row.workload) for row in members]
    main = found.copy(math.inf)
    ridge = min(intensities) if main is None else matmul.rate / main.rate  # left of it, memory decides
    x = np.geomspace(min(*intensities, ridge / 2) / 2, max(*intensities, ridge) * 2, 65)
    for _, line, num_bytes in ROOFS:
        copy = found.copy(num_bytes)
        if copy is not None:
            roof = np.minimum(matmul.rate, copy.rate * x)
            axes.plot(x, roof, color=style.INK, linestyle=line, linewidth=1.3, zorder=1.5)
    axes.text(x[-1], matmul.rate * 1.06, show(matmul.rate, "flops/s"), ha="right", va="bottom", fontsize=8)
    for row, intensity in zip(members, intensities, strict=True):
        seen = style.look(row.implementation)
        rated = row.rates
        assert rated is not None
        axes.plot(intensity, rated.flops_per_s, zorder=4 - seen.width / 5, **_dot(seen))
    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(
        top=max(matmul.rate * 2.2, *(1.5 * row.rates.flops_per_s for row in members if row.rates is not None))
    )
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    log_ticks(axes.yaxis, "flops/s")
    axes.set_xlabel("arithmetic intensity (useful FLOP for each compulsory byte)")
    axes.set_ylabel("useful FLOP/s")
    axes.set_title(_title(found.key), loc="left")


def _title(key: Place) -> str:
    device, dtype, num_threads = key
    threads = f"{num_threads} thread{'s' * (num_threads > 1)}" if num_threads else "a thread for each core"
    return f"{dtype} on {device}, {threads}"


def _told(found: Ceilings) -> str:
    """The ceilings in words."""
    copies = [(name, found.copy(num_bytes)) for name, _, num_bytes in ROOFS]
    told = [f"matrix product {show(None if found.matmul is None else found.matmul.rate, 'flops/s')}"]
    return ", ".join([*told, *(f"{name} {show(None if c is None else c.rate, 'bytes/s')}" for name, c in copies)])


def _dot(seen: style.Look) -> dict[str, Any]:
    """What matplotlib's lines take: the marker alone."""
    return {**seen.options, "linestyle": "none", "markersize": 0.8 * seen.size, "mec": "white", "mew": 0.5}


def _legend(figure: Figure, members: Iterable[Row]) -> None:
    names = dict.fromkeys(row.implementation for row in members)
    dots = [Line2D([], [], label=style.label(name), **_dot(style.look(name))) for name in names]
    roofs = [Line2D([], [], color=style.INK, linestyle=line, linewidth=1.3, label=name) for name, line, _ in ROOFS]
    figure.legend(handles=[*dots, *roofs], loc="outside right upper", handlelength=2.6)


def write(results: Results, folder: Path) -> list[Path]:
    """Write roofline_plot.svg and .png."""
    return style.save(pictures(results), folder, "roofline_plot")


REPORT = Report(summary="FLOP/s against arithmetic intensity under the ceilings", write=write, draw=pictures)
