"""One journal from those of hosts: every event of each share that was finished, in the order of the shares.

A share is one host's: what another host had begun of it stays in that host's journal, and is not merged. The journal
that is made is an ordinary one, in which `worker_started` names the host of what follows it.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from attnbench.cluster.shares import Share
from attnbench.storage import events
from attnbench.storage.events import Event, Plan
from attnbench.storage.journal import JOURNAL, write
from attnbench.storage.journal import events as read_events
from attnbench.storage.records import Status

HOSTS = "hosts"
"""In the folder of a run: HOST/SHARE/journal.jsonl, as the hosts wrote them."""


def journal_path(folder: Path, host: str, share: str) -> Path:
    """Where a run keeps the journal of a share."""
    return folder / HOSTS / host / share / JOURNAL


def finished(folder: Path, share: Share) -> tuple[str, list[Event]] | None:
    """The host that has finished a share, and its events; None where none has.

    Raises:
        DamagedError: a journal is damaged.
    """
    for path in sorted((folder / HOSTS).glob(f"*/{share.name}/{JOURNAL}")):
        history = list(read_events(path))
        if history and isinstance(history[-1], events.RunFinished):
            return path.parent.parent.name, history
    return None


def merge(
    folder: Path, started: events.RunStarted, shares: Iterable[Share], lost: Mapping[str, str], *, is_over: bool
) -> None:
    """Write the journal of a run again, from those of its hosts.

    `lost` says of shares that no host could measure why; `is_over` that nothing is going on with the others.

    Raises:
        DamagedError: a host's journal is damaged.
        OSError: the journal cannot be written.
    """
    write(folder / JOURNAL, merged(folder, started, shares, lost, is_over=is_over))


def merged(
    folder: Path, started: events.RunStarted, shares: Iterable[Share], lost: Mapping[str, str], *, is_over: bool
) -> Iterator[Event]:
    """The events of a run: its start, those of each finished share, cells that were lost, and its end."""
    yield started
    num_workers, spent_s, reasons, places = 0, dict[str, float](), dict[str, None](), set[tuple[str, object]]()
    ended: events.RunFinished | None = None  # the share before: a run whose last line says so has come to its end
    for share in shares:
        found = finished(folder, share)
        if found is None:
            if share.name in lost:
                yield from _lost(share.plan, lost[share.name])
            continue
        host, history = found
        begun = num_workers
        if ended is not None:
            yield ended
        for event in history:
            match event:
                case events.RunStarted() | events.BaselineAccepted():
                    continue
                case events.WorkerStarted():
                    num_workers += 1
                    yield msgspec.structs.replace(event, host=host)
                case events.CeilingsMeasured():
                    if (host, event.ceilings.key) not in places:
                        places.add((host, event.ceilings.key))
                        yield msgspec.structs.replace(
                            event, ceilings=msgspec.structs.replace(event.ceilings, host=host)
                        )
                case events.VisitFinished():
                    yield _shifted(event, begun)
                case events.RunFinished():
                    ended = event
                case _:
                    yield event
        assert ended is not None
        spent_s[host] = spent_s.get(host, 0.0) + ended.elapsed_s
        reasons[ended.reason] = None
    if is_over:
        if ended is not None:
            yield ended
        yield events.RunFinished(
            time=started.time if ended is None else ended.time,
            elapsed_s=max(spent_s.values(), default=0.0),
            reason="; ".join(filter(None, reasons)),
        )


def _shifted(visit: events.VisitFinished, epochs: int) -> events.VisitFinished:
    """A visit with the number that its process has among those of all shares."""
    arms = tuple(
        msgspec.structs.replace(
            taken,
            samples=tuple(msgspec.structs.replace(each, epoch=each.epoch + epochs) for each in taken.samples),
        )
        for taken in visit.arms
    )
    return msgspec.structs.replace(visit, epoch=visit.epoch + epochs, arms=arms)


def _lost(plan: Plan, why: str) -> Iterator[Event]:
    for workload in plan.workloads:
        for arm in plan.cells(workload):
            yield events.CellChecked(
                workload=workload.id, implementation=arm.implementation, side=arm.side, status=Status.lost, message=why
            )
