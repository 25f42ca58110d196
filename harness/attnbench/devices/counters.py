"""Who uses the processors: the system's counters at a moment, and those of a process with all that it started."""

import os
from typing import Any

import psutil

from attnbench.storage.records import Counters


def read() -> Counters:
    """The counters as they stand."""
    spent: Any = psutil.cpu_times()  # its fields differ from system to system
    counted_twice = getattr(spent, "guest", 0.0) + getattr(spent, "guest_nice", 0.0)  # they are in user and nice, too
    this = psutil.Process()
    return Counters(
        began_s=this.create_time(),
        total_s=sum(spent) - counted_twice,
        idle_s=spent.idle + getattr(spent, "iowait", 0.0),
        stolen_s=getattr(spent, "steal", 0.0),
        own_s=sum(os.times()[:4]) + _at_work_s(this),
        free_bytes=psutil.virtual_memory().available,
    )


def _at_work_s(process: psutil.Process) -> float:
    """Processor time of those that a process started and that have not ended, and of theirs that have."""
    spent_s = 0.0
    for child in process.children(recursive=True):
        try:
            spent_s += sum(child.cpu_times()[:4])
        except psutil.Error:  # it has just ended
            continue
    return spent_s
