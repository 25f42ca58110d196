"""Limits of a container on processors and memory: cgroups, versions 1 and 2, and the affinity mask.

A limit holds for a group and all groups below it, so that the smallest one on the way to the root counts. Sources:
https://docs.kernel.org/admin-guide/cgroup-v2.html and https://docs.kernel.org/admin-guide/cgroup-v1/.
"""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIPS = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class MemoryLimit:
    """A group's limit and what it may still take in bytes, and the limiting file."""

    limit_bytes: int
    free_bytes: int
    file: str


def affinity() -> int:
    """Logical processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processors() -> int:
    """Logical processors that this process may keep busy, by its affinity mask and its quota; at least 1."""
    found = quota()
    return affinity() if found is None else max(1, min(affinity(), math.floor(found[0])))


def quota() -> tuple[float, str] | None:
    """The smallest quota in processors, and its file; None without one."""
    quotas = []
    for folder in _folders("cpu"):
        for name, period in (("cpu.max", ""), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):
                numbers = (folder / name).read_text().split()
                numbers += (folder / period).read_text().split() if period else []
                share = int(numbers[0]) / int(numbers[1])  # "max" is no number
                if share > 0:
                    quotas.append((share, name))
    return min(quotas, default=None)


def memory() -> MemoryLimit | None:
    """The limit that leaves the least memory; None without one."""
    limits, total = [], psutil.virtual_memory().total
    for folder in _folders("memory"):
        for limit, used, dropped in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with suppress(OSError, ValueError):
                limit_bytes, used_bytes = (int((folder / name).read_text()) for name in (limit, used))
                if limit_bytes < total:  # version 1 has a huge number for no limit
                    statistics = (folder / "memory.stat").read_text().split()
                    if dropped in statistics:  # pages that the system can drop at once
                        used_bytes -= int(statistics[statistics.index(dropped) + 1])
                    limits.append(MemoryLimit(limit_bytes, max(0, limit_bytes - max(0, used_bytes)), limit))
    return min(limits, key=lambda each: each.free_bytes, default=None)


def total_bytes() -> int:
    """Bytes of memory that the processes of this machine or container may take in all."""
    limit, whole = memory(), int(psutil.virtual_memory().total)
    return whole if limit is None else min(limit.limit_bytes, whole)


def available_bytes() -> int:
    """Bytes of memory that are still available here."""
    limit, free = memory(), int(psutil.virtual_memory().available)
    return free if limit is None else min(limit.free_bytes, free)


def _folders(controller: str) -> Iterator[Path]:
    """Folders of this process's groups, up to the root, for a controller of version 1 and for version 2.

    A container may see its own group as the root, under a path that it does not see.
    """
    memberships = MEMBERSHIPS.read_text().splitlines() if MEMBERSHIPS.exists() else []
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUPS / controllers if controllers else GROUPS
        root = root if root.exists() else GROUPS / controller
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            yield root / folder
