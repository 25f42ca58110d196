"""Real sessions of the command line with a known truth: V1, V3 to V7 and V9.

A session is a fresh process that runs `attnbench compare` or `attnbench run`. Its output becomes rows, and a test's
verdict reads nothing else. `tree` is the folder with the package attnbench: this one's, or an older one's.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from attnbench.processes.worker_client import ROOT, module_path
from attnbench.statistics.intervals import median
from studies.frame import Row

CODE = '''"""Textbook attention, and then a wait of a share of its own time."""

from time import perf_counter

SHARE = {share}


def mine(query, key, value):
    start = perf_counter()
    context = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1) @ value
    end = start + (1 + SHARE) * (perf_counter() - start)
    while perf_counter() < end:
        pass
    return context
'''
ONE_CELL = ("seq_len=256", "mask=none", "direction=inference")
FIXTURE = """
import json, sys
from attnbench.pytest_plugin import AttentionBench
from attnbench.reports import story

found = AttentionBench(0)(*sys.argv[2:4], budget_s=3.0, **json.loads(sys.argv[1]))
frame = found.to_frame()
seconds = dict(zip(frame["implementation"], frame["latency_s"]))
print(json.dumps({"verdict": found.verdict, "seconds": seconds, "is_warned": bool(story.troubles(found.results))}))
"""
"""One comparison by the pytest fixture, of two implementations on a shape."""
BUSY = (sys.executable, "-c", "while True: pass")
PROBE = "probe"
STUDIES = Path(__file__).parents[2]
"""The folder with this package."""


def run_python(
    arguments: Sequence[str], folder: Path, tree: Path = ROOT, settings: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python in the folder to its end, whatever its exit code; `settings` are further environment variables."""
    environment = {**os.environ, **(settings or {}), "PYTHONPATH": module_path(tree)}
    return subprocess.run(  # noqa: S603 - our own command
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def printed(
    arguments: Sequence[str],
    folder: Path,
    settings: Mapping[str, str] | None = None,
) -> Any:  # noqa: ANN401 - whatever the program prints
    """Run Python in the folder, and parse the last line of its output as JSON.

    Raises:
        RuntimeError: there is none; the message is the end of its errors.
    """
    done = run_python(arguments, folder, settings=settings)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise RuntimeError(done.stderr[-2000:]) from error


def cells(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of the latest records.csv below the folder; a missing verdict is "none"."""
    table = pd.read_csv(max(folder.glob("**/runs/*/records.csv")))
    return table.fillna({"verdict": "none"}).to_dict("records")  # type: ignore[return-value]


@contextmanager
def neighbours(number: int) -> Iterator[None]:
    """Keep this many processes computing without a pause."""
    running = [subprocess.Popen(BUSY) for _ in range(number)]  # noqa: S603 - our own command
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def compare(  # noqa: PLR0913 - what makes a session
    number: int,
    *,
    share: float,
    budget_s: float,
    is_same_file: bool = False,
    smallest_effect: float = 0.0,
    num_threads: int = 0,
    num_busy: int = 0,
    tree: Path = ROOT,
) -> Row:
    """Run `attnbench compare` on one cell: a function against itself, slowed down by `share`."""
    with tempfile.TemporaryDirectory(prefix="attnbench-session-") as name, neighbours(num_busy):
        folder = Path(name)
        for file, slower in (("base.py", 0.0), ("candidate.py", share)):
            (folder / file).write_text(CODE.format(share=slower), encoding="utf-8")
        sides = ["base.py:mine", "base.py:mine" if is_same_file else "candidate.py:mine"]
        threads = [f"num_threads={num_threads}"] * bool(num_threads)
        options = [f"--set={each}" for each in (*ONE_CELL, *threads)]
        options += [f"--budget={budget_s:g}", f"--seed={number}", "--json"]
        options += [f"--smallest-effect={smallest_effect:g}"] * bool(smallest_effect)
        start = time.monotonic()
        done = run_python(["-P", "-m", "attnbench", "compare", *sides, *options], folder, tree)
        row: Row = {
            "session": float(number),
            "share": share,
            "elapsed_s": time.monotonic() - start,
            "load": os.getloadavg()[0],
        }
        return row | _compared(done.stdout, folder)


def _compared(output: str, folder: Path) -> Row:
    try:
        warnings = json.loads(output).get("warnings")
        (cell,) = (each for each in cells(folder) if each["verdict"] != "none")
    except ValueError:  # nothing was printed, stored or compared
        return {"verdict": "none"}
    (journal,) = folder.glob("results/runs/*/journal.jsonl")
    visits = [each for each in map(json.loads, journal.read_bytes().splitlines()) if each["type"] == "visit_finished"]
    return {
        "verdict": cell["verdict"],
        "ratio": float(cell["ratio"]),
        "low": 0.0 if pd.isna(cell["ratio_low"]) else float(cell["ratio_low"]),
        "high": math.inf if pd.isna(cell["ratio_high"]) else float(cell["ratio_high"]),
        "is_warned": float(bool(warnings)),
        "processes": float(len({visit["epoch"] for visit in visits})),
        "alike": float(all(map(_is_alike, visits))),
    }


def _is_alike(visit: Mapping[str, Any]) -> bool:
    """Whether all arms of a visit had the same number of calls in each sample."""
    counts = {
        sample[1]
        for arm in visit["arms"]
        if arm["arm"].get("role") != PROBE
        for sample in arm["samples"]
    }  # fmt: skip
    return len(counts) == 1


def neighbour(number: int, *, num_busy: int, num_threads: int, by_fixture: bool) -> Row:
    """Time a function on a quiet machine and next to busy processes, with the warnings of the second run."""
    quiet = _timed(number, num_busy=0, num_threads=num_threads, by_fixture=by_fixture)
    busy = _timed(number, num_busy=num_busy, num_threads=num_threads, by_fixture=by_fixture)
    return {
        "session": float(number),
        "off": busy["seconds"] / quiet["seconds"] - 1,
        "verdict": busy["verdict"],
        "is_warned": float(busy["is_warned"]),
    }


def _timed(number: int, *, num_busy: int, num_threads: int, by_fixture: bool) -> Row:
    axes = {"seq_len": 256, "mask": "none", "direction": "inference", "num_threads": num_threads}
    with tempfile.TemporaryDirectory(prefix="attnbench-session-") as name, neighbours(num_busy):
        folder = Path(name)
        (folder / "mine.py").write_text(CODE.format(share=0.0), encoding="utf-8")
        if by_fixture:
            found: Row = printed(["-c", FIXTURE, json.dumps(axes), "mine.py:mine", "sdpa"], folder)
            return {**found, "seconds": float(found["seconds"]["mine"])}
        cell, is_warned = _cell(number, folder, axes, budget_s=6.0)
        return {"verdict": cell["verdict"], "seconds": float(cell["latency_s"]), "is_warned": is_warned}


def _cell(number: int, folder: Path, axes: Mapping[str, object], budget_s: float) -> tuple[dict[str, Any], bool]:
    """Return the cell of `mine.py:mine` in a run next to `sdpa`, and whether the run has warnings."""
    options = [f"--set={axis}={value}" for axis, value in axes.items()]
    asked = ["-P", "-m", "attnbench", "run", "mine.py:mine", "-i", "sdpa", *options, f"--budget={budget_s:g}", "--json"]
    done = run_python([*asked, f"--seed={number}"], folder)
    (cell,) = (each for each in cells(folder) if each["implementation"] == "mine")
    return cell, bool(json.loads(done.stdout)["warnings"])


def honest(number: int, *, num_busy: int) -> Row:
    """Return the status of an honest function next to busy processes."""
    axes = {"seq_len": 256, "mask": "none", "direction": "inference", "dtype": "float32", "scope": "attention"}
    with tempfile.TemporaryDirectory(prefix="attnbench-session-") as name, neighbours(num_busy):
        folder = Path(name)
        (folder / "mine.py").write_text(CODE.format(share=0.0), encoding="utf-8")
        cell, _ = _cell(number, folder, axes, budget_s=1.5)
    return {"session": float(number), "status": str(cell["status"])}


def rivals(number: int, *, share: float, budget_s: float) -> list[Row]:
    """Compare a function with itself, slowed down by `share`, by every tool in equal time."""
    with tempfile.TemporaryDirectory(prefix="attnbench-session-") as name:
        folder = Path(name)
        for file, slower in (("base.py", 0.0), ("candidate.py", share)):
            (folder / file).write_text(CODE.format(share=slower), encoding="utf-8")
        files = [str(folder / file) for file in ("base.py", "candidate.py")]
        asked = ["-m", "studies.acceptance.rivals", *files, f"{budget_s:g}", str(number)]
        return [{"session": float(number), **row} for row in printed(asked, STUDIES)]


def sweep(number: int, *, budget_s: float = 0.0) -> list[Row]:
    """Run a quick sweep; a row for each comparison."""
    budget = [f"--budget={budget_s:g}"] * bool(budget_s)
    with tempfile.TemporaryDirectory(prefix="attnbench-session-") as name:
        start = time.monotonic()
        run_python(["-P", "-m", "attnbench", "run", "--sweep=quick", *budget, f"--seed={number}"], Path(name))
        elapsed_s = time.monotonic() - start
        found = cells(Path(name))
    return [
        {
            "session": float(number),
            "cell": f"{cell['implementation']} on {cell['workload']}",
            "ratio": float(cell["ratio"]),
            "verdict": cell["verdict"],
            "elapsed_s": elapsed_s,
        }
        for cell in found
        if cell["verdict"] != "none" and cell["ratio"] > 0 and cell["status"] == "ok"
    ]


def true_ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Estimate the log ratio of each cell: the median over all sessions, equally weighted."""
    by_cell: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_cell[str(row["cell"])].append(math.log(float(row["ratio"])))
    return {cell: median(logs) for cell, logs in by_cell.items()}
