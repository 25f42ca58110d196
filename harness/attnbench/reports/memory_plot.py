"""Peak memory of one call above its inputs against length, with what theory says it must be."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from attnbench.analysis.table import Panel, rows
from attnbench.reports import style
from attnbench.reports.lines import Plot, draw
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
    style.byte_ticks(axes)


PLOT = Plot(
    title="Peak memory of one call above its inputs, against length",
    y_label="peak memory",
    column="peak_memory_bytes",
    absent="peak memory not measured, or none above the inputs",
    finish=_theory,
)

REPORT = style.report(
    "memory_plot", "peak memory against length with theory, as SVG and PNG", lambda results: draw(results, PLOT)
)
