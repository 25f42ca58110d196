"""Limits of a container on processors and memory: cgroups, version 2, and the affinity mask.

A limit holds for a group and all groups below it, so that the smallest one on the way to the root counts. Source:
https://docs.kernel.org/admin-guide/cgroup-v2.html.
"""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIPS = Path("/proc/self/cgroup")


def affinity() -> int:
    """Logical processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processors() -> int:
    """Logical processors that this process may keep busy, by its affinity mask and its quota; at least 1."""
    found = quota()
    return affinity() if found is None else max(1, min(affinity(), math.floor(found)))


def quota() -> float | None:
    """The smallest quota in processors; None without one."""
    quotas = []
    for folder in _folders():
        with suppress(OSError, ValueError):
            share, period = map(int, (folder / "cpu.max").read_text().split())  # "max" is no number
            quotas.append(share / period)
    return min(quotas, default=None)


def memory() -> tuple[int, int]:
    """Bytes of memory that are still free, and bytes in all: of the machine, or of the smallest group."""
    machine = psutil.virtual_memory()
    free, whole = [int(machine.available)], [int(machine.total)]
    for folder in _folders():
        with suppress(OSError, ValueError):
            limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            statistics = (folder / "memory.stat").read_text().split()
            dropped = int(statistics[statistics.index("inactive_file") + 1])  # pages that the system can drop at once
            free.append(max(0, limit - max(0, used - dropped)))
            whole.append(limit)
    return min(free), min(whole)


def _folders() -> Iterator[Path]:
    """Folders of this process's groups, up to the root.

    A container may see its own group as the root, under a path that it does not see.
    """
    for membership in MEMBERSHIPS.read_text().splitlines() if MEMBERSHIPS.exists() else []:
        number, _, path = membership.split(":", 2)
        if number == "0":  # others are of version 1
            inner = Path(path.lstrip("/"))
            yield from (GROUPS / folder for folder in (inner, *inner.parents))
