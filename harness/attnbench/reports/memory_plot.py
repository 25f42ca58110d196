"""Peak memory of one call above its inputs against length, beside what theory says it must be."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from attnbench.analysis.cached import once
from attnbench.analysis.results import Results
from attnbench.reports import Picture, Report, style
from attnbench.reports.lines import draw
from attnbench.reports.panels import Panel, Plot, Point
from attnbench.reports.table import Row
from attnbench.units import show
from attnbench.workloads.workload import DTYPE_BYTES


def _point(row: Row, length: int) -> Point | None:
    if row.peak_memory_bytes is None or row.peak_memory_bytes <= 0:
        return None
    return Point(length=length, value=row.peak_memory_bytes)


def _finish(axes: Axes, panel: Panel) -> None:
    workload = panel.rows[0].workload
    low, high = axes.get_xlim()
    x = np.geomspace(low, high, 33)
    is_square = workload.seq_len == workload.kv_len
    queries = x if panel.axis == "seq_len" else np.full_like(x, workload.seq_len)
    keys = x if panel.axis == "kv_len" or is_square else np.full_like(x, workload.kv_len)
    heads = workload.batch_size * workload.num_heads * DTYPE_BYTES[workload.dtype]
    faint: dict[str, Any] = {"color": "#666666", "linewidth": 1.1, "zorder": 1.5}
    axes.plot(x, 2 * heads * queries * keys, linestyle="--", label="2 x score matrix", **faint)
    axes.plot(x, heads * queries * keys, linestyle="-.", label="score matrix (B H T S)", **faint)
    axes.plot(x, heads * queries * workload.value_dim, linestyle=":", label="output (B H T V), linear", **faint)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(LogLocator(base=4, numticks=12))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value, "bytes", digits=1)))


PLOT = Plot(
    title="Peak memory of one call above its inputs, against length",
    y_label="peak memory",
    point=_point,
    finish=_finish,
    hollow="",
    absent="peak memory not measured, or none above the inputs",
)


@once
def pictures(results: Results) -> list[Picture]:
    """One panel for each combination of the other axes that vary."""
    return draw(results, PLOT)


def write(results: Results, folder: Path) -> list[Path]:
    """Write memory_plot.svg and .png."""
    return style.save(pictures(results), folder, "memory_plot")


REPORT = Report(summary="peak memory against length beside theory, as SVG and PNG", write=write, draw=pictures)
