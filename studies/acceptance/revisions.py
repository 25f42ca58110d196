"""Two revisions of a sample repository, compared as users do: R1 to R4, false alarms and planted slowdowns."""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from attnbench.analysis import results
from attnbench.analysis.comparisons import whole
from attnbench.analysis.results import Results
from attnbench.processes.worker_client import ROOT, module_path
from attnbench.statistics.intervals import median
from attnbench.storage.events import Event, VisitFinished
from attnbench.storage.journal import JOURNAL, Journal, events, newest_run
from attnbench.storage.records import Verdict
from studies.acceptance.outcome import Outcome, Row
from studies.acceptance.plan import EFFECT, GATE_FOUND, GATE_S, GATE_WRONG, Size

SWEEP = """summary = "a grid of sixteen cells"
budget_s = {budget_s}

[[grid]]
direction = "inference"
mask = ["none", "causal"]
num_heads = [4, 8]
seq_len = [64, 128, 256, 512]
"""
CODE = '''"""Textbook attention, and then a wait of a share of its own time."""

from time import perf_counter
{imported}
SHARE = {share}


def mine(query, key, value, *, mask=None):
    start = perf_counter()
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    context = scores.softmax(-1) @ value
    end = start + (1 + SHARE) * (perf_counter() - start)
    while perf_counter() < end:
        pass
    return context
'''
NEIGHBOUR = "import neighbour  # which keeps the sides out of one process\n"
FINDING, INVALID = 1, 4
"""The exit codes of a session that found something, and of one that says of itself that it was disturbed."""
FEWEST_VALID = 0.8
"""Of sessions of which more say that they were disturbed, the others show nothing."""
CROWDED = 1.5
"""A larger load than this for each core is given as the cause of a miss."""
MOMENTS = 12
"""At so many moments of a session its verdict on the whole is read, to see when it was found."""


def same_here(number: int, size: Size) -> list[Row]:
    """R1: a revision against another that differs by a comment, both sides in one process."""
    return [_session(number, size, share=0.0, is_apart=False)]


def slower_here(number: int, size: Size) -> list[Row]:
    """R2: a slowdown of 5 % in the second revision."""
    return [_session(number, size, share=EFFECT, is_apart=False)]


def same_apart(number: int, size: Size) -> list[Row]:
    """R3: as R1, each side in processes of its own."""
    return [_session(number, size, share=0.0, is_apart=True)]


def slower_apart(number: int, size: Size) -> list[Row]:
    """R4: as R2, each side in processes of its own."""
    return [_session(number, size, share=EFFECT, is_apart=True)]


def make_repository(folder: Path, *, share: float, is_apart: bool, budget_s: float) -> None:
    """A repository with the tags base and candidate, of which the second is slower by `share`."""
    imported = NEIGHBOUR if is_apart else ""
    (folder / "neighbour.py").write_text("", encoding="utf-8")
    (folder / "grid.toml").write_text(SWEEP.format(budget_s=budget_s), encoding="utf-8")
    _git(folder, "init", "--quiet")
    for tag, text in (
        ("base", CODE.format(share=0.0, imported=imported)),
        ("candidate", CODE.format(share=share, imported=imported) + "\n# The second revision.\n"),
    ):
        (folder / "mine.py").write_text(text, encoding="utf-8")
        _git(folder, "add", "--all")
        _git(folder, "commit", "--quiet", "--message", tag)
        _git(folder, "tag", tag)


def _git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=sample", "-c", "user.email=sample@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)  # noqa: S603, S607


def _session(number: int, size: Size, *, share: float, is_apart: bool) -> Row:
    """One session by the command line, and what it said."""
    with tempfile.TemporaryDirectory(prefix="attnbench-revisions-") as name:
        folder = Path(name)
        make_repository(folder, share=share, is_apart=is_apart, budget_s=size.compare_s)
        asked = ["compare", "rev:base", "rev:candidate", "-i", "mine.py:mine", "--sweep", "grid.toml"]
        more = ["--seed", str(number), "--json"]
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-P", "-m", "attnbench", *asked, *more],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": module_path(ROOT)},
            stdout=subprocess.PIPE,
            check=False,
        )
        summary = json.loads(done.stdout)
        run = newest_run(folder / "results")
        row = read(summary, run, done.returncode)
        return {"session": float(number), "planted": share, **row, "gate_code": float(_gate(folder))}


