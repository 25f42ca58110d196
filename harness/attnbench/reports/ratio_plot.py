"""Time as a ratio to the baseline's, paired inside blocks, with intervals; the line at 1 is the baseline."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from attnbench.analysis.cached import once
from attnbench.analysis.comparisons import noise_floors
from attnbench.analysis.results import Results
from attnbench.reports import Picture, Report, style, words
from attnbench.reports.lines import draw
from attnbench.reports.panels import Panel, Plot, Point
from attnbench.reports.table import Row
from attnbench.statistics.effects import margin
from attnbench.storage.records import Verdict


def _point(row: Row, length: int) -> Point | None:
    found = row.comparison
    if found is None:
        return None
    is_hollow = found.verdict is Verdict.undecided
    return Point(length=length, value=found.ratio, low=found.low, high=found.high, is_hollow=is_hollow)


def _plot(results: Results) -> Plot:
    least = results.plan.smallest_effect
    margins = {workload: margin(floor, least) for workload, floor in noise_floors(results).items()}

    def finish(axes: Axes, panel: Panel) -> None:
        at = {panel.length(row.workload): margins.get(row.workload.id, 0.0) for row in panel.rows}
        band = sorted(at.items())
        low, high = axes.get_xlim()
        x = [low, *(length for length, _ in band), high]
        m = [band[0][1], *(limit for _, limit in band), band[-1][1]]
        axes.fill_between(x, [1 / (1 + v) for v in m], [1 + v for v in m], color="#bbbbbb", alpha=0.55, lw=0, zorder=1)
        axes.axhline(
            1.0, color=style.INK, linewidth=1.1, zorder=2, label=f"{style.label(words.base(results.plan))} = 1"
        )
        axes.plot([], [], color="#bbbbbb", linewidth=6, alpha=0.55, label="too small to matter or to tell")
        _ratio_ticks(axes)

    return Plot(
        title=f"Time as a ratio to {style.label(words.base(results.plan))} (below 1 is faster)",
        y_label=f"time / time of {style.label(words.base(results.plan))}",
        point=_point,
        finish=finish,
        hollow="undecided, the interval is too wide or there are too few visits for one",
        absent="no times of the baseline to compare with",
        is_steep=False,
        is_absence_told=lambda row: not (row.is_baseline and row.time is not None),
    )


def _ratio_ticks(axes: Axes) -> None:
    low, high = axes.get_ylim()
    low, high = min(low, 0.9), max(high, 1 / 0.9)
    axes.set_yscale("log", base=2)
    axes.set_ylim(low, high)
    is_narrow = math.log2(high / low) < 1.5  # noqa: PLR2004 - powers of 2 alone would leave one tick
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]) if is_narrow else LogLocator(base=2, numticks=10))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


@once
def pictures(results: Results) -> list[Picture]:
    """One panel for each combination of the other axes that vary."""
    return draw(results, _plot(results))


def write(results: Results, folder: Path) -> list[Path]:
    """Write ratio_plot.svg and .png."""
    return style.save(pictures(results), folder, "ratio_plot")


REPORT = Report(summary="ratio to the baseline with intervals, as SVG and PNG", write=write, draw=pictures)
