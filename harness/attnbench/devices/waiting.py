"""How long threads wait for a processor, as Linux counts it: the plainest sign that other work disturbs a process."""

import os
from contextlib import suppress
from pathlib import Path

OWN = Path("/proc/self/schedstat")


def waits_s(process: int) -> float:
    """Seconds for which the threads of a process have been ready to run, and had to wait for a processor.

    0 where there is no such process, or the system counts nothing. Source: the second number of schedstat,
    https://docs.kernel.org/scheduler/sched-stats.html.
    """
    waited_ns, threads = 0, Path(f"/proc/{process}/task")
    with suppress(OSError):
        for thread in os.listdir(threads):  # noqa: PTH208 - names are enough
            with suppress(OSError):
                waited_ns += int((threads / thread / "schedstat").read_bytes().split()[1])
    return waited_ns / 1e9


def own_waits_s() -> float | None:
    """The same of this process; None where the system counts nothing."""
    return waits_s(os.getpid()) if OWN.exists() else None
