"""Whole runs: T14 killed at random moments and resumed, T16 how much of their time goes into calls."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd

from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.results import read
from attnbench.processes.worker_client import ROOT, module_path
from attnbench.storage.events import Event, RunFinished, VisitFinished
from attnbench.storage.journal import JOURNAL, events, find_runs, newest_run
from attnbench.storage.records import Verdict
from studies.acceptance.outcome import LABELS, Outcome, Row
from studies.acceptance.plan import CALLED_SHARE, KILLS, Size

TINY = """summary = "small enough to be killed often"
budget_s = 80.0
metrics = ["latency"]
implementations = ["sdpa", "fused", "bmm", "naive_loop"]

[[grid]]
seq_len = [32, 64, 96, 128, 160]
"""
SLOW = "naive_loop"
"""The one whose verdict is known beforehand: a loop over tokens in Python."""
SHORTEST_LATE_S, LONGEST_LIFE_S = 4.0, 12.0
"""A run is killed after a random time up to this: while it starts, checks, visits or writes. Every other life lasts at
least as long as it takes to start, so that it is killed at work."""


def _start(*options: str) -> subprocess.Popen[bytes]:
    """`attnbench run` in a process group of its own."""
    environment = os.environ | {"PYTHONPATH": module_path(ROOT)}
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-P", "-m", "attnbench", "run", *options]
    return subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet, start_new_session=True, cwd=ROOT)  # noqa: S603 - our own module


def _visits(journal: Path) -> list[bytes]:
    """The whole lines of a journal that tell of a finished visit, as they are on disk."""
    lines = journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []
    return [line for line in lines if b'"visit_finished"' in line]


def kill(number: int, size: Size) -> list[Row]:
    """T14: kill and resume, over and over; a run that comes to its end makes way for a new one."""
    draws = random.Random(f"T14/{number}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="attnbench-kills-") as name:
        folder = Path(name)
        sweep, results = folder / "tiny.toml", folder / "results"
        sweep.write_text(TINY, encoding="utf-8")
        run: Path | None = None
        while sum(row["was_killed"] == 1 for row in rows) < size.num_repeats:
            row, run = _one_life(draws, sweep, results, run)
            rows.append(row)
        rows.append(_come_to_an_end(results, sweep, run))
    return rows


def _one_life(draws: random.Random, sweep: Path, results: Path, run: Path | None) -> tuple[Row, Path | None]:
    """Start or resume, kill after a random time, and see whether every visit that had been finished is still there."""
    before = _visits(run / JOURNAL) if run else []
    how = ["--resume", str(run)] if run else ["--sweep", str(sweep)]
    known = set(find_runs(results))
    process = _start(*how, "--results", str(results))
    life_s = draws.uniform(draws.choice([0.0, SHORTEST_LATE_S]), LONGEST_LIFE_S)
    try:
        process.wait(timeout=life_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    was_killed = code == -signal.SIGKILL
    if run is None:
        run = next(iter(set(find_runs(results)) - known), None)
    after = _visits(run / JOURNAL) if run else []
    lost = sum(old != new for old, new in zip(before, after, strict=False)) + max(0, len(before) - len(after))
    row: Row = {
        "life_s": life_s,
        "was_killed": float(was_killed),
        "exit_code": float(code),
        "num_before": float(len(before)),
    }
    row |= {"num_after": float(len(after)), "num_lost": float(lost)}
    if not was_killed and run is not None:
        row["is_valid"] = float(_is_valid(run))
    return row, (run if was_killed else None)


def _come_to_an_end(results: Path, sweep: Path, run: Path | None) -> Row:
    """Let the run go on undisturbed, or a new one where none is left, and see whether its verdicts are valid."""
    before = _visits(run / JOURNAL) if run else []
    how = ["--resume", str(run)] if run else ["--sweep", str(sweep)]
    code = _start(*how, "--results", str(results)).wait()
    last = run or newest_run(results)
    after = _visits(last / JOURNAL)
    row: Row = {"life_s": 0.0, "was_killed": 0.0, "exit_code": float(code), "num_before": float(len(before))}
    lost = float(after[: len(before)] != before)
    return row | {"num_after": float(len(after)), "num_lost": lost, "is_valid": float(_is_valid(last))}


def _is_valid(run: Path) -> bool:
    """It ended, each workload's visits are counted without gap or double, and it says what is known beforehand."""
    history: list[Event] = list(events(run / JOURNAL))
    if not isinstance(history[-1], RunFinished):
        return False
    numbers: dict[str, list[int]] = {}
    for event in history:
        if isinstance(event, VisitFinished):
            numbers.setdefault(event.workload, []).append(event.visit)
    is_whole = bool(numbers) and all(each == list(range(len(each))) for each in numbers.values())
    slow = {row.verdict for row in comparisons(read(run)) if row.implementation == SLOW}
    return is_whole and Verdict.slower in slow and slow <= {Verdict.slower, Verdict.undecided}


