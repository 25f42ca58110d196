"""The time for which threads wait for a processor, as Linux counts it: the clearest sign of other processes' work."""

import os
import time
from contextlib import suppress
from pathlib import Path

SETTLED_SHARE = 0.2  # if the process uses a smaller share of a processor, its threads count as asleep


Waits = dict[str, float]
"""Seconds for which each thread was runnable but waited for a processor, by the thread's id."""


def waits(process: int | str = "self") -> Waits:
    """Return the waits of a process, by default this one; empty if it has ended, or the system is not Linux.

    Source: the second number of schedstat, https://docs.kernel.org/scheduler/sched-stats.html.
    """
    found, threads = Waits(), Path(f"/proc/{process}/task")
    with suppress(OSError):
        for thread in os.listdir(threads):  # noqa: PTH208 - names are enough
            with suppress(OSError):
                found[thread] = int((threads / thread / "schedstat").read_bytes().split()[1]) / 1e9
    return found


def longest_wait_s(before: Waits, after: Waits) -> float:
    """Return the longest time that any thread waited between two readings, in seconds.

    The waits of threads are not added up, because the threads of a call wait at the same time.
    """
    return max((waited_s - before.get(thread, 0.0) for thread, waited_s in after.items()), default=0.0)


def wait_for_idle_threads(limit_s: float = 0.05, step_s: float = 1e-3) -> None:
    """Wait up to `limit_s` seconds until this process's threads sleep.

    After work they spin for a while, on cores that other processes need. They are checked every `step_s` seconds.
    """
    for _ in range(int(limit_s / step_s)):
        before_s = time.process_time()
        time.sleep(step_s)
        if time.process_time() - before_s < SETTLED_SHARE * step_s:
            return
