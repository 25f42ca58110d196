"""The plug-in torch-tb-profiler, drawing by our own scripts, and passing over damaged traces.

Its page draws by Google Charts; the trace viewer needs the first version of custom elements and HTML imports, which
browsers have given up. Without the internet neither comes, and every view is an endless spinner. In static/ are the
parts of both that the pages use; the import becomes a part of the page that imports.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch_tb_profiler
from torch_tb_profiler.plugin import TorchProfilerPlugin
from torch_tb_profiler.profiler.diffrun.contract import OpAgg
from werkzeug import Response

from attnbench.tracing import folders

THEIRS = Path(torch_tb_profiler.__file__).parent / "static"
OURS = Path(__file__).parent / "static"
CHARTS = ("data", "drawing", "axes", "pie", "table", "timeline", "google")
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
"""For each page (all views; the Trace view), the parts that load something, and what stands there instead."""


def page(name: str) -> str:
    """A page of the plug-in that loads nothing from the internet.

    Raises:
        ValueError: the plug-in that is installed has another page.
    """
    text = (THEIRS / name).read_text(encoding="utf-8")
    for theirs, ours in REPLACED[name].items():
        if text.count(theirs) != 1:
            reason = f"{name} of the torch-tb-profiler that is installed is not the one known here"
            raise ValueError(f"{reason}: install 0.4.3")
        text = text.replace(theirs, ours)
    return text


def script(*names: str) -> str:
    """The scripts of those names in static/, as one."""
    return "\n".join((OURS / f"{name}.js").read_text(encoding="utf-8") for name in names)


class OfflinePlugin(TorchProfilerPlugin):  # type: ignore[misc] # the plug-in has no types
    """Draws without the internet."""

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        """The pages of the plug-in by path, with ours in place of its own."""
        theirs: dict[str, Callable[..., Any]] = super().get_plugin_apps()
        scripts = {"/charts.js": script(*CHARTS), "/elements.js": script("elements")}
        pages = {f"/{name}": page(name) for name in REPLACED}
        return theirs | {
            path: Response(text, content_type=f"{kind}; charset=utf-8", headers=TorchProfilerPlugin.headers)
            for kind, texts in (("text/html", pages), ("text/javascript", scripts))
            for path, text in texts.items()
        }

    def get_diff_status(self, base: Any, exp: Any) -> Any:  # noqa: ANN401
        """The comparison of two runs, with the same operators in the same order on both sides: the page pairs rows."""
        compared = super().get_diff_status(base, exp)
        align(compared)
        return compared

    @staticmethod
    def respond_as_json(answer: Any, compress: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002 - as the plug-in has it
        """The answer as JSON, times to the nanosecond: sums of times in floating point have a dozen digits more."""
        return TorchProfilerPlugin.respond_as_json(_rounded(answer), compress)

    def _get_run_dirs(self) -> Iterator[str]:
        """The folders that hold a trace which can be read; the plug-in waits for the others for ever."""
        for folder in super()._get_run_dirs():
            if readable(Path(folder).glob("*.pt.trace.json*"))[0]:
                yield folder


def align(compared: Any) -> None:  # noqa: ANN401
    """Give both sides of a comparison and of those below it a row for each operator of either, 0 where it has none."""
    left, right = compared.left.op_aggs, compared.right.op_aggs
    names = dict.fromkeys(each.name for each in [*left, *right])
    for side in (compared.left, compared.right):
        own = {each.name: each for each in side.op_aggs}
        side.op_aggs = [own.get(name, OpAgg(name, 0, 0, 0, 0, 0)) for name in names]
    for child in compared.children:
        align(child)


def readable(files: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """The traces that can be read, and the faults of the others."""
    faults = {file: _fault(file, file.stat().st_mtime_ns) for file in files}
    return [file for file, fault in faults.items() if not fault], [fault for fault in faults.values() if fault]


@cache
def _fault(file: Path, _changed_ns: int) -> str:
    """The fault of a trace, or "". The plug-in looks for new ones all the time: none is read twice for it."""
    try:
        folders.read(file)
    except ValueError as error:
        return str(error)
    return ""


def _rounded(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
