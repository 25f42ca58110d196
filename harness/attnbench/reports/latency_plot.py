"""Time of one call against length, with intervals, on two logarithmic axes."""

from attnbench.reports import style
from attnbench.reports.lines import Plot, draw

PLOT = Plot(
    title="Time per call against length (median; lower is faster)",
    y_label="time per call",
    column="latency_s",
    low="latency_low_s",
    high="latency_high_s",
    is_hollow=lambda row: row["latency_low_s"] is None,
    hollow="too few visits for an interval",
    absent="agrees, not timed",
    finish=lambda axes, _: style.log_ticks(axes.yaxis, "s"),
)

REPORT = style.report(
    "latency_plot", "time against length with intervals, as SVG and PNG", lambda results: draw(results, PLOT)
)
