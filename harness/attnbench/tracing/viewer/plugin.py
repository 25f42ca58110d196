"""The plug-in torch-tb-profiler, serving the pages of tracing/viewer/pages.py, and passing over damaged traces."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from torch_tb_profiler.plugin import TorchProfilerPlugin
from torch_tb_profiler.profiler.diffrun.contract import OpAgg
from werkzeug import Request, Response

from attnbench.tracing import folders
from attnbench.tracing.viewer import pages

SERVED: dict[str, tuple[Callable[[], str], str]] = {
    "/index.html": (pages.index, "text/html"),
    "/trace_embedding.html": (pages.trace_embedding, "text/html"),
    "/charts.js": (pages.charts, "text/javascript"),
    "/elements.js": (pages.elements, "text/javascript"),
}


class OfflinePlugin(TorchProfilerPlugin):  # type: ignore[misc] # the plug-in has no types
    """Draws without the internet."""

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        """What the plug-in serves, by path, with our pages in place of its own."""
        theirs: dict[str, Callable[..., Any]] = super().get_plugin_apps()
        return theirs | {path: _serve(make(), kind) for path, (make, kind) in SERVED.items()}

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
    """The traces that can be read, and what is wrong with each of the others."""
    faults = {file: _fault(file, file.stat().st_mtime_ns) for file in files}
    return [file for file, fault in faults.items() if not fault], [fault for fault in faults.values() if fault]


@cache
def _fault(file: Path, _changed_ns: int) -> str:
    """What is wrong with a trace, or "". The plug-in looks for new ones all the time: none is read twice for it."""
    try:
        folders.read(file)
    except ValueError as error:
        return str(error)
    return ""


def _serve(text: str, kind: str) -> Callable[..., Any]:
    @Request.application
    def answer(_: Request) -> Response:
        return Response(text, content_type=f"{kind}; charset=utf-8", headers=TorchProfilerPlugin.headers)

    return answer


def _rounded(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
