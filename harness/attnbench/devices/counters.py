"""Who uses the processors: the system's counters at a moment, and those of a process with all that it started."""

import os
from contextlib import suppress
from typing import Any

import psutil

from attnbench.storage.records import Counters


def read() -> Counters:
    """The counters as they stand."""
    spent: Any = psutil.cpu_times()  # its fields differ from system to system
    counted_twice = getattr(spent, "guest", 0.0) + getattr(spent, "guest_nice", 0.0)  # they are in user and nice, too
    this = psutil.Process()
    own_s = sum(os.times()[:4])  # with those that it started and that have ended
    for child in this.children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            own_s += sum(child.cpu_times()[:4])
    return Counters(
        began_s=this.create_time(),
        total_s=sum(spent) - counted_twice,
        idle_s=spent.idle + getattr(spent, "iowait", 0.0),
        stolen_s=getattr(spent, "steal", 0.0),
        own_s=own_s,
        free_bytes=psutil.virtual_memory().available,
    )
