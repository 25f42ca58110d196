"""Identical code against itself: T1 how far apart it seems, T2 how often it alarms, T10 likewise under other load.

T2 looks at our e-value after every pair, and counts an alarm where it ever reached 20. T1 and T2 share comparisons.
"""

import math
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd

from studies.acceptance import engine, rivals, workloads
from studies.acceptance.engine import OURS
from studies.acceptance.outcome import LABELS, Outcome, Row
from studies.acceptance.plan import AA_RMS, AA_SHARE_OF_RIVAL, COMPARED_IN_FULL, Size, largest_count
from studies.acceptance.workloads import Call, Cell

BUSY_S = (0.02, 0.5)
"""Somebody else is at work, and then at rest, for so long: uniform between the two."""
SPINNER = """
import random, sys, time
draws = random.Random(int(sys.argv[1]))
while True:
    end = time.perf_counter() + draws.uniform(0.02, 0.5)
    while time.perf_counter() < end:
        pass
    time.sleep(draws.uniform(0.02, 0.5))
"""


def compare_all(number: int, size: Size) -> list[Row]:
    """T1: every cell against itself by every tool, in a new random order; by ours alone in later pieces."""
    draws = random.Random(f"T1/{number}")
    rows: list[Row] = []
    tools = [None, *(rivals.RIVALS if number < size.num_rivals else ())]
    cells = workloads.cells(size.num_cells)
    for cell in draws.sample(cells, len(cells)):
        with workloads.ready(cell) as call:
            for tool in draws.sample(tools, len(tools)):
                found = ours(call, cell, size, number) if tool is None else theirs(tool, call, cell, size)
                rows.extend(found)
    return rows


def ours(call: Call, cell: Cell, size: Size, seed: int) -> list[Row]:
    """One comparison by the engine."""
    found = engine.compare(call, call, size.compare_s, seed=seed)
    return [{"cell": cell.id, "tool": OURS, "statistic": "paired ratio", **found.row()}]


def theirs(tool: rivals.Rival, call: Call, cell: Cell, size: Size) -> list[Row]:
    """One comparison by a rival: a row for each statistic and each rule."""
    found = rivals.compare(tool, call, call, size.compare_s)
    at: Row = {"cell": cell.id, "tool": tool.name, "wall_s": found.wall_s}
    rows: list[Row] = [{**at, "statistic": name, "log": log} for name, log in found.logs().items()]
    return rows + [{**at, "rule": name, "alarms": float(alarms)} for name, alarms in found.alarms().items()]


def compare_ours(number: int, size: Size) -> list[Row]:
    """T2 in its short form: more comparisons, by the engine alone."""
    rows: list[Row] = []
    for repeat in range(size.num_repeats):
        for cell in workloads.cells(size.num_cells):
            with workloads.ready(cell) as call:
                rows += ours(call, cell, size, 1000 * (number + 1) + repeat)
    return rows


def rms(logs: Iterable[float]) -> float:
    """The root mean square about 0, for what ought to be 0."""
    return math.sqrt(float(np.mean(np.square(np.fromiter(logs, dtype=float)))))


def aa_error(rows: list[Row], *, short: bool) -> Outcome:
    """RMS of the log ratio, in each cell for ours, over all cells for the comparison with the rivals."""
    frame: Any = pd.DataFrame(rows).dropna(subset=["log"])
    pooled = frame.groupby(["tool", "statistic"], sort=False)["log"].agg(rms)
    own = frame[frame["tool"] == OURS].groupby("cell", sort=False)["log"].agg(rms)
    mine, others = float(pooled[OURS].iloc[0]), pooled.drop(OURS, level=0)
    worst, best = float(own.max()), float(others.min()) if len(others) else math.nan
    walls = frame.groupby("tool", sort=False)["wall_s"].median()
    counts = frame.groupby(["tool", "statistic"], sort=False).size()
    texts = {
        str(tool): ", ".join(f"{name} {each:.2%}" for (_, name), each in found.items())
        + f" (n={counts[tool].iloc[0]}, {walls[tool]:.1f} s)"
        for tool, found in others.groupby(level=0, sort=False)
    }
    return Outcome(
        id=LABELS["aa_error"],
        title="the same code against itself, 2 s: RMS of the log ratio",
        limit="0.5 % in each cell; over all cells a tenth of the best rival statistic, chosen afterwards",
        found=f"worst cell {worst:.2%} ({own.idxmax()}), all cells {mine:.2%}, "
        f"best rival statistic {best:.2%} ({'/'.join(map(str, others.idxmin())) if len(others) else 'none'}); "
        f"n={len(frame[frame['tool'] == OURS])}, {walls[OURS]:.1f} s each",
        passes=worst <= AA_RMS and mine <= AA_SHARE_OF_RIVAL * best,
        is_short=short,
        rivals=texts,
        rows=tuple(rows),
    )


