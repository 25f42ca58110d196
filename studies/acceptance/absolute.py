"""V8: does attnbench print the same time as a plain loop in a plain process?

A session times a shape six ways, in random order: twice by a plain loop in its own process, by `attnbench run` with and
without isolation, by the pytest fixture, and by a plain loop with the allocator as it is. The first two loops have the
allocator that `attnbench run` names, since the usual one has two states: it keeps freed memory or gives it back, which
depends on earlier blocks, and then the same textbook call takes up to twice as long. The last loop shows what the usual
allocator does, and is not judged. Each reading is divided by the mean of both plain loops of its session. Readings that
other programs disturb are repeated, and finally dropped.
"""

import json
import math
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from attnbench.devices import read_counters
from attnbench.processes.worker_client import ROOT
from attnbench.storage.events import ALLOCATORS
from studies.acceptance.outcome import at_most
from studies.acceptance.sessions import FIXTURE, cells, printed, run_python
from studies.frame import Row

MINE = """from torch.nn import functional as F


def mine(query, key, value, *, is_causal=False):
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
"""
MEDIAN_LIMIT, LIMIT = 0.05, 0.10
BUSY_SHARE = 0.03
"""Share of the processors that other programs may use during a reading."""
MOST_TRIES = 3
BUDGET_S = 6.0
USUAL = "steady"
"""The allocator of `attnbench run`, which its output names."""
LOOP = """
import json, sys, time
import torch
from attnbench.case import bind, build, draw_normal, place
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
        while time.perf_counter() < end or len(times) < 30:
            start = time.perf_counter()
            for _ in range(chunk):
                call()
            times.append((time.perf_counter() - start) / chunk)
    found[spec.rpartition(":")[2]] = sorted(times)[len(times) // 2]
print(json.dumps(found))
"""
SPECS = ("sdpa", "fused", "mine.py:mine")
Axes = dict[str, str | int]
Reading = dict[str, float]
"""Seconds by implementation name."""


def loop(axes: Axes, folder: Path, *, allocator: str = USUAL) -> Reading:
    """Time a plain loop in a process of its own, with one of ALLOCATORS."""
    found: Reading = printed(["-c", LOOP, json.dumps(axes), *SPECS], folder, ALLOCATORS[allocator])
    return found


def fixture(axes: Axes, folder: Path) -> Reading:
    """Time each implementation next to `sdpa` by the pytest fixture."""
    found: Reading = {}
    for spec in SPECS[1:]:
        found |= printed(["-c", FIXTURE, json.dumps(axes), spec, SPECS[0]], folder)["seconds"]
    return found


def command(isolation: str, axes: Axes, folder: Path, tree: Path = ROOT) -> Reading:
    """Time all of them by `attnbench run`."""
    sets = [f"--set={name}={value}" for name, value in axes.items()]
    option = "--conditions" if tree == ROOT else "--isolation"  # its former name
    asked = ["-P", "-m", "attnbench", "run", *SPECS[1:], "-i", SPECS[0], *sets, option, isolation]
    run_python([*asked, f"--budget={BUDGET_S:g}"], folder, tree)
    return {cell["implementation"]: float(cell["latency_s"]) for cell in cells(folder)}


COMMANDS = {"isolated": "process", "shared": "shared"}
PLAIN, OTHER = ("plain", "plain again"), "plain, usual allocator"
WAYS: dict[str, Callable[[Axes, Path], Reading]] = {
    **dict.fromkeys(PLAIN, loop),
    OTHER: partial(loop, allocator="system"),
    **{name: partial(command, isolation) for name, isolation in COMMANDS.items()},
    "fixture": fixture,
}


def quietly(take: Callable[[], Reading]) -> Reading:
    """Repeat a reading until no other program disturbs it; empty after a few attempts."""
    for attempt in range(MOST_TRIES):
        before, start = read_counters(), os.times()
        found = take()
        after, end = read_counters(), os.times()
        own_s = sum(end[:4]) - sum(start[:4])
        total_s = after.total_s - before.total_s
        if total_s - (after.idle_s - before.idle_s) - own_s <= BUSY_SHARE * total_s:
            return found
        time.sleep(2.0 * attempt)
    return {}


def session(number: int, *, num_threads: int, seq_len: int, tree: Path = ROOT) -> list[Row]:
    """Time one shape in every way, in random order; a row for each way.

    An attnbench of another tree is timed only by its command.
    """
    axes: Axes = {"seq_len": seq_len, "mask": "none", "num_threads": num_threads, "direction": "inference"}
    ways = WAYS if tree == ROOT else {name: way for name, way in WAYS.items() if name != "fixture"}
    ways = ways | {name: partial(command, isolation, tree=tree) for name, isolation in COMMANDS.items()}
    rows = []
    for way in random.Random(number).sample(list(ways), len(ways)):
        with tempfile.TemporaryDirectory(prefix="attnbench-session-") as name:
            folder = Path(name)
            (folder / "mine.py").write_text(MINE, encoding="utf-8")
            found = quietly(partial(ways[way], axes, folder))
        rows.append({"session": number, "way": way, "seconds": found})
    return rows


def judge(rows: Sequence[Row]) -> tuple[str, bool]:
    """Whether each cell's median is within 5 % of two plain loops, their mean, and no reading beyond 10 %.

    Where both differ by more than 5 %, the machine was disturbed, and nothing is judged.
    """
    by_way: dict[str, dict[float, Reading]] = defaultdict(dict)
    for row in rows:
        by_way[row["way"]][row["session"]] = row["seconds"]
    plain, num_disturbed, num_pairs = dict[tuple[float, str], float](), 0, 0
    for number, one in by_way[PLAIN[0]].items():
        other = by_way[PLAIN[1]].get(number, {})
        for name in one.keys() & other.keys():
            num_pairs += 1
            if abs(math.log(other[name] / one[name])) <= MEDIAN_LIMIT:
                plain[number, name] = statistics.mean([one[name], other[name]])
            else:
                num_disturbed += 1
    words, passes = [], True
    for way in [way for way in WAYS if way in by_way and way not in PLAIN]:
        off: dict[str, list[float]] = defaultdict(list)
        for (number, name), base in plain.items():
            if name in (seconds := by_way[way].get(number, {})):
                off[name].append(seconds[name] / base - 1)
        medians = {name: statistics.median(own) for name, own in off.items()}
        if not medians:
            words.append(f"{way}: disturbed")
            passes &= way == OTHER
            continue
        name = max(medians, key=lambda name: abs(medians[name]))
        readings = [each for own in off.values() for each in own]
        beyond = sum(abs(each) > LIMIT for each in readings)
        words.append(f"{way} {medians[name]:+.1%} ({name}), beyond {LIMIT:.0%} in {at_most(beyond, len(readings))}")
        is_fine = abs(medians[name]) <= MEDIAN_LIMIT and not beyond and len(off) == len(SPECS)
        passes &= way == OTHER or is_fine
    words.append(f"plain loops differ by more than {MEDIAN_LIMIT:.0%} in {num_disturbed} of {num_pairs}, not judged")
    return f"{'; '.join(words)}; {len(by_way[PLAIN[0]])} sessions", passes
