"""V8: does attnbench print the same time as a plain loop in a plain process? One command prints the table.

    python -m studies.acceptance.absolute --sessions 5

Each session times every cell five ways, in random order: twice by a plain loop in its own process, by `attnbench run`
with and without isolation, and by the pytest fixture. Each reading is divided by the plain loop of its session.
Readings disturbed by other programs are repeated, and finally dropped. The second plain loop shows how much two plain
processes differ.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from attnbench.devices import processor, read_counters

MINE = """from torch.nn import functional as F


def mine(query, key, value, *, is_causal=False):
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
"""
NAMES = ("sdpa", "fused", "mine")
MEDIAN_LIMIT, LIMIT = 0.05, 0.10
BUSY_SHARE = 0.03  # share of the processors that other programs may use during a reading
MOST_TRIES = 3
BUDGET_S = 6.0
LOOP = """
import json, sys, time
import torch
from attnbench.checking.case import bind, build, draw_normal, place
from attnbench.contract.loading import implementation
from attnbench.workloads.sweep import make

axes = json.loads(sys.argv[1])
torch.set_num_threads(axes["num_threads"])
workload, found = make(axes), {}
for spec in sys.argv[2:]:
    inputs = place(draw_normal(workload, 0), workload)
    call = build(workload, implementation(spec), inputs, bind(workload)).call()
    with torch.no_grad():
        start = time.perf_counter()
        number = 0
        while time.perf_counter() - start < 0.3:
            call()
            number += 1
        chunk, times = max(1, round(1e-3 * number / 0.3)), []
        end = time.perf_counter() + 0.7
        while time.perf_counter() < end:
            start = time.perf_counter()
            for _ in range(chunk):
                call()
            times.append((time.perf_counter() - start) / chunk)
    found[spec.rpartition(":")[2]] = sorted(times)[len(times) // 2]
print(json.dumps(found))
"""
FIXTURE = """
import json, sys
from attnbench.pytest_plugin import AttentionBench

axes, found = json.loads(sys.argv[1]), {}
for spec in sys.argv[3:]:
    frame = AttentionBench(0)(spec, sys.argv[2], budget_s=2.0, **axes).to_frame()
    found |= dict(zip(frame["implementation"], frame["latency_s"]))
print(json.dumps({name.rpartition(":")[2]: seconds for name, seconds in found.items()}))
"""
Axes = dict[str, str | int]
Reading = dict[str, float]
"""Seconds by implementation name."""


def python(code: str, axes: Axes, specs: list[str]) -> Reading:
    """Run code in a fresh process; it prints its reading last."""
    told = [sys.executable, "-c", code, json.dumps(axes), *specs]
    done = subprocess.run(told, capture_output=True, text=True, check=True)  # noqa: S603 - our own code
    found: Reading = json.loads(done.stdout.splitlines()[-1])
    return found


def command(isolation: str, axes: Axes, specs: list[str]) -> Reading:
    """Run `attnbench run`; also store the difference between the two times of a cell."""
    with tempfile.TemporaryDirectory() as folder:
        sets = [f"--set={name}={value}" for name, value in axes.items() if name != "direction"]
        told = [sys.executable, "-m", "attnbench", "run", *specs[1:], "-i", specs[0], *sets]
        told += ["--conditions", isolation, "--budget", f"{BUDGET_S:g}", "--results", folder]
        subprocess.run(told, capture_output=True, check=False, cwd=folder)  # noqa: S603 - our own command
        (table,) = Path(folder).glob("runs/*/records.csv")
        cells = pd.read_csv(table)
    apart = (cells["paired_latency_s"] / cells["latency_s"]).map(lambda ratio: max(ratio, 1 / ratio)).max()
    return {**dict(zip(cells["implementation"], cells["latency_s"], strict=True)), "two times apart": float(apart)}


WAYS: dict[str, Callable[[Axes, list[str]], Reading]] = {
    "plain": lambda axes, specs: python(LOOP, axes, specs),
    "plain again": lambda axes, specs: python(LOOP, axes, specs),
    "isolated": lambda axes, specs: command("process", axes, specs),
    "shared": lambda axes, specs: command("shared", axes, specs),
    "fixture": lambda axes, specs: python(FIXTURE, axes, specs),
}


def quietly(take: Callable[[], Reading], busy_share: float) -> Reading | None:
    """Repeat a reading until no other program disturbs it; None after a few attempts."""
    for attempt in range(MOST_TRIES):
        before, start = read_counters(), os.times()
        found = take()
        after, end = read_counters(), os.times()
        own_s = sum(end[:4]) - sum(start[:4])
        total_s = after.total_s - before.total_s
        if total_s - (after.idle_s - before.idle_s) - own_s <= busy_share * total_s:
            return found
        time.sleep(2.0 * attempt)
    return None


def measured(num_sessions: int, lengths: list[int], threads: list[int], busy_share: float) -> list[dict[str, object]]:
    """Run the sessions; return a row for each reading of a cell."""
    draws, rows = random.Random(0), list[dict[str, object]]()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.py"
        file.write_text(MINE, encoding="utf-8")
        specs = ["sdpa", "fused", f"{file}:mine"]
        for session, num_threads, length in product(range(num_sessions), threads, lengths):
            axes: Axes = {"seq_len": length, "mask": "none", "num_threads": num_threads, "direction": "inference"}
            for way in draws.sample(list(WAYS), len(WAYS)):
                found = quietly(lambda way=way, axes=axes: WAYS[way](axes, specs), busy_share)  # type: ignore[misc] # mypy knows no type of a default
                for name, seconds in (found or {}).items():
                    cell = {"threads": num_threads, "T": length, "name": name.rpartition(":")[2]}
                    rows.append({"session": session, **cell, "way": way, "seconds": seconds})
                sys.stderr.write(f"{session} {num_threads} {length} {way}: {found or 'disturbed'}\n")
    return rows


def table(rows: list[dict[str, object]]) -> tuple[list[str], bool]:
    """Format the page, and decide whether each cell's median is within 5 % and none beyond 10 %."""
    by_cell: dict[tuple[object, ...], dict[object, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        by_cell[row["threads"], row["T"], row["name"]][row["session"]][str(row["way"])] = float(str(row["seconds"]))
    ways = list(WAYS)[1:]
    lines = [
        "| threads | T | code | plain loop | " + " | ".join(ways) + " |",
        "| ---: " * 2 + "| --- " + "| ---: " * 5 + "|",
    ]
    passes, apart = True, list[float]()
    for (threads, length, name), sessions in sorted(by_cell.items(), key=str):
        if name == "two times apart":
            apart += [seconds for own in sessions.values() for seconds in own.values()]
            continue
        plain = [own["plain"] for own in sessions.values() if "plain" in own]
        cells = []
        for way in ways:
            off = [own[way] / own["plain"] - 1 for own in sessions.values() if way in own and "plain" in own]
            if not off:
                cells.append("disturbed")
                passes = False
                continue
            middle, worst = statistics.median(off), max(off, key=abs)
            cells.append(f"{middle:+.1%} (worst {worst:+.1%} of {len(off)})")
            passes &= way == "plain again" or (abs(middle) <= MEDIAN_LIMIT and abs(worst) <= LIMIT)
        time_ms = f"{1e3 * statistics.median(plain):.4g} ms" if plain else "disturbed"
        lines.append(f"| {threads} | {length} | {name} | {time_ms} | " + " | ".join(cells) + " |")
    if apart:
        lines += ["", f"`latency_s` and `paired_latency_s` of a cell differ by a factor of {max(apart):.3f} at most."]
    return lines, passes


def main(
    sessions: Annotated[int, typer.Option(min=1)] = 5,
    lengths: str = "32,128,512,1024",
    threads: str = "1,2",
    busy_share: Annotated[float, typer.Option(help="What other programs may use; 1: anything.")] = BUSY_SHARE,
    to: Annotated[Path, typer.Option(metavar="FILE")] = Path("results/gallery/acceptance/absolute.md"),
) -> None:
    """Measure, print the table and store it. Exit code 1 if a cell is off by more than allowed."""
    rows = measured(sessions, [*map(int, lengths.split(","))], [*map(int, threads.split(","))], busy_share)
    lines, passes = table(rows)
    limits = f"within {MEDIAN_LIMIT:.0%} in the median, no reading beyond {LIMIT:.0%}"
    verdict = f"{'Passed' if passes else 'Missed'}: {limits}. {sessions} sessions on {processor()}."
    page = ["# Is the time that attnbench prints the time of a plain loop?", "", verdict, "", *lines]
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text("\n".join(page) + "\n", encoding="utf-8")
    typer.echo("\n".join(page))
    raise typer.Exit(0 if passes else 1)


if __name__ == "__main__":
    typer.run(main)
