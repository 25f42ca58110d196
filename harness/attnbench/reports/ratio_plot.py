"""Time as a ratio to the baseline's, paired inside blocks, with intervals; the line at 1 is the baseline."""

import math

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator

from attnbench.analysis.comparisons import noise_floors
from attnbench.analysis.results import Results
from attnbench.analysis.table import Panel
from attnbench.reports import Picture, cells, style
from attnbench.reports.lines import Plot, draw
from attnbench.statistics.verdicts import margin
from attnbench.storage.records import Verdict


def pictures(results: Results) -> list[Picture]:
    """One panel for each combination of the other axes that vary."""
    least, base = results.plan.smallest_effect, style.label(cells.base(results.plan))
    margins = {workload: margin(floor, least) for workload, floor in noise_floors(results).items()}

    def finish(axes: Axes, panel: Panel) -> None:
        """The baseline, and around it what is too small to matter or to show."""
        workloads = panel.cells.drop_duplicates("workload").sort_values(panel.axis)
        at = [(int(row[panel.axis]), margins.get(str(row["workload"]), 0.0)) for _, row in workloads.iterrows()]
        low, high = axes.get_xlim()
        x = [low, *(length for length, _ in at), high]
        m = [at[0][1], *(limit for _, limit in at), at[-1][1]]
        axes.fill_between(x, [1 / (1 + v) for v in m], [1 + v for v in m], color="#bbbbbb", alpha=0.55, lw=0, zorder=1)
        axes.axhline(1.0, color=style.INK, linewidth=1.1, zorder=2, label=f"{base} = 1")
        axes.plot([], [], color="#bbbbbb", linewidth=6, alpha=0.55, label="too small to matter or to show")
        low, high = axes.get_ylim()
        low, high = min(low, 0.9), max(high, 1 / 0.9)
        axes.set_yscale("log", base=2)
        axes.set_ylim(low, high)
        is_narrow = math.log2(high / low) < 1.5  # noqa: PLR2004 - powers of 2 alone would leave one tick
        style.ticks(axes.yaxis, MaxNLocator(6, steps=[1, 2, 5, 10]) if is_narrow else LogLocator(base=2, numticks=10))

    plot = Plot(
        title=f"Time as a ratio to {base} (below 1 is faster)",
        y_label=f"time / time of {base}",
        column="ratio",
        low="ratio_low",
        high="ratio_high",
        is_drawn=lambda row: row["verdict"] is not None,
        is_hollow=lambda row: row["verdict"] == Verdict.undecided,
        hollow="undecided, the interval is too wide or there are too few visits for one",
        absent="no times of the baseline to compare with",
        is_absence_listed=lambda row: not (row["is_baseline"] and row["latency_s"] is not None),
        is_steep=False,
        finish=finish,
    )
    return draw(results, plot)


REPORT = style.report("ratio_plot", "ratio to the baseline with intervals, as SVG and PNG", pictures)
