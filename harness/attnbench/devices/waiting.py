"""The time for which threads wait for a processor, as Linux counts it: the clearest sign of other work."""

import os
import time
from contextlib import suppress
from pathlib import Path

OWN = Path("/proc/self/schedstat")
SETTLED_SHARE = 0.2  # a process that uses a smaller share of a processor counts as asleep


def waits_s(process: int) -> float:
    """Seconds for which the threads of a process were runnable but waited for a processor.

    0 if there is no such process, or the system does not count. Source: the second number of schedstat,
    https://docs.kernel.org/scheduler/sched-stats.html.
    """
    waited_ns, threads = 0, Path(f"/proc/{process}/task")
    with suppress(OSError):
        for thread in os.listdir(threads):  # noqa: PTH208 - names are enough
            with suppress(OSError):
                waited_ns += int((threads / thread / "schedstat").read_bytes().split()[1])
    return waited_ns / 1e9


def own_waits_s() -> float | None:
    """Waiting seconds of this process; None if the system does not count them."""
    return waits_s(os.getpid()) if OWN.exists() else None


def settle(limit_s: float = 0.05, step_s: float = 1e-3) -> None:
    """Wait until the threads of this process sleep: after work they spin for a while, on cores that others need."""
    for _ in range(int(limit_s / step_s)):
        before_s = time.process_time()
        time.sleep(step_s)
        if time.process_time() - before_s < SETTLED_SHARE * step_s:
            return
