"""How much memory there is, and what keeps an allocation from taking more."""

import resource

import psutil

from harness import cuda

KEPT_SHARE = 0.25


def free_bytes(device: str) -> int:
    """Memory that the device could still give."""
    return int(psutil.virtual_memory().available) if device == "cpu" else cuda.free_bytes(device)


def is_crowded(device: str) -> bool:
    """Whether this process holds so much of the device's memory that what it may need again should make room."""
    if device == "cpu":
        return bool(psutil.Process().memory_info().rss > KEPT_SHARE * psutil.virtual_memory().total)
    return cuda.held_share(device) > KEPT_SHARE


def limit_memory() -> None:
    """Let an allocation beyond what is free fail here, as out of memory, before the system kills somebody at random."""
    held = psutil.Process().memory_info().rss
    limit = held + int(0.9 * psutil.virtual_memory().available)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
