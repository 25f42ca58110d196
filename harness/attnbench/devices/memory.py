"""How much memory there is, and what keeps an allocation from taking more."""

import ctypes
import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from attnbench.devices import cuda
from attnbench.storage.memory_events import SLACK_BYTES

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
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")  # if somebody is killed, then this one


@contextmanager
def capped(device: str, limit_bytes: int) -> Iterator[None]:
    """Within: an allocation that brings what is taken from here on beyond `limit_bytes` fails, as out of memory.

    On the CPU the limit is on the private memory of the process (setrlimit(2), RLIMIT_DATA), and `SLACK_BYTES` more.
    """
    if device != "cpu":
        with cuda.capped(device, limit_bytes):
            yield
        return
    gc.collect()
    with suppress(OSError, AttributeError):  # of the GNU C library: what was freed goes back to the system
        ctypes.CDLL(None).malloc_trim(0)
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = psutil.Process().memory_info().data + limit_bytes + SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit if before == resource.RLIM_INFINITY else min(limit, before), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))
