"""Real sessions of attnbench on code with a known ratio of times, for the tests V1, V3, V4, V6, V9, and W2 to W6.

A session is a fresh process that runs `attnbench compare` or `attnbench run`. Its output becomes rows, and a test is
judged by these rows alone. `tree` is the folder that contains the package attnbench, of this checkout or an older one.
"""

import json
import math
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from attnbench.processes.worker_client import ROOT, module_path
from studies.acceptance.spent import spent
from studies.frame import Row

WAITING = '''"""Textbook attention, and then a wait of a share of its own time."""

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
PRODUCT = '''"""PyTorch's attention, and a matrix product that takes some three percent of its time, or none."""

import torch
from torch.nn import functional as F

SHARE, LEFT, RIGHT = {share}, torch.ones(8, 512), torch.ones(512, 256)


def mine(query, key, value):
    if SHARE:
        LEFT @ RIGHT
    return F.scaled_dot_product_attention(query, key, value)
'''
"""WAITING and PRODUCT: sources of a function with a slowdown. In WAITING the function waits, so that the slowdown is
exact; in PRODUCT it computes an extra matrix product, which also uses threads and caches."""
ONE_CELL = ("seq_len=256", "mask=none", "direction=inference")
NEVER = 1e-6
"""A margin (smallest effect) so small that no session can decide, so that each one uses its whole budget."""
BUSY = (sys.executable, "-c", "while True: pass")
PROBE = "probe"
STUDIES = Path(__file__).parents[2]
"""The root of the repository, which contains the package `studies`."""
LOOP = STUDIES / "examples" / "plain_loop.py"
FIXTURE = Path(__file__).with_name("by_fixture.py")
"""The program that compares two implementations with attnbench's pytest fixture."""
LOOP_WARM_S = 0.3
"""Seconds of warm-up calls of each function at the beginning of the plain loop."""
LINE = re.compile(r"^(.+): ([0-9.]+) us \(.* ratio to the first ([0-9.]+)$")
"""A line that the plain loop prints: name of the function, microseconds, ratio."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
RIGHT = STUDIES / "studies" / "detection" / "blind.tar.xz"
"""Archive of functions, of which only the right ones are used here; studies/detection/blind.py describes it."""
NUM_KINDS = 20
"""Number of different honest functions in the test W6."""


def surroundings() -> dict[str, str]:
    """Return the environment variables except those that set a number of threads, since a session sets its own."""
    return {name: value for name, value in os.environ.items() if name not in THREADS}


def run_python(arguments: Sequence[str], folder: Path, tree: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder` with the package attnbench of `tree`, and wait for its end; any exit code is accepted."""
    return subprocess.run(  # noqa: S603 - our own command
        [sys.executable, *arguments],
        cwd=folder,
        env={**surroundings(), "PYTHONPATH": module_path(tree)},
        capture_output=True,
        text=True,
        check=False,
    )


def printed(arguments: Sequence[str], folder: Path, tree: Path = ROOT) -> Any:  # noqa: ANN401 - whatever it prints
    """Run Python in `folder`, and parse the last line of its standard output as JSON.

    Raises:
        RuntimeError: there is no such line; the message is the end of standard error.
    """
    done = run_python(arguments, folder, tree)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise RuntimeError(done.stderr[-2000:]) from error


def plain_loop(
    specs: Sequence[str], folder: Path, *, seconds: float, seq_len: int, num_threads: int = 0
) -> list[tuple[float, float]]:
    """Run examples/plain_loop.py in a process; return each function's seconds, and its ratio to the first function.

    `seconds` is the timed duration for each function.
    """
    command = [sys.executable, str(LOOP), *specs, f"--seq={seq_len}", f"--seconds={seconds:g}"]
    environment = surroundings() | ({"OMP_NUM_THREADS": str(num_threads)} if num_threads else {})
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)  # noqa: S603 - our own
    found = [match for line in done.stdout.splitlines() if (match := LINE.match(line))]
    return [(float(match[2]) * 1e-6, float(match[3])) for match in found]


def cells(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of the latest records.csv below `folder`; a missing verdict becomes "none"."""
    table = pd.read_csv(max(folder.glob("**/runs/*/records.csv")))
    return table.fillna({"verdict": "none"}).to_dict("records")  # type: ignore[return-value]


@contextmanager
def neighbours(number: int) -> Iterator[None]:
    """Run `number` processes that compute without a pause until the context ends."""
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
    budget_s: float,
    share: float = 0.0,
    code: str = WAITING,
    is_same_file: bool = False,
    smallest_effect: float = 0.0,
    num_threads: int = 0,
    num_busy: int = 0,
    loop_s: float = 0.0,
    tree: Path = ROOT,
) -> Row:
    """Run `attnbench compare` on one shape: a function against the same function, slowed down by `share`.

    If `loop_s` is above 0, the plain loop first times each function for that many seconds.
    """
    with tempfile.TemporaryDirectory(prefix="attnbench-session-") as name, neighbours(num_busy):
        folder = Path(name)
        for file, slower in (("base.py", 0.0), ("candidate.py", share)):
            (folder / file).write_text(code.format(share=slower), encoding="utf-8")
        sides = ["base.py:mine", "base.py:mine" if is_same_file else "candidate.py:mine"]
        row: Row = {"session": float(number), "share": share}
        if loop_s:
            loop = plain_loop(sides, folder, seconds=loop_s, seq_len=256, num_threads=num_threads)
            row["loop"] = loop[1][1]
        threads = [f"num_threads={num_threads}"] * bool(num_threads)
        options = [f"--set={each}" for each in (*ONE_CELL, *threads)]
        options += [f"--budget={budget_s:g}", f"--seed={number}", "--json"]
        options += [f"--smallest-effect={smallest_effect:g}"] * bool(smallest_effect)
        start = time.monotonic()
        done = run_python(["-P", "-m", "attnbench", "compare", *sides, *options], folder, tree)
        row |= {"command_s": time.monotonic() - start, "load": os.getloadavg()[0]}
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
        "spent": spent(journal),
    }


def _is_alike(visit: Mapping[str, Any]) -> bool:
    """Return whether all samples of a visit (a few blocks of one workload) have the same number of calls.

    Samples of the interference probe are not compared.
    """
    counts = {
        sample[1]
        for arm in visit["arms"]
        if arm["arm"].get("role") != PROBE
        for sample in arm["samples"]
    }  # fmt: skip
    return len(counts) == 1


def neighbour(number: int, *, num_busy: int, num_threads: int, by_fixture: bool) -> Row:
    """Time a function on a quiet and on a busy machine; return the relative change, and the verdict of the busy run."""
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
        (folder / "mine.py").write_text(WAITING.format(share=0.0), encoding="utf-8")
        if by_fixture:
            found: Row = printed(["-P", str(FIXTURE), json.dumps(axes), "mine.py:mine", "sdpa"], folder)
            return {**found, "seconds": float(found["seconds"]["mine"])}
        cell, is_warned = _cell(number, folder, axes, "mine", budget_s=6.0)
        return {"verdict": cell["verdict"], "seconds": float(cell["latency_s"]), "is_warned": is_warned}


def _cell(
    number: int, folder: Path, axes: Mapping[str, object], function: str, budget_s: float
) -> tuple[dict[str, Any], bool]:
    """Run `function` of mine.py and `sdpa` with attnbench; return the row of `mine`, and whether the run warned."""
    options = [f"--set={axis}={value}" for axis, value in axes.items()]
    specs = [f"mine=mine.py:{function}", "-i", "sdpa"]
    done = run_python(
        [
            "-P",
            "-m",
            "attnbench",
            "run",
            "-i",
            *specs,
            *options,
            f"--budget={budget_s:g}",
            "--json",
            f"--seed={number}",
        ],
        folder,
    )
    (cell,) = (each for each in cells(folder) if each["implementation"] == "mine")
    return cell, bool(json.loads(done.stdout)["warnings"])


def honest(number: int, *, num_busy: int) -> Row:
    """Run one kind of honest function, chosen by `number`, next to busy processes; return a row with its status."""
    axes = {"seq_len": 128, "mask": "none", "direction": "inference"}
    with tempfile.TemporaryDirectory(prefix="attnbench-session-") as place, neighbours(num_busy):
        folder = Path(place)
        kind = honest_kind(number, folder / "mine.py")
        cell, _ = _cell(number, folder, axes, "attention", budget_s=1.5)
    return {"session": float(number), "kind": kind, "status": str(cell["status"])}


def honest_kind(number: int, to: Path) -> str:
    """Write the right function for this session to the file `to`, and return the function's name.

    The sessions use NUM_KINDS functions in turn, spread evenly over the archive.
    """
    with tarfile.open(RIGHT) as archive:
        names = sorted(name for name in archive.getnames() if name.startswith("honest/h"))
        name = names[number % NUM_KINDS * len(names) // NUM_KINDS]
        source = archive.extractfile(name)
        assert source is not None
        to.write_bytes(source.read())
    return Path(name).stem


def rivals(number: int, *, budget_s: float, tree: Path = ROOT) -> list[Row]:
    """Compare a function with itself by every tool, in equal time; only by attnbench if `tree` is an older one."""
    with tempfile.TemporaryDirectory(prefix="attnbench-session-") as name:
        files = [Path(name) / file for file in ("base.py", "candidate.py")]
        for file in files:
            file.write_text(PRODUCT.format(share=0.0), encoding="utf-8")
        tools = ["attnbench"] * (tree != ROOT)
        asked = ["-m", "studies.acceptance.rivals", *map(str, files), f"{budget_s:g}", str(number), *tools]
        return [{"session": float(number), **row} for row in printed(asked, STUDIES, tree)]
