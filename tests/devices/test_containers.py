"""Limits of containers, from planted files of both versions of cgroups."""

import os
import types

import psutil
import pytest

from attnbench.commands import doctor
from attnbench.devices import containers, cpu, device, environment
from attnbench.devices.containers import MemoryLimit

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


VERSION_2 = {
    "cpu.max": "200000 100000\n",
    "memory.max": f"{4 * GIB}\n",
    "memory.current": f"{3 * GIB}\n",
    "memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
}
VERSION_1 = {
    "cpu,cpuacct/docker/1/cpu.cfs_quota_us": "200000\n",
    "cpu,cpuacct/docker/1/cpu.cfs_period_us": "100000\n",
    "memory/docker/1/memory.limit_in_bytes": f"{4 * GIB}\n",
    "memory/docker/1/memory.usage_in_bytes": f"{3 * GIB}\n",
    "memory/docker/1/memory.stat": f"inactive_file 7\ntotal_inactive_file {2 * GIB}\n",
    "memory/memory.limit_in_bytes": "9223372036854771712\n",
    "memory/memory.usage_in_bytes": f"{60 * GIB}\n",
}
MEMBERSHIPS_1 = "4:memory:/docker/1\n2:cpu,cpuacct:/docker/1\n0::/\n"


@pytest.mark.parametrize(
    ("memberships", "files", "names"),
    [
        ("0::/\n", VERSION_2, ("cpu.max", "memory.max")),
        ("0::/a/path/that/the/container/does/not/see\n", VERSION_2, ("cpu.max", "memory.max")),
        (MEMBERSHIPS_1, VERSION_1, ("cpu.cfs_quota_us", "memory.limit_in_bytes")),
    ],
)
def test_a_quota_and_a_limit_of_memory_decide_threads_and_the_memory_that_is_free(groups, memberships, files, names):
    groups(memberships, **files)
    assert containers.quota() == (2.0, names[0])
    assert containers.memory() == MemoryLimit(4 * GIB, 3 * GIB, names[1])
    assert environment.usable_cores() == 2
    assert device("cpu").free_bytes() == 3 * GIB
    assert containers.total_bytes() == 4 * GIB
    assert f"2 processors by {names[0]}, 4.00 GiB of memory by {names[1]}, 3.00 GiB of it free" in doctor.limits()


def test_the_smallest_limit_on_the_way_to_the_root_counts(groups):
    upper = {f"a/{name}": text for name, text in VERSION_2.items()}
    lower = {"a/b/cpu.max": "max 100000\n", "a/b/memory.max": f"{8 * GIB}\n", "a/b/memory.current": "0\n"}
    groups("0::/a/b\n", **upper, **lower)
    assert environment.usable_cores() == 2
    assert device("cpu").free_bytes() == 3 * GIB


def test_less_than_one_processor_is_one_thread(groups):
    groups("0::/\n", **{"cpu.max": "50000 100000\n"})
    assert environment.usable_cores() == 1


def test_the_affinity_mask_counts_too(groups, monkeypatch):
    groups("0::/\n", **VERSION_2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    assert environment.usable_cores() == 1
    assert doctor.limits().startswith("1 of 64 processors by the affinity mask")


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.current": "5\n"},
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
    ],
)
def test_without_limits_the_machine_is_as_it_is(groups, files):
    groups("2:cpu:/\n0::/\n", **files)
    assert environment.usable_cores() == 64
    assert device("cpu").free_bytes() == FREE
    assert doctor.limits() == "no limits"


def test_a_system_without_groups_has_no_limits(groups):
    containers.MEMBERSHIPS.unlink(missing_ok=True)
    assert (containers.quota(), containers.memory()) == (None, None)


def test_a_worker_fails_beyond_its_containers_memory_as_out_of_memory(groups, monkeypatch):
    """It leaves a reserve, and may take less once others have taken more."""
    limits, held = [], types.SimpleNamespace(data=GIB, rss=2 * GIB)  # libraries from files are resident, and no data
    monkeypatch.setattr(cpu.resource, "setrlimit", lambda kind, pair: limits.append(pair[0]))
    monkeypatch.setattr(cpu.psutil.Process, "memory_info", lambda _: held)
    groups("0::/\n", **VERSION_2)
    cpu.limit_memory()
    for used in (6 * GIB - GIB // 2, 6 * GIB - GIB // 8, 7 * GIB):
        groups("0::/\n", **VERSION_2 | {"memory.current": str(used)})
        cpu.limit_memory()
    assert limits == [GIB + 3 * GIB - 3 * GIB // 10, GIB + GIB // 2 - cpu.RESERVE_BYTES, GIB + GIB // 16, GIB]
