"""Time of one call against length, with intervals, on two logarithmic axes."""

from pathlib import Path

from matplotlib.axes import Axes

from attnbench.analysis.cached import once
from attnbench.analysis.results import Results
from attnbench.reports import Picture, Report, style
from attnbench.reports.lines import draw, log_ticks
from attnbench.reports.panels import Panel, Plot, Point
from attnbench.reports.table import Row


def _point(row: Row, length: int) -> Point | None:
    time = row.time
    if time is None:
        return None
    return Point(length=length, value=time.point, low=time.low, high=time.high, is_hollow=time.low is None)


def _finish(axes: Axes, panel: Panel) -> None:  # noqa: ARG001 - every panel is finished alike
    log_ticks(axes.yaxis, "s")


PLOT = Plot(
    title="Time per call against length (median; lower is faster)",
    y_label="time per call",
    point=_point,
    finish=_finish,
    hollow="too few visits for an interval",
    absent="agrees, not timed",
)


@once
def pictures(results: Results) -> list[Picture]:
    """One panel for each combination of the other axes that vary."""
    return draw(results, PLOT)


def write(results: Results, folder: Path) -> list[Path]:
    """Write latency_plot.svg and .png."""
    return style.save(pictures(results), folder, "latency_plot")


REPORT = Report(summary="time against length with intervals, as SVG and PNG", write=write, draw=pictures)
