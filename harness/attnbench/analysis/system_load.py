"""How much of the machine other work took during a run, from the system's counters in its journal."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from attnbench.storage.events import Event, RunFinished, WorkerStarted
from attnbench.storage.records import Counters


@dataclass(frozen=True, kw_only=True)
class SystemLoad:
    """Shares of the time of all processors, and the least memory that was free when a process took up the work."""

    stolen: float  # by the host
    others: float
    free_bytes: int


def system_load(history: Iterable[Event]) -> SystemLoad | None:
    """The load during a run; None without counters, as of a simulated machine.

    Counted is the time between the start of a worker and its end, at which it is still there with all that it started.
    """
    spans = list(_spans(history))
    total_s = sum(after.total_s - before.total_s for before, after in spans)
    if total_s <= 0:
        return None
    stolen_s = sum(after.stolen_s - before.stolen_s for before, after in spans)
    used_s = total_s - stolen_s - sum(after.idle_s - before.idle_s for before, after in spans)
    own_s = sum(after.own_s - before.own_s for before, after in spans)
    return SystemLoad(
        stolen=max(0.0, stolen_s) / total_s,
        others=max(0.0, used_s - own_s) / total_s,
        free_bytes=min(before.free_bytes for before, _ in spans),
    )


def _spans(history: Iterable[Event]) -> Iterator[tuple[Counters, Counters]]:
    """The counters when each worker had started, and when it was to end; a run that was killed has no end."""
    start: Counters | None = None
    for event in history:
        if not isinstance(event, WorkerStarted | RunFinished):
            continue
        end = event.before if isinstance(event, WorkerStarted) else event.counters
        if start is not None and end is not None and start.began_s == end.began_s:
            yield start, end
        start = event.counters if isinstance(event, WorkerStarted) else None
