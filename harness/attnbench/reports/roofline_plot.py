"""Useful FLOPs per second against arithmetic intensity, under the ceilings that the run measured.

Source: S. Williams, A. Waterman, D. Patterson, Roofline, 2009, https://doi.org/10.1145/1498765.1498785.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from attnbench.analysis.results import Results
from attnbench.analysis.table import arm_of, rows
from attnbench.reports import Picture, style
from attnbench.reports.cells import WORDS, shown
from attnbench.storage.records import Ceilings, Place
from attnbench.units import show

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


def pictures(results: Results) -> list[Picture]:
    """One panel for each device, dtype and number of threads whose ceilings were measured."""
    cells = shown(results)
    cells = cells[cells["flops_per_s"] > 0]
    found = []
    for (device, dtype, threads), members in cells.groupby(["device", "dtype", "num_threads"], sort=False):
        ceilings = results.ceilings.get((str(device), str(dtype), int(str(threads))))
        if ceilings is not None and ceilings.matmul is not None:
            found.append((ceilings, members))
    return [_picture(page) for page in style.pages(found, PANELS_A_PAGE)]


def _picture(panels: Sequence[tuple[Ceilings, pd.DataFrame]]) -> Picture:
    num_columns = min(2, len(panels))
    is_above = any((cells["flops_per_s"] > _matmul(ceilings)).any() for ceilings, cells in panels)
    arms = dict.fromkeys(arm_of(row) for _, cells in panels for row in rows(cells))
    dots = [Line2D([], [], label=style.label(arm), **_dot(style.look(arm))) for arm in arms]
    return style.sheet(
        panels,
        _draw_panel,
        (3.6 + 4.8 * num_columns, 1.2 + 3.6 * math.ceil(len(panels) / num_columns)),
        title=TITLE,
        note=NOTE + ABOVE * is_above,
        num_columns=num_columns,
        legend={"handles": dots, "handlelength": 2.6},
        described="; ".join(f"{_title(ceilings.key)}: {_described(ceilings)}" for ceilings, _ in panels),
    )


def _matmul(found: Ceilings) -> float:
    """The fastest matrix product, in FLOP/s."""
    assert found.matmul is not None
    return found.matmul.rate


def _draw_panel(axes: Axes, panel: tuple[Ceilings, pd.DataFrame]) -> None:
    found, cells = panel
    highest = _matmul(found)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    intensities = cells["arithmetic_intensity"]
    main = found.copy(math.inf)
    ridge = intensities.min() if main is None else highest / main.rate  # left of it, memory decides
    x = np.geomspace(min(intensities.min(), ridge / 2) / 2, max(intensities.max(), ridge) * 2, 65)
    for name, line, num_bytes in ROOFS:
        copy = found.copy(num_bytes)
        if copy is not None:
            roof = np.minimum(highest, copy.rate * x)
            axes.plot(x, roof, color=style.INK, linestyle=line, linewidth=1.3, zorder=1.5, label=name)
    axes.text(x[-1], highest * 1.06, show(highest, "flops/s"), ha="right", va="bottom", fontsize=8)
    for row in rows(cells):
        seen = style.look(arm_of(row))
        axes.plot(row["arithmetic_intensity"], row["flops_per_s"], zorder=4 - seen.width / 5, **_dot(seen))
    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(top=max(highest * 2.2, 1.5 * cells["flops_per_s"].max()))
    style.ticks(axes.xaxis, LogLocator(base=2, numticks=9))
    style.log_ticks(axes.yaxis, "flops/s")
    axes.set_xlabel("arithmetic intensity (useful FLOP for each compulsory byte)")
    axes.set_ylabel("useful FLOP/s")
    axes.set_title(_title(found.key), loc="left")


def _title(key: Place) -> str:
    device, dtype, num_threads = key
    return f"{dtype} on {device}, {WORDS['num_threads'](num_threads)}"


def _described(found: Ceilings) -> str:
    """The ceilings in words."""
    copies = [(name, found.copy(num_bytes)) for name, _, num_bytes in ROOFS]
    parts = [f"matrix product {show(_matmul(found), 'flops/s')}"]
    return ", ".join([*parts, *(f"{name} {show(None if c is None else c.rate, 'bytes/s')}" for name, c in copies)])


def _dot(seen: style.Look) -> dict[str, Any]:
    """What matplotlib's lines take: the marker alone."""
    return {**seen.options, "linestyle": "none", "markersize": 0.8 * seen.size, "mec": "white", "mew": 0.5}


REPORT = style.report("roofline_plot", "FLOP/s against arithmetic intensity under the ceilings", pictures)
