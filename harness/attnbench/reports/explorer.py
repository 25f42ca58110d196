"""The data for the charts of report.html, and the library that draws them, both inside the page.

The charts use Vega-Lite (https://vega.github.io/vega-lite/, BSD licence). vega.js is the copy in vl-convert: `python -m
tools.vega` writes it, and a test compares both.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnbench.analysis.results import Results
from attnbench.analysis.table import Row, arm_of
from attnbench.reports import cells, style
from attnbench.units import show
from attnbench.workloads.workload import Workload

LIBRARY = Path(__file__).with_name("vega.js")
USUAL = ("workload", "length", "implementation", "time per call", "ratio", "verdict")
"""The first columns of a table."""
METRICS = {
    "ratio": "ratio",
    "time": "latency_s",
    "memory": "peak_memory_bytes",
    "error": "error_ratio",
    "rate": "flops_per_s",
}
SORTED_BY = {
    "time per call": "paired_latency_s",
    "ratio": "ratio",
    "FLOP/s": "flops_per_s",
    "error": "error_ratio",
    "peak memory": "peak_memory_bytes",
    "length": "kv_len",
}
"""Column of the table of cells that sorts a displayed column; other columns are sorted by their text."""
DIGITS = 5


def data(results: Results) -> str:
    """All cells of a run as JSON that is safe inside a script element.

    `rows` have a text and a sort key for each of `columns`, the values of the varying `axes`, and numbers.
    """
    columns, shown = cells.columns(results), cells.shown_rows(results)
    axes = [axis for axis in Workload.__struct_fields__ if len({row[axis] for row in shown}) > 1]
    panels = cells.names(results)
    headings = ["workload", *(column.heading for column in columns)]
    explanations = ["", *(column.explanation for column in columns)]
    entries = [_row(row, columns, axes) | {"panel": panels[row["workload"]]} for row in shown]
    names = _by_ratio(shown)
    content = {
        "axes": {axis: sorted({row[axis] for row in shown}, key=_sortable) for axis in axes},
        "implementations": names,
        "colours": {
            scheme: {name: style.readable(style.look(name).colour, ground, style.MARK_CONTRAST) for name in names}
            for scheme, ground in (("light", style.LIGHT), ("dark", style.DARK))
        },
        "columns": [
            {"heading": heading, "explanation": explanation, "kind": heading.replace(" ", "-")}
            for heading, explanation in zip(headings, explanations, strict=True)
        ],
        "usual": [headings.index(heading) for heading in USUAL if heading in headings],
        "places": {"time": headings.index("time per call"), "ratio": headings.index("ratio")},
        "has": {name: any(entry[name] is not None for entry in entries) for name in METRICS},
        "rows": entries,
    }
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script; it sets `window.vegaEmbed`."""
    return LIBRARY.read_text(encoding="utf-8")


def _row(row: Row, columns: Sequence[cells.Column], axes: Sequence[str]) -> dict[str, Any]:
    texts = [row["title"], *(column.text(row) for column in columns)]
    names = [None, *(SORTED_BY.get(column.heading) for column in columns)]
    verdict = "baseline" if row["is_baseline"] else row["verdict"] or ""
    is_failed = row["status"] not in {"ok", "unsupported"} and not row["is_predicted"]
    return {
        "implementation": str(arm_of(row)),
        "status": row["status"],
        "verdict": "equal" if verdict == "equivalent" else verdict,
        "kind": f"{'predicted' if row['is_predicted'] else row['status']}{' failed' * is_failed}",
        "title": row["title"],
        "length": row["kv_len"],
        "axes": {axis: row[axis] for axis in axes},
        "text": texts,
        "keys": [_number(row[name]) if name in row else text for name, text in zip(names, texts, strict=True)],
        "shown": show(row.get("peak_memory_bytes"), "bytes"),
        **{name: _number(row.get(column)) for name, column in METRICS.items()},
        **{f"time_{end}": _number(row[f"latency_{end}_s"]) for end in ("low", "high")},
        **{f"ratio_{end}": _number(row[f"ratio_{end}"]) for end in ("low", "high")},
    }


def _number(value: Any) -> float | None:  # noqa: ANN401 - a cell of a table
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _sortable(value: Any) -> tuple[bool, float, str]:  # noqa: ANN401 - of any axis
    is_text = isinstance(value, str)
    return is_text, 0.0 if is_text else float(value), str(value)


def _by_ratio(shown: Sequence[Row]) -> list[str]:
    """The implementations, the fastest overall first; those without a time last."""
    ratios: dict[str, list[float]] = {str(arm_of(row)): [] for row in shown}
    for row in shown:
        ratios[str(arm_of(row))] += [] if row["ratio"] is None else [row["ratio"]]
    return sorted(ratios, key=lambda name: (not ratios[name], sum(ratios[name]) / max(len(ratios[name]), 1), name))
