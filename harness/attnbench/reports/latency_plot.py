"""Time of one call against length, with intervals, on two logarithmic axes."""

from pathlib import Path

from attnbench.analysis.cached import once
from attnbench.analysis.results import Results
from attnbench.reports import Picture, Report, style
from attnbench.reports.lines import Plot, draw, log_ticks

PLOT = Plot(
    title="Time per call against length (median; lower is faster)",
    y_label="time per call",
    column="latency_s",
    low="latency_low_s",
    high="latency_high_s",
    is_hollow=lambda row: row["latency_low_s"] is None,
    hollow="too few visits for an interval",
    absent="agrees, not timed",
    finish=lambda axes, _: log_ticks(axes.yaxis, "s"),
)


@once
def pictures(results: Results) -> list[Picture]:
    """One panel for each combination of the other axes that vary."""
    return draw(results, PLOT)


def write(results: Results, folder: Path) -> list[Path]:
    """Write latency_plot.svg and .png."""
    return style.save(pictures(results), folder, "latency_plot")


REPORT = Report(summary="time against length with intervals, as SVG and PNG", write=write, draw=pictures)
