"""What the time of a call went into: a stacked bar by kind of operator for each implementation of a workload."""

import textwrap
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from attnbench.analysis.results import Results
from attnbench.analysis.table import KIND_SHARES, Panel, Row, arm_of, rows
from attnbench.reports import Picture, cells, style
from attnbench.reports.lines import TITLE_LEN, absences, cells_of, titled
from attnbench.storage.operator_kinds import PAGE_FAULTS
from attnbench.units import show, significant

TITLE = "What the time of a call went into, by kind of operator"
MOST_PANELS = 6
BAR_INCHES = 0.26
NOTE = (
    "Shares of one profiled call, operators' own time; page faults (hatched) are an estimate: their number times what "
    "one costs, taken from the kinds that asked for memory. Right of a bar: the time of an unprofiled call, and its "
    "ratio to the fastest."
)


def shares(row: Row) -> dict[str, float]:
    """The share of each kind in the time of a call, in the order of style.KINDS; empty where nothing is known."""
    return {kind: row[KIND_SHARES[kind]] for kind in style.KINDS if row[KIND_SHARES[kind]]}


def pictures(results: Results) -> list[Picture]:
    """A panel for each workload that has bars; of more than six, those that `chosen` names."""
    known = cells.shown(results)
    known = known[known[list(KIND_SHARES.values())].notna().any(axis="columns")]
    few = chosen(known.drop_duplicates("workload"))
    panels = [
        Panel(axis="seq_len", other=f"length {cells.length(rows(found.iloc[:1])[0])}", cells=found)
        for workload, found in cells.shown(results).groupby("workload", sort=False)
        if workload in few
    ]
    left_out = known["workload"].nunique() - len(few)
    note = f"{left_out} more workloads have theirs in records.csv." if left_out else ""
    return [_picture(titled(panels), note)] if panels else []


def chosen(workloads: pd.DataFrame) -> set[str]:
    """The workloads that have a panel: the longest of each group first, then the others. `workloads` has a row each."""
    longest = workloads.drop_duplicates("group", keep="last")["workload"]
    return set(list(dict.fromkeys([*longest, *workloads["workload"]]))[:MOST_PANELS])


def _picture(panels: Sequence[Panel], more: str) -> Picture:
    num_columns = min(len(panels), 2)
    drawn = [[row for row in rows(panel.cells) if shares(row)] for panel in panels]
    heights = [
        max(map(len, drawn[first : first + num_columns])) * BAR_INCHES + 1.0
        for first in range(0, len(drawn), num_columns)
    ]
    missing = absences(panels, lambda row: bool(shares(row)), "what ran was not seen")
    present = {kind for members in drawn for row in members for kind in shares(row)}
    handles = [
        Patch(label=f"{kind} (estimate)" if kind == PAGE_FAULTS else kind, **_fill(kind))
        for kind in style.KINDS
        if kind in present
    ]
    return style.sheet(
        list(zip(drawn, (panel.title for panel in panels), strict=True)),
        _draw_panel,
        (1.6 + 5.4 * num_columns, 0.7 + sum(heights)),
        title=TITLE,
        subtitle=cells.shared(cells_of(panels)),
        note=" ".join(part for part in (NOTE, missing, more) if part),
        num_columns=num_columns,
        legend={"handles": handles, "title": "kind of operator", "alignment": "left", "handlelength": 2.0},
        height_ratios=heights,
    )


def _draw_panel(axes: Axes, panel: tuple[list[Row], str]) -> None:
    drawn, title = panel
    fastest = min((row["paired_latency_s"] for row in drawn if row["latency_s"] is not None), default=0.0)
    for place, row in enumerate(drawn):
        left = 0.0
        for kind, share in shares(row).items():
            axes.barh(place, share, left=left, height=0.76, linewidth=0.4, **_fill(kind))
            left += share
        axes.text(1.015, place, _beside(row, fastest), va="center", fontsize=8)
    axes.set_yticks(range(len(drawn)), [style.label(arm_of(row)) for row in drawn])
    axes.set_ylim(len(drawn) - 0.4, -0.6)  # the fastest on top
    axes.set_xlim(0, 1.34)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("share of the time of a call")
    axes.set_title("\n".join(textwrap.wrap(title, TITLE_LEN)), loc="left")


def _beside(row: Row, fastest: float) -> str:
    """The time, and its ratio to the fastest."""
    if row["latency_s"] is None:
        return "not timed"
    return f"{show(row['paired_latency_s'], 's')}, {significant(row['paired_latency_s'] / fastest, 2)} x"


def _fill(kind: str) -> dict[str, Any]:
    return {"facecolor": style.KINDS[kind], "edgecolor": "white", "hatch": "////" if kind == PAGE_FAULTS else ""}


REPORT = style.report("breakdown_plot", "what the time of a call went into, as SVG and PNG", pictures)
