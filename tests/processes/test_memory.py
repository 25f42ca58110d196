"""Workers in a container with little memory: a greedy one is out of memory, and the system kills no process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnbench.analysis.results import read
from attnbench.storage.records import Status

MEMORY_BYTES = 2**30
LEAKS = """
import torch
from torch.nn.functional import scaled_dot_product_attention

KEPT = []

def modest(query, key, value):
    return scaled_dot_product_attention(query, key, value)

def leaks(query, key, value):
    if query.shape[-2] == 48:
        KEPT.append(torch.ones(2**18))
    return scaled_dot_product_attention(query, key, value)

def leaks_too(query, key, value):
    return leaks(query, key, value)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A real group of processes, of version 1, with one gibibyte of memory."""
    groups = Path("/sys/fs/cgroup/memory")
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    path = next((path for _, controllers, path in lines if "memory" in controllers), "/")
    folder = groups / path.lstrip("/") / f"attnbench-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(MEMORY_BYTES))
    except OSError as error:
        pytest.skip(f"no group of processes can be made here: {error}")
    yield folder
    folder.rmdir()


@pytest.mark.long
def test_workers_that_leak_are_out_of_memory_before_the_system_kills_one(tmp_path: Path, group: Path) -> None:
    (tmp_path / "mine.py").write_text(LEAKS)
    code = (
        f"import os, sys; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); "
        "os.execv(sys.executable, [sys.executable, '-m', 'attnbench', *sys.argv[1:]])"
    )
    names = ("leaks", "leaks_too", "modest")
    shape = ("--set=seq_len=48", "--set=num_heads=2", "--set=head_dim=8", "--set=dtype=float32", "--set=mask=none")
    options = (*shape, "--set=direction=inference", "--budget=2", "--json", "--results=results")
    command = [sys.executable, "-c", code, "run", "sdpa", *(f"mine.py:{name}" for name in names), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    (run,) = (tmp_path / "results" / "runs").iterdir()
    statuses = {record.implementation: record.status for record in read(run).records}
    assert {statuses.pop(name) for name in ("modest", "sdpa")} == {Status.ok}, done.stderr
    assert set(statuses.values()) <= {Status.ok, Status.out_of_memory}  # a fresh process has room for some calls
    assert "oom_kill 0" in (group / "memory.oom_control").read_text()
