"""Peak memory of one call above its inputs against length, next to what theory says it must be."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from attnbench.analysis.cached import once
from attnbench.analysis.results import Results
from attnbench.analysis.table import Panel, rows
from attnbench.reports import Picture, Report, style
from attnbench.reports.lines import Plot, byte_ticks, draw
from attnbench.workloads.workload import DTYPE_BYTES


def _theory(axes: Axes, panel: Panel) -> None:
    """The score matrix, twice that, and the output."""
    cell = rows(panel.cells.iloc[:1])[0]
    low, high = axes.get_xlim()
    x = np.geomspace(low, high, 33)
    is_square = cell["seq_len"] == cell["kv_len"]
    queries = x if panel.axis == "seq_len" else np.full_like(x, cell["seq_len"])
    keys = x if panel.axis == "kv_len" or is_square else np.full_like(x, cell["kv_len"])
    heads = cell["batch_size"] * cell["num_heads"] * DTYPE_BYTES[cell["dtype"]]
    faint: dict[str, Any] = {"color": "#666666", "linewidth": 1.1, "zorder": 1.5}
    axes.plot(x, 2 * heads * queries * keys, linestyle="--", label="2 x score matrix", **faint)
    axes.plot(x, heads * queries * keys, linestyle="-.", label="score matrix (B H T S)", **faint)
    axes.plot(x, heads * queries * cell["value_dim"], linestyle=":", label="output (B H T V), linear", **faint)
    byte_ticks(axes)


PLOT = Plot(
    title="Peak memory of one call above its inputs, against length",
    y_label="peak memory",
    column="peak_memory_bytes",
    absent="peak memory not measured, or none above the inputs",
    finish=_theory,
)


@once
def pictures(results: Results) -> list[Picture]:
    """One panel for each combination of the other axes that vary."""
    return draw(results, PLOT)


def write(results: Results, folder: Path) -> list[Path]:
    """Write memory_plot.svg and .png."""
    return style.save(pictures(results), folder, "memory_plot")


REPORT = Report(summary="peak memory against length next to theory, as SVG and PNG", write=write, draw=pictures)
