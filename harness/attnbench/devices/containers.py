"""Limits of a container on processors and memory: cgroups, versions 1 and 2, and the affinity mask.

A limit holds for a group and all groups below it, so the smallest limit on the way to the root counts. Sources:
https://docs.kernel.org/admin-guide/cgroup-v2.html and https://docs.kernel.org/admin-guide/cgroup-v1/.
"""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIPS = Path("/proc/self/cgroup")
QUOTAS = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""Files with a quota and its period, of version 2 and of version 1."""
MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files with the limit and the memory in use, and the entry of memory.stat with pages that can be dropped at once."""


def affinity() -> int:
    """The number of logical processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processors() -> int:
    """The number of logical processors that this process may keep busy, by affinity mask and quota; at least 1."""
    found = quota()
    return affinity() if found is None else max(1, min(affinity(), math.floor(found)))


def quota() -> float | None:
    """The smallest quota of this process's groups, as a number of processors; None without one."""
    quotas = []
    for folder, names in product(_folders("cpu"), QUOTAS):
        with suppress(OSError, ValueError):
            share, period = (int(word) for name in names for word in (folder / name).read_text().split())
            if share > 0:  # without a quota, "max" is no number, and version 1 has -1
                quotas.append(share / period)
    return min(quotas, default=None)


def memory() -> tuple[int, int]:
    """Free and total memory in bytes: the least of the machine's and of those of this process's control groups."""
    machine = psutil.virtual_memory()
    free, whole = [int(machine.available)], [int(machine.total)]
    for folder, (limit, used, dropped) in product(_folders("memory"), MEMORY):
        with suppress(OSError, ValueError):
            limit_bytes, used_bytes = (int((folder / name).read_text()) for name in (limit, used))
            statistics = (folder / "memory.stat").read_text().split()
            if dropped in statistics:
                used_bytes -= int(statistics[statistics.index(dropped) + 1])
            free.append(max(0, limit_bytes - max(0, used_bytes)))
            whole.append(limit_bytes)  # version 1 has a huge number for no limit
    return min(free), min(whole)


def _folders(controller: str) -> Iterator[Path]:
    """Folders of this process's groups, up to the root, for a controller of version 1 and for version 2.

    A container may see its own group as the root, under a path that it does not see.
    """
    for membership in MEMBERSHIPS.read_text().splitlines() if MEMBERSHIPS.exists() else []:
        _, controllers, path = membership.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUPS / controllers if controllers else GROUPS
        root = root if root.exists() else GROUPS / controller
        inner = Path(path.lstrip("/"))
        yield from (root / folder for folder in (inner, *inner.parents))
