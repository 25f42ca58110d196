"""The plug-in torch-tb-profiler, made to work without a network, with charts drawn by Vega-Lite.

The plug-in loads two things from the internet: Google Charts, and a substitute for HTML imports and the first version
of custom elements, which its trace viewer needs and browsers have dropped. Without these, every view is an endless
spinner. Here, scripts in static/ draw the charts with the copy of Vega-Lite in report.html, and define the custom
elements. The imported page is inserted into the page that imports it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch_tb_profiler
from torch_tb_profiler.plugin import TorchProfilerPlugin
from torch_tb_profiler.profiler.diffrun.contract import OpAgg
from werkzeug import Response

THEIRS = Path(torch_tb_profiler.__file__).parent / "static"
OURS = Path(__file__).parent / "static"
CHARTS = ("data", "charts", "table", "google")
LIBRARY = Path(__file__).parents[2] / "reports" / "vega.js"  # the copy of Vega-Lite that report.html contains
REPLACED = {
    "index.html": {
        '<script src="https://www.gstatic.com/charts/loader.js"></script>': '<script src="charts.js"></script>',
    },
    "trace_embedding.html": {
        '<script src="https://cdnjs.cloudflare.com/ajax/libs/webcomponentsjs/0.7.24/webcomponents.min.js">'
        "</script>": '<script src="elements.js"></script>',
        '<link rel="import" href="trace_viewer_full.html" onerror="onTraceViewerImportFail(event)">': (
            THEIRS / "trace_viewer_full.html"
        ).read_text(encoding="utf-8"),
    },
}
"""For each page (index.html: all views; trace_embedding.html: the Trace view), the parts that load something from the
internet, and their replacements."""


def page(name: str) -> str:
    """Return a page of the plug-in, changed so that it loads nothing from the internet.

    Raises:
        ValueError: the installed plug-in has a different page.
    """
    text = (THEIRS / name).read_text(encoding="utf-8")
    for theirs, ours in REPLACED[name].items():
        if text.count(theirs) != 1:
            reason = f"{name} of the installed torch-tb-profiler differs from that of version 0.4.3"
            raise ValueError(f"{reason}: install that version")
        text = text.replace(theirs, ours)
    return text


def script(*names: str) -> str:
    """Concatenate the scripts with these names in static/."""
    return "\n".join((OURS / f"{name}.js").read_text(encoding="utf-8") for name in names)


class OfflinePlugin(TorchProfilerPlugin):  # type: ignore[misc] # the plug-in has no types
    """The plug-in with pages and scripts that work without internet access."""

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        """Return the pages of the plug-in by path, with our replacements."""
        theirs: dict[str, Callable[..., Any]] = super().get_plugin_apps()
        charts = f"{LIBRARY.read_text(encoding='utf-8')}\n{script(*CHARTS)}"
        scripts = {"/charts.js": charts, "/elements.js": script("elements")}
        pages = {f"/{name}": page(name) for name in REPLACED}
        return theirs | {
            path: Response(text, content_type=f"{kind}; charset=utf-8", headers=TorchProfilerPlugin.headers)
            for kind, texts in (("text/html", pages), ("text/javascript", scripts))
            for path, text in texts.items()
        }

    def get_diff_status(self, base: Any, exp: Any) -> Any:  # noqa: ANN401
        """Compare two runs; align the operators of both sides, because the page pairs their rows."""
        compared = super().get_diff_status(base, exp)
        align(compared)
        return compared


def align(compared: Any) -> None:  # noqa: ANN401
    """Align both sides of a comparison recursively, in place: both get a row for each operator of either side.

    The row of an operator that a side lacks has zeros.
    """
    left, right = compared.left.op_aggs, compared.right.op_aggs
    names = dict.fromkeys(each.name for each in [*left, *right])
    for side in (compared.left, compared.right):
        own = {each.name: each for each in side.op_aggs}
        side.op_aggs = [own.get(name, OpAgg(name, 0, 0, 0, 0, 0)) for name in names]
    for child in compared.children:
        align(child)
