"""Measure the findings of docs/findings.md again, and write the page and its pictures.

Command: `python docs/findings.py [NAME ...]`; all findings take about a quarter of an hour on two cores. With `page` as
argument, the page and its pictures are written from the numbers stored in results/gallery/findings. Two findings need
packages: `pip install monai==1.6.1 transformers==5.23.0`.

A finding holds if each of its facts reaches its `least`. If a finding does not hold on this machine, that is printed,
and the numbers stored before are kept.
"""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from attnbench.analysis.results import read
from attnbench.analysis.table import table
from attnbench.devices import environment
from attnbench.processes.worker_client import module_path
from attnbench.reports import stock, style
from attnbench.units import show, significant

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "findings.md"
GALLERY = ROOT / "results" / "gallery" / "findings"
KEPT = GALLERY / "findings.json"
SOURCE = ROOT / "docs" / "findings.toml"
STOCK = sorted((ROOT / "results" / "gallery" / "stock").glob("*.md"))
"""Reports of `attnbench check --report FILE.md`, one for each release of PyTorch."""
TITLE_LEN = 84
TIME, ERROR = "latency_s", "error_ratio"
AXES = {
    TIME: ("time per call", "s"),
    ERROR: ("error / tolerance: beyond 1 it is wrong", ""),
}


BEGINNING = """{} things about attention in PyTorch that attnbench found, each with its cause and the command that shows
it on your machine. Times are medians with 95 % intervals and [differ between
machines](method.md#why-is-my-number-different-from-yours). The last line has the time that it took.
`python docs/findings.py` measures all of them again and writes only what still holds. Each has a
script that needs no attnbench, and exits with 1 where the finding holds. [On
GPUs](../results/gallery/gpu/README.md) there are four more, among them wrong gradients of stock SDPA, seen with torch
2.11.0 and cuDNN 9.19 and not tried with others: `python examples/gpu/cudnn_gradient_layout.py`."""


STOCK_TEXT = """## PyTorch's own attention, release by release

`attnbench check --report FILE.md --seed 0` asks whether stock attention is right on this machine: all SDPA kernels,
nn.MultiheadAttention, flex_attention and the compiled form, in three dtypes. {} of {} verdicts say right, the others
that nothing was tried, and there are {} findings. [The files](../results/gallery/stock) are set side by side by

```bash
attnbench report {}
```
"""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """A finding that a script shows.

    The script's output is stored for each processor; the page has the outputs of processors on which the finding holds.
    """

    script: str
    text: str
    is_linked: bool = False  # whether the page links the outputs instead of showing them

    @property
    def folder(self) -> Path:
        """The folder with the stored outputs, a file for each processor."""
        return GALLERY / self.script


OBSERVED = {
    "set-num-threads": Observed(
        script="set_num_threads",
        text="""## On some processors, setting the number of threads to what it is slows SDPA down

`torch.set_num_threads(torch.get_num_threads())` changes no number, but with MKL it [turns dynamic adjustment
off](https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/ParallelOpenMP.cpp). [A
script](../examples/findings/set_num_threads.py) compares processes with and without the call:
""",
    ),
    "limited-bfloat16": Observed(
        script="limited_bfloat16",
        text="""## With AMX, SDPA in bfloat16 raises under `ATEN_CPU_CAPABILITY=avx2`

[A script](../examples/findings/limited_bfloat16.py) that needs torch alone [shows
it](../results/gallery/findings/limited_bfloat16).
""",
        is_linked=True,
    ),
}
"""Findings by the argument that measures them."""
HOLDS = "exit code 1"


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of a finding's picture: one implementation on one workload of a run, which the axes select."""

    run: str
    implementation: str
    axes: dict[str, str | int] = {}


class Fact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ratio of two points, named by their labels; below `least` the finding does not hold."""

    over: str
    under: str
    least: float = 0.0


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finding, with named commands that show it: `attnbench check` measures errors, other commands measure times."""

    repro: str  # a script in examples/findings that shows it without attnbench, with its arguments
    title: str
    cause: str
    runs: dict[str, str]
    what: str
    points: dict[str, Point]
    facts: dict[str, Fact]
    needs: str = ""
    only: str = ""  # the kind of processor on which it holds, if not on all


FINDINGS = msgspec.toml.decode(SOURCE.read_bytes(), type=dict[str, Finding])
"""Findings in the order of the page."""