def kills(rows: list[Row], *, short: bool) -> Outcome:
    """Visits lost, and whether runs that were resumed ended as they should, with verdicts known to be right."""
    frame: Any = pd.DataFrame(rows)
    is_killed = frame["was_killed"] == 1
    ends, killed, lost = frame[~is_killed], int(is_killed.sum()), int(frame["num_lost"].sum())
    amid = int((frame[is_killed]["num_after"] > frame[is_killed]["num_before"]).sum())
    num_valid, crashed = int((ends["is_valid"] == 1).sum()), int((ends["exit_code"] != 0).sum())
    return Outcome(
        id=LABELS["kills"],
        title="runs killed by SIGKILL at random moments and resumed",
        limit=f"{KILLS} kills, no finished visit lost, each resumed run ends with exit code 0 and with valid verdicts",
        found=f"{killed} kills, {amid} of them amid visits, {lost} visits lost, up to {frame['num_after'].max():.0f} "
        f"visits in a journal; of {len(ends)} runs that came to their end {num_valid} were valid, with no verdict on "
        f"{SLOW} but slower, and {crashed} ended with another exit code than 0",
        passes=lost == 0 and num_valid == len(ends) and not crashed and amid > 0,
        is_short=short or killed < KILLS,
        rows=tuple(rows),
    )


def run_quick(_: int, size: Size) -> list[Row]:
    """T16: the quick sweep as a user runs it."""
    with tempfile.TemporaryDirectory(prefix="attnbench-quick-") as name:
        results = Path(name)
        start = time.perf_counter()
        budget = ["--budget", f"{size.compare_s:g}"] if size.compare_s else []
        code = _start("--sweep", "quick", "--results", str(results), *budget).wait()
        wall_s = time.perf_counter() - start
        found = read(newest_run(results))
    row: Row = {"exit_code": float(code), "wall_s": wall_s, "elapsed_s": found.elapsed_s or wall_s}
    return [row | {"check_s": found.check_s, "called_s": found.called_s, "budget_s": found.plan.budget_s}]


def called_share(rows: list[Row], *, short: bool) -> Outcome:
    """(check_s + called_s) of the journal over all of the process's time, from its start to the last report."""
    row = {name: float(value) for name, value in rows[0].items()}
    used_s = row["check_s"] + row["called_s"]
    share = used_s / row["wall_s"]
    return Outcome(
        id=LABELS["called_share"],
        title="share of a quick sweep's wall time inside timed or checked calls",
        limit=f"at least {CALLED_SHARE:.0%} of the command's wall time, start and reports included",
        found=f"{share:.1%} of {row['wall_s']:.0f} s (checks {row['check_s']:.0f} s, "
        f"inputs, oracle and diagnosis among them; calls {row['called_s']:.0f} s); "
        f"{used_s / row['elapsed_s']:.1%} of the {row['elapsed_s']:.0f} s without start and reports",
        passes=share >= CALLED_SHARE,
        is_short=short,
        rows=tuple(rows),
    )
