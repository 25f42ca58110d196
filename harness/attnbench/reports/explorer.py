"""The data for the charts of report.html, and the library that draws them, both inside the page.

The charts use Vega-Lite (https://vega.github.io/vega-lite/, BSD licence). vega.js is the copy in vl-convert: `python -m
tools.vega` writes it, and a test compares both.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnbench.analysis.conclusion import Mark
from attnbench.analysis.results import Results
from attnbench.reports import cells, style, titles
from attnbench.reports.cells import Cell, Column
from attnbench.workloads.workload import Workload

WORKLOAD = Column(heading="workload", text=lambda cell: titles.title(cell.workload.axes()))
LIBRARY = Path(__file__).with_name("vega.js")
"""Vega, Vega-Lite and Vega-Embed as one script; it sets `window.vegaEmbed`."""


def data(results: Results) -> str:
    """All cells of a run as JSON that is safe inside a script element.

    Each of `rows` has a text and a sort key for each of `columns`, the value of each varying axis, and intervals.
    page.js derives menus and charts from these. `colours` are those of the pictures, by implementation.
    """
    columns, panels = [WORKLOAD, *cells.columns(results)], titles.names(results)
    shown = [cell.workload for cell in cells.present_cells(results)]
    axes = [axis for axis in Workload.__struct_fields__ if _varies(axis, shown)]
    rows = [
        _row(cell, columns, axes) | {"panel": panels[cell.workload.id]}
        for members in cells.groups(results).values()
        for cell in members
    ]
    looks = style.looks({row["implementation"] for row in rows})
    content = {
        "axes": axes,
        "colours": {name: line["color"] for name, line in looks.items()},
        "columns": [
            {"heading": each.heading, "explanation": each.explanation, "is_number": each.number is not None}
            for each in columns
        ],
        "rows": rows,
    }
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _varies(axis: str, workloads: Sequence[Workload]) -> bool:
    return len({workload.axes()[axis] for workload in workloads}) > 1


def _row(cell: Cell, columns: Sequence[Column], axes: Sequence[str]) -> dict[str, Any]:
    record = cell.record
    kind = "failed" if cell.mark in {Mark.wrong, Mark.failed} else str(record.status)
    ends = {"time": cell.ends, "ratio": cell.ratio_ends}
    return {
        "implementation": str(record.arm),
        "kind": "predicted" if record.is_predicted else kind,
        "verdict": "baseline" if cell.is_baseline and cell.seconds is not None else str(cell.mark or kind),
        "axes": {axis: cell.workload.axes()[axis] for axis in axes},
        "text": [column.text(cell) for column in columns],
        "keys": [None if column.number is None else column.number(cell) for column in columns],
        **{f"{name}_low": low for name, (low, _) in ends.items()},
        **{f"{name}_high": high for name, (_, high) in ends.items()},
    }