def _gate(folder: Path) -> int:
    """How `attnbench gate` ends on the session, memory, operators and errors included."""
    command = [sys.executable, "-P", "-m", "attnbench", "gate"]
    environment = os.environ | {"PYTHONPATH": module_path(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, stdout=sys.stderr, check=False).returncode  # noqa: S603


def read(summary: dict[str, object], run: Path, exit_code: int) -> Row:
    """The row of one session, from what the command printed and its journal."""
    found, cells, whole = results.read(run), summary["cells"], summary["suite"]
    assert isinstance(cells, list)
    verdicts = [cell["verdict"] for cell in cells if cell["verdict"]]
    assert isinstance(whole, dict)
    return {
        "exit_code": float(exit_code),
        "suite": str(whole["verdict"]),
        "ratio": whole["ratio"],
        "low": whole["low"],
        "high": whole["high"],
        "detectable": whole["minimum_detectable_effect"] or math.inf,
        "num_cells": float(len(verdicts)),
        "num_slower": float(verdicts.count("slower")),
        "num_equivalent": float(verdicts.count("equivalent")),
        "discarded_share": found.num_discarded / max(1, found.num_blocks),
        "load": load(found),
        "elapsed_s": found.elapsed_s or math.inf,
        "found_s": found_s(run),
    }


def load(found: Results) -> float:
    """The machine's load while samples were taken, for each of its cores: their median."""
    cores = max(each.environment.num_logical_cores for each in found.records if each.environment is not None)
    samples = (each for record in found.records for measured in record.measurements for each in measured.samples)
    return median(each.load for each in samples) / max(1, cores)


def found_s(run: Path) -> float:
    """Seconds from the first check to the first of some moments at which the whole was slower; infinity for never."""
    history = list(events(run / JOURNAL))
    visits = [place for place, event in enumerate(history) if isinstance(event, VisitFinished)]
    total_s = results.read(run).elapsed_s or math.inf
    last_s = _end_s(history[visits[-1]])
    with tempfile.TemporaryDirectory(prefix="attnbench-prefix-") as name:
        for step in range(1, MOMENTS + 1):
            place = visits[max(0, math.ceil(len(visits) * (step / MOMENTS) ** 2) - 1)]
            folder = Path(name) / str(step)
            with Journal(folder) as journal:
                for event in history[: place + 1]:
                    journal.append(event)
            found = whole(results.read(folder))
            if found is not None and found.verdict is Verdict.slower:
                return total_s - (last_s - _end_s(history[place]))
    return math.inf


def _end_s(event: Event) -> float:
    assert isinstance(event, VisitFinished)
    return max(each.start_s + each.value * each.num_calls for taken in event.arms for each in taken.samples)


def is_slower(row: Row) -> bool:
    """Whether a session that is valid said that anything is slower: a cell, or the whole."""
    return row["exit_code"] == FINDING and (float(row["num_slower"]) > 0 or row["suite"] == Verdict.slower)


def _outcome(test: str, rows: list[Row], *, short: bool) -> Outcome:
    """False alarms of sessions of the same code, or how many planted slowdowns were found, in 120 seconds each."""
    is_planted, is_apart = test in {"slowdown", "slowdown_apart"}, test in {"same_code_apart", "slowdown_apart"}
    valid = [row for row in rows if row["exit_code"] != INVALID]
    alarms = sum(is_slower(row) if is_planted else row["exit_code"] == FINDING for row in valid)
    share = alarms / max(1, len(valid))
    passes = share >= GATE_FOUND if is_planted else share <= GATE_WRONG
    passes = passes and len(valid) >= FEWEST_VALID * len(rows)
    busiest = max(float(row["load"]) for row in rows)
    crowded = f"a load of up to {busiest:.1f} for each core: others were at work"
    where = "each side in processes of its own" if is_apart else "both sides in one process"
    what = f"a slowdown of {EFFECT:.0%} between two revisions" if is_planted else "two revisions with the same code"
    asked = f"at least {GATE_FOUND:.0%} of sessions find it" if is_planted else f"at most {GATE_WRONG:.0%} of sessions"
    return Outcome(
        id=test,
        title=f"{what}, {where}: {'found' if is_planted else 'false alarms'}",
        limit=f"{asked}; 16 cells in {GATE_S:.0f} s",
        found=f"{alarms} of {len(valid)} sessions, {_text(rows, is_planted=is_planted)}; {len(rows) - len(valid)} more "
        f"were invalid; sessions took up to {max(float(row['elapsed_s']) for row in rows):.0f} s",
        passes=passes,
        is_short=short,
        rows=tuple(rows),
        cause=crowded if not passes and busiest > CROWDED else "",
    )


def _text(rows: list[Row], *, is_planted: bool) -> str:
    """How many cells were called slower, and when the whole was where it is."""
    slower_cells, cells = (sum(float(row[key]) for row in rows) for key in ("num_slower", "num_cells"))
    text = f"{slower_cells:.0f} of {cells:.0f} cells"
    gates = [row["gate_code"] for row in rows if "gate_code" in row]
    if gates:
        text += f"; of {len(gates)}, the gate on the session made {sum(code == FINDING for code in gates)} a finding"
    if not is_planted:
        return text
    seconds = sorted(found_s for row in rows if math.isfinite(found_s := float(row["found_s"])))
    text += f"; the whole was found slower in {len(seconds)} of {len(rows)}"
    return text + (f", after {median(seconds):.0f} s (median), {seconds[-1]:.0f} s at most" if seconds else "")


def same_code(rows: list[Row], *, short: bool) -> Outcome:
    """The same code in one process."""
    return _outcome("same_code", rows, short=short)


def slowdown(rows: list[Row], *, short: bool) -> Outcome:
    """A slowdown in one process."""
    return _outcome("slowdown", rows, short=short)


def same_code_apart(rows: list[Row], *, short: bool) -> Outcome:
    """The same code apart."""
    return _outcome("same_code_apart", rows, short=short)


def slowdown_apart(rows: list[Row], *, short: bool) -> Outcome:
    """A slowdown apart."""
    return _outcome("slowdown_apart", rows, short=short)