def false_alarms(rows: list[Row], *, short: bool) -> Outcome:
    """False alarms of verdicts under continuous watch, and of the rivals' usual rules, looked at once at the end."""
    frame: Any = pd.DataFrame(rows)
    own = frame[frame["tool"] == OURS]
    number, alarms = len(own), int(own["is_alarm"].sum())
    wrong = int(own["verdict"].isin(["slower", "faster"]).sum())
    limit = largest_count(number)
    rules = frame.dropna(subset=["alarms"]) if "alarms" in frame else frame.iloc[:0]
    texts = {
        str(tool): ", ".join(
            f"{rule} {int(each['alarms'].sum())} of {len(each)}" for rule, each in found.groupby("rule", sort=False)
        )
        for tool, found in rules.groupby("tool", sort=False)
    }
    asked = f"{largest_count(COMPARED_IN_FULL)} of {COMPARED_IN_FULL}"
    return Outcome(
        id=LABELS["false_alarms"],
        title="the same code against itself, watched continuously: false alarms at 5 %",
        limit=f"at most {asked}" + ("" if number == COMPARED_IN_FULL else f"; by the same bound {limit} of {number}"),
        found=f"{alarms} of {number}; verdicts faster or slower: {wrong}",
        passes=alarms <= limit,
        is_short=short or number < COMPARED_IN_FULL,
        rivals=texts,
        rows=tuple(rows),
    )


@contextmanager
def busy_process(seed: int) -> Iterator[None]:
    """Another process that takes a core, on and off."""
    process = subprocess.Popen([sys.executable, "-c", SPINNER, str(seed)])  # noqa: S603 - our own few lines
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def busy_thread(seed: int) -> Iterator[None]:
    """Another thread of this process, at work outside the interpreter's lock, on and off."""
    done = threading.Event()
    draws = random.Random(seed)
    matrix = np.random.default_rng(seed).standard_normal((256, 256))

    def work() -> None:
        while not done.is_set():
            end = time.perf_counter() + draws.uniform(*BUSY_S)
            while time.perf_counter() < end and not done.is_set():
                np.einsum("ij,jk->ik", matrix, matrix)  # by this thread alone: those of a BLAS would not rest
            done.wait(draws.uniform(*BUSY_S))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def compare_under_load(number: int, size: Size) -> list[Row]:
    """T10: short and long operations, one thread and two, next to a busy process and a busy thread."""
    rows: list[Row] = []
    names = (workloads.HUNDRED_US.workload, workloads.MILLISECOND.workload)
    cells = [Cell(workload=name, num_threads=threads) for name in names for threads in (1, 2)]
    for repeat in range(size.num_repeats):
        seed = 1000 * number + repeat
        other = busy_process if repeat % 2 else busy_thread
        with other(seed):
            for cell in cells:
                with workloads.ready(cell) as call:
                    found = engine.compare(call, call, size.compare_s, seed=seed)
                rows.append({"cell": cell.id, "tool": OURS, "load": other.__name__, **found.row()})
                rows[-1]["is_invalid"] = float(found.is_invalid)
    return rows


def busy_neighbour(rows: list[Row], *, short: bool) -> Outcome:
    """False alarms among the sessions that do not say of themselves that they are invalid."""
    frame: Any = pd.DataFrame(rows)
    valid = frame[frame["is_invalid"] == 0]
    alarms, limit = int(valid["is_alarm"].sum()), largest_count(len(valid))
    parts = ", ".join(
        f"{name.replace('_', ' ')} {int(each['is_alarm'].sum())} of {len(each)}"
        for name, each in valid.groupby("load", sort=False)
    )
    return Outcome(
        id=LABELS["busy_neighbour"],
        title="the same code next to a busy process or thread, switched on and off at random: false alarms at 5 %",
        limit=f"at most {limit} of {len(valid)} (5 % with the bound of T2), sessions that say invalid left out",
        found=f"{alarms} of {len(valid)} ({parts}); {len(frame) - len(valid)} said invalid; "
        f"blocks discarded {frame['discarded_share'].mean():.1%}; RMS of the log ratio {rms(valid['log']):.2%}",
        passes=alarms <= limit,
        is_short=short,
        rows=tuple(rows),
    )
