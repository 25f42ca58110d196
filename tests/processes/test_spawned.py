"""Workers that are started anew, with none of Linux's own calls: the same verdicts, and the same ends."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import NoneType

import psutil
import pytest

from attnbench.processes.messages import SPAWN, WORKERS, spawns
from attnbench.processes.worker_client import ProcessClient, Template
from attnbench.workloads.workload import Workload
from tests.checks import cell_of

ROOT = Path(__file__).parents[2]
MISSING = """
import os

for name in ("fork", "forkpty", "memfd_create", "pidfd_open", "sched_getaffinity", "sched_setaffinity"):
    delattr(os, name)
"""
"""Imported by every process at its start: what a system without these calls looks like."""
MINE = """
import os, subprocess, sys, time
from torch.nn.functional import scaled_dot_product_attention

def right(query, key, value):
    return scaled_dot_product_attention(query, key, value)

def mistaken(query, key, value):
    return (query @ key.mT).softmax(-1) @ value

def crashing(query, key, value):
    os.abort()

def hanging(query, key, value):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)
"""
NAMES = ("right", "mistaken", "crashing", "hanging")


def check(folder: Path, **variables: str) -> dict[str, dict[str, str]]:
    shape = ("--set=seq_len=16", "--set=num_heads=2", "--set=head_dim=8", "--set=dtype=float32,bfloat16")
    command = [sys.executable, "-m", "attnbench", "check", "mine.py", *shape, "--timeout=15", "--seed=1", "--json"]
    path = os.pathsep.join([str(folder / "first"), str(ROOT / "harness")])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    cells = json.loads(done.stdout)["cells"]
    return {f"{cell['implementation']} {cell['workload']}": (cell["status"], words(cell["message"])) for cell in cells}


def words(message: str) -> str:
    """A message up to its first number: computed twice, it may end in other digits."""
    return re.split(r"\d", message)[0]


@pytest.mark.long
def test_a_system_without_linuxs_calls_has_the_same_verdicts(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text("")
    here = check(tmp_path)
    (tmp_path / "first" / "sitecustomize.py").write_text(MISSING)
    assert check(tmp_path) == here
    statuses = {name: {status for cell, (status, _) in here.items() if cell.startswith(name)} for name in NAMES}
    assert statuses == {"right": {"ok"}, "mistaken": {"disagrees"}, "crashing": {"crashed"}, "hanging": {"timeout"}}


def test_a_variable_selects_the_way_and_another_system_has_no_choice(monkeypatch):
    monkeypatch.delenv(WORKERS, raising=False)
    assert not spawns()
    monkeypatch.setenv(WORKERS, SPAWN)
    assert spawns()
    monkeypatch.delenv(WORKERS)
    monkeypatch.delattr(os, "memfd_create")
    assert spawns()


def test_a_closed_client_leaves_no_process_and_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv(WORKERS, SPAWN)
    with ProcessClient(Template(tmp_path / "log"), 60.0) as client:
        client.start()
        worker, files = psutil.Process(client.process_id), Path(client.template._files.name)
        assert files.exists()
        assert isinstance(client.ask("make_calls", NoneType, cell=cell_of("fused", Workload())), NoneType)
        assert len(list(files.iterdir())) == 1
        client.stop()
        assert list(files.iterdir()) == []  # of a worker that has ended
    assert not worker.is_running()
    assert not files.exists()