def measure(finding: Finding) -> dict[str, Any]:
    """Run the commands of a finding and collect the value of each point, with its interval if it has one.

    Raises:
        LookupError: a point has no number, or the finding does not hold here.
    """
    found, start = {}, time.monotonic()
    for name, command in finding.runs.items():
        found[name] = _cells(command)
    took_s = time.monotonic() - start
    points = {label: _point(found[point.run], point, finding.what) for label, point in finding.points.items()}
    facts = {name: points[fact.over]["value"] / points[fact.under]["value"] for name, fact in finding.facts.items()}
    below = [f"{name} is {facts[name]:.3g}" for name, fact in finding.facts.items() if facts[name] < fact.least]
    if below:
        raise LookupError(f"does not hold here: {', '.join(below)}")
    return {"points": points, "facts": facts, "took_s": round(took_s), "made": _made(finding)}


def _cells(command: str) -> pd.DataFrame:
    """Run a command, and load the table of its run or the cells of its check."""
    with tempfile.TemporaryDirectory(prefix="attnbench-finding-") as folder:
        words = shlex.split(command)[1:]
        is_check = words[0] == "check"
        words += ["--json"] if is_check else ["--results", folder, "--quiet"]
        asked = [sys.executable, "-m", "attnbench", *words]
        environ = os.environ | {"PYTHONPATH": module_path(ROOT / "harness", ROOT)}
        done = subprocess.run(asked, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, check=False)
        runs = list(Path(folder).glob("runs/*"))
        if done.returncode not in ({0, 1, 3} if is_check else {0, 1}) or not (is_check or runs):
            raise LookupError(f"{command} ends with {done.returncode}")
        if not is_check:
            return table(read(runs[0]))
        return pd.DataFrame([cell | cell["axes"] for cell in json.loads(done.stdout)["cells"]])


def _point(cells: pd.DataFrame, point: Point, what: str) -> dict[str, float]:
    own = cells[cells["implementation"] == point.implementation]
    for axis, value in point.axes.items():
        own = own[own[axis] == value]
    if len(own) != 1 or pd.isna(own[what].iloc[0]):
        told = f"{point.implementation} {dict(point.axes)}: {own[['status', 'message']].to_dict('records')}"
        raise LookupError(f"no {what} of {told}")
    row = own.iloc[0]
    found = {"value": float(row[what])}
    if what == TIME:
        found |= {"low": float(row["latency_low_s"]), "high": float(row["latency_high_s"])}
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def _made(finding: Finding) -> str:
    """Describe where and when the numbers were measured: versions, processor and day."""
    here = environment.collect()
    packages = [each.partition("==")[0] for each in finding.needs.split()]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", *packages))
    processor = f"{here.cpu} with {here.cpu_capability}, {here.num_physical_cores} cores"
    return f"{versions}, {processor}, {datetime.now(UTC):%Y-%m-%d}"


def draw(name: str, kept: Mapping[str, Any]) -> None:
    """Draw a dot for each point, with its interval and number, top to bottom in the order of the page."""
    finding, points = FINDINGS[name], kept["points"]
    label, unit = AXES[finding.what]
    warned = {fact.over for fact in finding.facts.values() if fact.least}

    def fill(panel: Axes, _: int) -> None:
        panel.set_xscale("log")
        for place, (text, point) in enumerate(points.items()):
            value, low, high = (point.get(end, point["value"]) for end in ("value", "low", "high"))
            is_bad = finding.what == ERROR and value > 1
            colour = "#D55E00" if is_bad or text in warned else "#0072B2"
            panel.plot([low, high], [place, place], color=colour, linewidth=2)
            panel.plot([value], [place], marker="o", ms=7, color=colour)
            number = show(value, unit) if unit else significant(value, 2)
            panel.annotate(number, (high, place), (8, 0), textcoords="offset points", va="center", fontsize=9)
        if finding.what == ERROR:
            panel.axvline(1.0, color=style.INK, linewidth=1.0)
        panel.set_yticks(range(len(points)), list(points))
        panel.set_ylim(len(points) - 0.5, -0.5)
        low, high = panel.get_xlim()
        panel.set_xlim(low, high * (high / low) ** 0.16)
        if unit:
            style.log_ticks(panel.xaxis, unit)
        else:
            style.ticks(panel.xaxis, LogLocator(numticks=7), lambda value: significant(value, 1))
        panel.set_xlabel(f"{label} (logarithmic)")
        panel.tick_params(axis="y", length=0)
        panel.grid(visible=False, axis="y")

    title = "\n".join(textwrap.wrap(said(finding.title, kept), TITLE_LEN))
    picture = style.sheet([0], fill, (8.2, 1.1 + 0.36 * len(points)), title=title)
    picture.save(GALLERY / f"{name}.png")


