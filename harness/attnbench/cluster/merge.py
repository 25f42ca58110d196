"""One journal from those of hosts: every event of each share that was finished, in the order of the shares.

The journal that is made is an ordinary one, in which `worker_started` names the host of what follows it. Of a share
that several hosts have finished it has one host's; what each host has measured then becomes a journal of its own, too.
Samples of two hosts are never in one cell. What a host had begun and not finished stays in its own journal, there.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from attnbench.cluster.shares import Share
from attnbench.storage import events
from attnbench.storage.events import Event, Plan
from attnbench.storage.journal import HOSTS, JOURNAL, write
from attnbench.storage.journal import events as read_events
from attnbench.storage.records import Status

Measured = tuple[Share, str, list[Event]]
"""A share, a host that has finished it, and the events of its journal."""


def journal_path(folder: Path, host: str, share: str) -> Path:
    """Where a run keeps the journal of a share, as the host wrote it: hosts/HOST/SHARE/journal.jsonl."""
    return folder / HOSTS / host / share / JOURNAL


def finished(folder: Path, share: Share) -> dict[str, list[Event]]:
    """The hosts that have finished a share, each with its events.

    Raises:
        DamagedError: a journal is damaged.
    """
    found = {}
    for path in sorted((folder / HOSTS).glob(f"*/{share.name}/{JOURNAL}")):
        history = list(read_events(path))
        if history and isinstance(history[-1], events.RunFinished):
            found[path.parent.parent.name] = history
    return found


def merge(
    folder: Path, started: events.RunStarted, shares: Sequence[Share], lost: Mapping[str, str], *, is_over: bool
) -> None:
    """Write the journal of a run again, and those of its hosts where several have measured one share.

    `lost` says of shares that no host could measure why; `is_over` that nothing is going on with the others.

    Raises:
        DamagedError: a host's journal is damaged.
        OSError: a journal cannot be written.
    """
    found = {share.name: finished(folder, share) for share in shares}
    most = Counter(host for hosts in found.values() for host in hosts)
    order = sorted(most, key=lambda host: (-most[host], host))  # so that few hosts stand for the whole run
    measured = {
        host: [(share, host, found[share.name][host]) for share in shares if host in found[share.name]]
        for host in order
    }
    first: list[Measured] = []
    for share in shares:
        host = next((host for host in order if host in found[share.name]), None)
        if host is not None:
            first.append((share, host, found[share.name][host]))
    spent_s = max((sum(_end(history).elapsed_s for *_, history in own) for own in measured.values()), default=0.0)
    gone = [(share, lost[share.name]) for share in shares if share.name in lost and not found[share.name]]
    write(folder / JOURNAL, merged(started, first, gone, spent_s if is_over else None))
    if all(len(hosts) < 2 for hosts in found.values()):  # noqa: PLR2004 - several
        return
    for host, own in measured.items():
        ids = {workload.id for share, *_ in own for workload in share.plan.workloads}
        plan = msgspec.structs.replace(
            started.plan,
            workloads=tuple(each for each in started.plan.workloads if each.id in ids),
            left_out={name: tuple(each for each in out if each in ids) for name, out in started.plan.left_out.items()},
            mixes=(),
            traced={},
        )
        spent_s = sum(_end(history).elapsed_s for *_, history in own)
        part = merged(msgspec.structs.replace(started, plan=plan), own, (), spent_s if is_over else None)
        write(folder / HOSTS / host / JOURNAL, part)


def _end(history: Sequence[Event]) -> events.RunFinished:
    ended = history[-1]
    assert isinstance(ended, events.RunFinished)
    return ended


def merged(
    started: events.RunStarted,
    measured: Sequence[Measured],
    lost: Sequence[tuple[Share, str]],
    elapsed_s: float | None,
) -> Iterator[Event]:
    """The events of a run: its start, those of each share, cells that were lost, and its end where it has one."""
    yield started
    for share, why in lost:
        yield from _lost(share.plan, why)
    num_workers, places = 0, set[tuple[str, object]]()
    for number, (_, host, history) in enumerate(measured):
        begun = num_workers
        if number:
            yield _end(measured[number - 1][2])  # a run whose last line says so has come to its end
        for event in history:
            match event:
                case events.RunStarted() | events.BaselineAccepted() | events.RunFinished():
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
                case _:
                    yield event
    if elapsed_s is not None:
        ends = [_end(history) for *_, history in measured]
        yield from ends[-1:]
        yield events.RunFinished(
            time=ends[-1].time if ends else started.time,
            elapsed_s=elapsed_s,
            reason="; ".join(filter(None, dict.fromkeys(end.reason for end in ends))),
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
