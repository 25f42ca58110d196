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
"""In version 2 and in version 1, the files with the limit and with the memory in use, and the entry of memory.stat for
pages that can be dropped at once."""


def affinity() -> int:
    """Return the number of logical processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processors() -> int:
    """Return the number of logical processors that affinity mask and quota let this process keep busy, at least 1."""
    found = quota()
    return affinity() if found is None else max(1, min(affinity(), math.floor(found)))


def quota() -> float | None:
    """Return the smallest quota of this process's groups, as a number of processors; None without a quota."""
    quotas = []
    for folder, names in product(_folders("cpu"), QUOTAS):
        with suppress(OSError, ValueError):
            share, period = (int(word) for name in names for word in (folder / name).read_text().split())
            if share > 0:  # without a quota, "max" is no number, and version 1 has -1
                quotas.append(share / period)
    return min(quotas, default=None)


def memory() -> tuple[int, int]:
    """Return free and total memory in bytes: the minimum over the machine and this process's control groups."""
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
    """Yield the folders of this process's groups, up to the root, in version 2 and in version 1 for `controller`.

    A container may see its own group as the root; the path in MEMBERSHIPS then does not exist in the container.
    """
    for membership in MEMBERSHIPS.read_text().splitlines() if MEMBERSHIPS.exists() else []:
        _, controllers, path = membership.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUPS / controllers if controllers else GROUPS
        root = root if root.exists() else GROUPS / controller
        inner = Path(path.lstrip("/"))
        yield from (root / folder for folder in (inner, *inner.parents))
