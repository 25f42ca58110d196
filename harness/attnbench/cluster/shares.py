"""A run on a cluster: each host measures shares of the plan, and the journals of all hosts are merged into one.

A share is a few workloads with all their implementations, so that all samples of a workload are from one host. The
merged journal is an ordinary journal with the events of all shares; each event `worker_started` names the host of the
events after it. A share counts only as a whole: an unfinished share is measured again. All state is in the journals,
so the driver may be killed at any moment.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from attnbench.cluster import driver
from attnbench.cluster.host import NAME
from attnbench.processes.revisions import current_commit
from attnbench.storage import events as kinds
from attnbench.storage.events import DamagedError, Event, Plan, RunFinished, RunStarted, VisitFinished, WorkerStarted
from attnbench.storage.files import write_atomically
from attnbench.storage.journal import HOSTS, JOURNAL, events, write
from attnbench.storage.records import Sample, Status

Measured = tuple[str, list[Event]]  # a host, and the events of a share that it has finished
MOST_SHARES = 32  # with fewer shares, fast hosts would wait for slow ones; but each share takes seconds to start


def part(plan: Plan, place: int, number: int) -> Plan:
    """Return the plan with only every `number`-th workload, from index `place` on, and a proportional `false_share`."""
    workloads = plan.workloads[place::number]
    false_share = plan.false_share * len(workloads) / len(plan.workloads)
    return msgspec.structs.replace(plan, workloads=workloads, false_share=false_share)


def split(plan: Plan, num_hosts: int) -> dict[str, Plan]:
    """Split a plan into named shares: each of n shares has every n-th workload, so that all take about equally long.

    Workloads and names of shares depend only on the plan. `plan.budget_s`, in seconds, is the budget of one host; the
    shares divide the budgets of all `num_hosts` hosts.
    """
    number = max(1, min(len(plan.workloads), MOST_SHARES))
    shares = {}
    for place in range(number):
        smaller = part(plan, place, number)
        budget_s = plan.budget_s * len(smaller.workloads) / len(plan.workloads) * num_hosts
        shares[f"{place:02}"] = msgspec.structs.replace(smaller, budget_s=budget_s)
    return shares


def sweep(plan: Plan, folder: Path, address: str, note: Callable[[str], None]) -> None:
    """Start a run on a cluster, or continue the run in `folder`; `note` is called with messages about shares.

    Raises:
        ValueError: ray is not installed, no cluster answers, or it has no host; the message says what to do.
        OSError: the folder cannot be written.
    """
    with driver.connected(address) as ray:
        shares = split(plan, len(driver.hosts_of(ray)))
        started = RunStarted(schema=kinds.SCHEMA, run=folder.name, time=kinds.now(), commit=current_commit(), plan=plan)
        merge(folder, started, shares)  # so that the run can be continued
        lost, is_over = dict[str, str](), False
        try:
            is_open = {name: share for name, share in shares.items() if finished(folder, name) is None}
            for share, host, journal in driver.measured(ray, dict(is_open)):
                del is_open[share]
                if why := store_journal(folder, share, host, journal) if isinstance(journal, bytes) else journal:
                    lost[share] = why
                left = f"{len(is_open)} of {len(shares)} are left"
                note(f"share {share} is lost: {why}" if why else f"{host} has finished share {share}: {left}")
            is_over = True
        finally:
            merge(folder, started, shares, lost if is_over else None)


def finished(folder: Path, share: str) -> Measured | None:
    """Return the alphabetically first host that finished a share, and the share's events; None if no host finished it.

    Raises:
        DamagedError: a journal is damaged.
    """
    for path in sorted((folder / HOSTS).glob(f"*/{share}/{JOURNAL}")):
        history = list(events(path))
        if history and isinstance(history[-1], RunFinished | kinds.JournalRestored):
            return path.parent.parent.name, history
    return None


def kind_of(history: Iterable[Event]) -> str:
    """Describe a host by processor, cores, version of PyTorch and accelerator, as its events record them."""
    known = next(event.environment for event in history if isinstance(event, WorkerStarted))
    cores, torch = f"{known.num_physical_cores} cores", f"torch {known.versions.get('torch', '')}"
    return ", ".join(filter(None, [known.cpu, cores, torch, known.accelerator]))


def store_journal(folder: Path, share: str, host: str, journal: bytes) -> str:
    """Store a share's journal and return ""; or return why it is refused (damaged, unfinished, other kind of host)."""
    if not NAME.fullmatch(host):
        return "its host has no valid name"
    known = sorted((folder / HOSTS).glob(f"*/*/{JOURNAL}"))
    path = folder / HOSTS / host / share / JOURNAL
    path.parent.mkdir(parents=True, exist_ok=True)
    arrived = write_atomically(path.with_name("arrived.jsonl"), journal)
    try:
        history = list(events(arrived))
    except DamagedError as error:
        return str(error)
    if not history or not isinstance(history[-1], RunFinished | kinds.JournalRestored):
        return f"{host} sent an unfinished journal"
    kind, first = kind_of(history), kind_of(events(known[0]) if known else history)
    if kind != first:
        return f"{host} is left out: it is {kind}, another kind of host than the first ({first}); give it its own run"
    arrived.replace(path)
    return ""


