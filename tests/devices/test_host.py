"""The host: limits of its container, from planted files of both versions of cgroups; counters; caches; dtypes."""

import os
import subprocess
import sys
import types

import psutil
import pytest
import torch

from attnbench.commands import doctor
from attnbench.devices import containers, cpu, device, environment, read_counters

GIB = 2**30
FREE = 64 * GIB


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Plant files below the root of groups, and the lines of memberships, on a machine of 64 processors and 64 GiB."""

    def plant(memberships: str, **files: str) -> None:
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (tmp_path / "memberships").write_text(memberships)

    monkeypatch.setattr(containers, "GROUPS", tmp_path)
    monkeypatch.setattr(containers, "MEMBERSHIPS", tmp_path / "memberships")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 64)
    machine = types.SimpleNamespace(total=FREE, available=FREE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    return plant


GROUP = {
    "cpu.max": "200000 100000\n",
    "memory.max": f"{4 * GIB}\n",
    "memory.current": f"{3 * GIB}\n",
    "memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
}
NESTED = {
    **{f"a/{name}": text for name, text in GROUP.items()},
    "a/b/cpu.max": "max 100000\n",
    "a/b/memory.max": f"{8 * GIB}\n",
    "a/b/memory.current": "0\n",
}
"""The smallest limit on the way to the root counts."""
VERSION_1 = {
    "cpu,cpuacct/docker/1/cpu.cfs_quota_us": "200000\n",
    "cpu,cpuacct/docker/1/cpu.cfs_period_us": "100000\n",
    "memory/docker/1/memory.limit_in_bytes": f"{4 * GIB}\n",
    "memory/docker/1/memory.usage_in_bytes": f"{3 * GIB}\n",
    "memory/docker/1/memory.stat": f"inactive_file 7\ntotal_inactive_file {2 * GIB}\n",
    "memory/memory.limit_in_bytes": "9223372036854771712\n",
    "memory/memory.usage_in_bytes": f"{60 * GIB}\n",
    "memory/memory.stat": "total_inactive_file 0\n",
}


@pytest.mark.parametrize(
    ("memberships", "files"),
    [
        ("0::/\n", GROUP),
        ("2:cpu:/\n0::/a/path/that/the/container/does/not/see\n", GROUP),
        ("0::/a/b\n", NESTED),
        ("4:memory:/docker/1\n2:cpu,cpuacct:/docker/1\n0::/\n", VERSION_1),
    ],
)
def test_a_quota_and_a_limit_of_memory_decide_threads_and_the_memory_that_is_free(groups, memberships, files):
    groups(memberships, **files)
    assert containers.quota() == 2.0
    assert containers.memory() == (3 * GIB, 4 * GIB)
    assert environment.usable_cores() == 2
    assert "2 processors by the cgroup, 4.00 GiB of memory by the cgroup, 3.00 GiB of it free" in doctor.limits()


@pytest.mark.parametrize(
    ("files", "cores", "said"),
    [
        ({}, 64, "no limits"),
        ({"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.current": "5\n"}, 64, "no limits"),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64, "no limits"),
        ({"cpu.max": "50000 100000\n"}, 1, "0.5 processors by the cgroup"),
    ],
)
def test_limits_of_a_container_are_read_and_a_share_of_a_processor_is_one_thread(groups, files, cores, said):
    groups("2:cpu:/\n0::/\n", **files)
    assert environment.usable_cores() == cores
    assert containers.memory() == (FREE, FREE)
    assert doctor.limits() == said


def test_the_affinity_mask_counts_too(groups, monkeypatch):
    groups("0::/\n", **GROUP)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    assert environment.usable_cores() == 1
    assert doctor.limits().startswith("1 of 64 processors by the affinity mask")


WORK = "import time\nwhile time.process_time() < 0.2: pass"


def test_own_time_includes_processes_that_ended_and_those_at_work():
    before = read_counters()
    subprocess.run([sys.executable, "-c", WORK], check=True)
    between = read_counters()
    waits = f"{WORK}\nprint('done', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        after = read_counters()
        child.communicate(b"\n")
    assert between.own_s - before.own_s >= 0.15
    assert after.own_s - between.own_s >= 0.15
    assert after.total_s > before.total_s
    assert min(before.own_s, before.free_bytes) > 0
    assert before.began_s == after.began_s


def test_the_size_of_the_largest_cache_is_read_from_the_system(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "CACHES", tmp_path)
    assert device("cpu").cache_bytes() == cpu.ASSUMED_CACHE_BYTES
    for number, size in enumerate(("48K", "2M", "512")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n")
    assert device("cpu").cache_bytes() == 2 * 2**20


@pytest.mark.parametrize("native", [(), ("bfloat16",), ("bfloat16", "float16"), None])
def test_half_precision_has_hardware_where_onednn_says_so(monkeypatch, native):
    class Library:
        _is_mkldnn_bf16_supported = staticmethod(lambda: "bfloat16" in native)
        _is_mkldnn_fp16_supported = staticmethod(lambda: "float16" in native)

    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops, "mkldnn", object() if native is None else Library)
    assert environment.collect().native_dtypes == native
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert environment.collect().native_dtypes is None
