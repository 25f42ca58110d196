"""The data of the charts in report.html, and the library that draws them. The page contains both.

The library is Vega-Lite (https://vega.github.io/vega-lite/, BSD licence). vega.js is a copy of the file in the package
vl-convert: `python -m tools.vega` writes the copy, and a test compares the two.
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
    """Return the cells of a run (`cells.present_cells`) as JSON that is safe inside a script element.

    An entry of `rows` is a cell: its text and sort key for each of `columns`, its value of each axis that varies, and
    its intervals. page.js builds menus and charts from them. `colours` has each implementation's colour in pictures.
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