def merge(folder: Path, started: RunStarted, shares: Mapping[str, Plan], lost: Mapping[str, str] | None = None) -> None:
    """Write the journal of a run from its finished shares; a new journal begins with the event `started`.

    `lost` contains the reasons why shares could not be measured, by name. It is None while some shares are still open.

    Raises:
        DamagedError: a host's journal is damaged.
        OSError: the journal cannot be written.
    """
    results = {name: finished(folder, name) for name in shares}
    measured = [result for result in results.values() if result is not None]
    gone = [(shares[name], why) for name, why in (lost or {}).items() if results[name] is None]
    if (path := folder / JOURNAL).exists():
        started = next(event for event in events(path) if isinstance(event, RunStarted))
    folder.mkdir(parents=True, exist_ok=True)
    write(path, merged(started, measured, gone, is_over=lost is not None))


def merged(
    started: RunStarted, measured: Sequence[Measured], lost: Sequence[tuple[Plan, str]], *, is_over: bool
) -> Iterator[Event]:
    """Yield the events of a run: its start, those of lost shares, those of measured ones and, if `is_over`, its end."""
    yield started
    for plan, why in lost:
        for workload in plan.workloads:
            for arm in plan.cells(workload):
                cell: dict[str, Any] = {"workload": workload.id, "implementation": arm.implementation, "side": arm.side}
                yield kinds.CellChecked(**cell, status=Status.lost, message=why)
    num_processes, ends = 0, list[RunFinished]()
    spent_s = defaultdict[str, float](float)  # seconds by host
    for host, history in measured:
        before = num_processes
        yield from ends[-1:]  # not the last event, so it does not end the run
        for event in history:
            match event:
                case RunFinished():
                    ends = [*ends, event]
                    spent_s[host] += event.elapsed_s
                case WorkerStarted():
                    num_processes += 1
                    yield msgspec.structs.replace(event, host=host)
                case VisitFinished():
                    yield (moved := _shifted(event, before))
                    num_processes = max(num_processes, moved.epoch + 1)
                case kinds.CeilingsMeasured() | kinds.CellEvent() | kinds.JournalRestored():
                    yield event
    if is_over:
        yield from ends[-1:]
        yield RunFinished(
            time=ends[-1].time if ends else started.time,
            elapsed_s=max(spent_s.values(), default=0.0),
            reason="; ".join(filter(None, dict.fromkeys(end.reason for end in ends))),
        )


def _shifted(visit: VisitFinished, epochs: int) -> VisitFinished:
    """Return the event with its process number (`epoch`) raised by `epochs`, the number of processes before it."""

    def shifted(samples: Iterable[Sample]) -> tuple[Sample, ...]:
        return tuple(msgspec.structs.replace(each, epoch=each.epoch + epochs) for each in samples)

    arms = tuple(msgspec.structs.replace(taken, samples=shifted(taken.samples)) for taken in visit.arms)
    return msgspec.structs.replace(visit, epoch=visit.epoch + epochs, arms=arms)