def said(text: str, kept: Mapping[str, Any]) -> str:
    """Insert the facts into a text that names them in braces."""
    return text.format_map({name: significant(value, 2) for name, value in kept["facts"].items()})


def page(kept: Mapping[str, Mapping[str, Any]]) -> str:
    """Build the page from stored numbers."""
    lines = ["# Findings", "", BEGINNING.format(len(kept)), ""]
    for number, (name, found) in enumerate(kept.items(), 1):
        finding = FINDINGS[name]
        is_shown = finding.needs or finding.what == ERROR  # a check that reports a failure exits with 1
        language, prompt = ("console", "$ ") if is_shown else ("bash", "")
        commands = [f"{prompt}{command}" for command in finding.runs.values()]
        if finding.needs:
            commands.insert(0, f"$ python -m pip install {finding.needs}")
        title = said(finding.title, found)
        lines += [f"## {number}. {title}", "", f"![{name}](../results/gallery/findings/{name}.png)", ""]
        lines += [f"Only on {finding.only}.", ""] if finding.only else []
        lines += [said(finding.cause.strip(), found), "", f"```{language}", *commands, "```", ""]
        file, _, argument = finding.repro.partition(" ")
        script = f"[examples/findings/{file}](../examples/findings/{file})"
        lines += [f"Without attnbench: {script}{f' {argument}' * bool(argument)}.", ""]
        lines += [f"{found['took_s']} s, {found['made']}", ""]
    return "\n".join([*lines, *_observed(), *_stock()])


def _observed() -> list[str]:
    """Build a section for each finding of OBSERVED that holds on a processor, with the outputs of its script."""
    sections = []
    for finding in OBSERVED.values():
        printed = [file.read_text(encoding="utf-8").strip() for file in sorted(finding.folder.glob("*.txt"))]
        if shown := [text for text in printed if HOLDS in text]:
            outputs = () if finding.is_linked else shown
            sections += [finding.text, *(f"```text\n{text}\n```\n" for text in outputs)]
    return sections


def _observe(finding: Observed) -> None:
    """Run a finding's script here, and store what it prints under the processor's name."""
    script = ROOT / "examples" / "findings" / f"{finding.script}.py"
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in {0, 1} or " on " not in done.stdout:
        raise LookupError(f"{script.name} ends with {done.returncode}")
    name = re.sub(r"\W+", "-", done.stdout.splitlines()[0].partition(" on ")[2]).strip("-").lower()
    finding.folder.mkdir(parents=True, exist_ok=True)
    text = f"{done.stdout.strip()}\nexit code {done.returncode}, {datetime.now(UTC):%Y-%m-%d}\n"
    (finding.folder / f"{name}.txt").write_text(text, encoding="utf-8")


def _stock() -> list[str]:
    """Build the section on stock attention from the stored reports."""
    texts = [pair for file in STOCK for pair in stock.load(file).items()]
    verdicts = [text for name, text in texts if ", " in name]
    num_right = sum(text.startswith("right") for text in verdicts)
    num_findings = sum(" on " in name for name, _ in texts)
    names = " ".join(str(file.relative_to(ROOT)) for file in STOCK)
    return [STOCK_TEXT.format(num_right, len(verdicts), num_findings or "no", names), stock.side_by_side(STOCK)]


def _keep(kept: Mapping[str, Any]) -> None:
    text = json.dumps({name: kept[name] for name in FINDINGS if name in kept}, indent=1)
    KEPT.write_text(f"{text}\n", encoding="utf-8")


def main(names: list[str]) -> int:
    """Measure the named findings (by default all) and write the page; return 1 if one does not hold, else 0."""
    GALLERY.mkdir(parents=True, exist_ok=True)
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    failed = 0
    for name in [] if names == ["page"] else names or [*FINDINGS, *OBSERVED]:
        if name in OBSERVED:
            _observe(OBSERVED[name])
            continue
        print(f"{name}: {' && '.join(FINDINGS[name].runs.values())}", file=sys.stderr, flush=True)
        try:
            kept[name] = measure(FINDINGS[name])
            _keep(kept)
        except LookupError as why:
            print(f"{name}: {why}", file=sys.stderr, flush=True)
            failed = 1
    kept = {name: kept[name] for name in FINDINGS if name in kept}
    for name, found in kept.items():
        draw(name, found)
    runpy.run_path(str(ROOT / "docs" / "figures.py"))["reduce"](GALLERY)
    PAGE.write_text(page(kept), encoding="utf-8")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
