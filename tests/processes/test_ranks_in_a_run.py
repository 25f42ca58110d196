"""Ranks in a whole run: one that dies or hangs costs its own cell, and none is left over."""

import time
from pathlib import Path

import psutil
import pytest

from attnbench.analysis.results import read
from attnbench.processes.execution import execute
from attnbench.processes.planning import build_plan
from attnbench.storage.records import Status

LIARS = Path(__file__).parents[1] / "rank_liars.py"
TIMEOUT_S = 20
SHAPE = ("seq_len=16", "num_heads=4", "num_kv_heads=2", "head_dim=8", "mask=none", "direction=inference")
SHAPE += ("world_size=1,2", "scope=attention", "dtype=float32", "batch_size=1")
EXPECTED = {
    "dying": (Status.crashed, "rank 1 of 2 is gone: its process was killed, or has crashed"),
    "hanging": (Status.timeout, f"rank 1 of 2 has not answered for {TIMEOUT_S // 2} s (call)"),
}


def is_alive(process):
    return psutil.pid_exists(process) and psutil.Process(process).status() != "zombie"


@pytest.mark.long
def test_a_rank_that_is_killed_or_hangs_costs_its_own_cell_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "seen").mkdir()
    monkeypatch.setenv("RANK_LIARS_SEEN", str(tmp_path / "seen"))
    files = tuple(f"{LIARS}:{name}" for name in ("dying", "hanging", "healthy"))
    fields = {"metrics": ("latency",), "budget_s": 0.0, "call_limit_s": 30.0, "timeout_s": float(TIMEOUT_S)}
    names = (*files, "ring")
    asked = build_plan("quick", settings=SHAPE, is_exact=True, implementations=names, baseline="ring", **fields)
    execute(asked, tmp_path / "run", lambda _: None)
    cells = {(each.implementation, each.workload.world_size): each for each in read(tmp_path / "run").records}
    assert len(cells) == 4 * 2
    for (name, world_size), record in cells.items():
        expected = EXPECTED.get(name, (Status.ok, "")) if world_size > 1 else (Status.ok, "")
        assert (record.status, record.message) == expected, name
        assert (record.measurement("latency") is not None) is (record.status is Status.ok)
    seen = {int(each.name) for each in (tmp_path / "seen").iterdir()}
    assert len(seen) >= 3 * 3, "two ranks of three implementations, and what they were forked from"
    deadline = time.monotonic() + 100.0
    while any(map(is_alive, seen)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, seen))
