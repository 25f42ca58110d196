"""Ranks in a whole sweep: one that dies or hangs costs its own cell, and every report has their metrics."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest

from attnbench.analysis.results import read
from attnbench.analysis.table import table
from attnbench.storage.records import Status

pytestmark = pytest.mark.long  # whole runs, each in processes of its own

LIARS = Path(__file__).parents[1] / "rank_liars.py"
TIMEOUT_S = 20
SWEEP = """
summary = "one process and two ranks"
metrics = ["latency", "bytes_sent", "slowest_rank", "straggling"]
budget_s = 0.0
call_limit_s = 30.0

[[grid]]
world_size = [1, 2]
seq_len = 16
num_heads = 4
num_kv_heads = 2
head_dim = 8
mask = "{mask}"
direction = {directions}
"""


def sweep(folder, implementations, mask, directions, **environment):
    """Run the command line; return its table, its folder and its output."""
    file = folder / "ranks.toml"
    file.write_text(SWEEP.format(mask=mask, directions=str(directions).replace("'", '"')), encoding="utf-8")
    asked = ["run", *implementations, "--sweep", file, "--results", folder, "--timeout", str(TIMEOUT_S)]
    done = subprocess.run(
        [sys.executable, "-m", "attnbench", *map(str, asked)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    (run,) = (folder / "runs").iterdir()
    return table(read(run)), run, done


def is_alive(process):
    return psutil.pid_exists(process) and psutil.Process(process).status() != "zombie"


@pytest.fixture(scope="module")
def liars(tmp_path_factory):
    folder, seen = tmp_path_factory.mktemp("liars"), tmp_path_factory.mktemp("seen")
    names = [f"{LIARS}:{name}" for name in ("dying", "hanging", "healthy")]
    cells, _, done = sweep(folder, [*names, "ring"], "none", ["inference"], RANK_LIARS_SEEN=str(seen))
    return cells.set_index(["implementation", "world_size"]), done, {int(each.name) for each in seen.iterdir()}


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("dying", Status.crashed, "rank 1 of 2 is gone: its process was killed, or has crashed"),
        ("hanging", Status.timeout, f"rank 1 of 2 has not answered for {TIMEOUT_S // 2} s (call)"),
    ],
)
def test_a_rank_that_is_killed_or_hangs_costs_its_own_cell(liars, name, status, said):
    cells, done, _ = liars
    cell = cells.loc[name, 2]
    assert (cell["status"], cell["message"]) == (status, said)
    assert pd.isna(cell["latency_s"])
    assert done.returncode == 1, "it is a finding"
    assert said in " ".join(f"{done.stdout} {done.stderr}".split())


@pytest.mark.parametrize(
    "cell", [("healthy", 1), ("healthy", 2), ("ring", 1), ("ring", 2), ("dying", 1), ("hanging", 1)]
)
def test_all_others_are_measured(liars, cell):
    found = liars[0].loc[cell]
    assert found["status"] == Status.ok, found["message"]
    assert found["latency_s"] > 0


def test_no_process_of_a_rank_is_left_over(liars):
    _, _, seen = liars
    assert len(seen) >= 3 * 3, "two ranks of three implementations, and what they were forked from"
    deadline = time.monotonic() + 10.0
    while (left := sorted(filter(is_alive, seen))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
