"""The plug-in's pages with our own scripts in place of what they would load from the internet.

The page draws by Google Charts; the trace viewer needs the first version of custom elements and HTML imports, which
browsers have given up. Without the internet neither comes, and every view is an endless spinner. In static/ are the
parts of both that the pages use; the import becomes a part of the page that imports.
"""

from pathlib import Path

import torch_tb_profiler

THEIRS = Path(torch_tb_profiler.__file__).parent / "static"
OURS = Path(__file__).parent / "static"
CHARTS = ("data", "drawing", "axes", "pie", "table", "timeline", "google")
LOADER = '<script src="https://www.gstatic.com/charts/loader.js"></script>'
POLYFILL = '<script src="https://cdnjs.cloudflare.com/ajax/libs/webcomponentsjs/0.7.24/webcomponents.min.js"></script>'
IMPORT = '<link rel="import" href="trace_viewer_full.html" onerror="onTraceViewerImportFail(event)">'


def index() -> str:
    """The page of all views.

    Raises:
        ValueError: the plug-in that is installed has another page.
    """
    return _replaced("index.html", {LOADER: '<script src="charts.js"></script>'})


def trace_embedding() -> str:
    """The frame of the Trace view, with the trace viewer in it.

    Raises:
        ValueError: the plug-in that is installed has another page.
    """
    viewer = (THEIRS / "trace_viewer_full.html").read_text(encoding="utf-8")
    return _replaced("trace_embedding.html", {POLYFILL: '<script src="elements.js"></script>', IMPORT: viewer})


def charts() -> str:
    """The script that stands in for Google Charts."""
    return "\n".join((OURS / f"{name}.js").read_text(encoding="utf-8") for name in CHARTS)


def elements() -> str:
    """The script that stands in for the polyfill of web components."""
    return (OURS / "elements.js").read_text(encoding="utf-8")


def _replaced(name: str, parts: dict[str, str]) -> str:
    page = (THEIRS / name).read_text(encoding="utf-8")
    for theirs, ours in parts.items():
        if page.count(theirs) != 1:
            raise ValueError(
                f"{name} of the torch-tb-profiler that is installed is not the one known here: install 0.4.3"
            )
        page = page.replace(theirs, ours)
    return page
