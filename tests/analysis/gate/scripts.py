"""Journals with changed events: the cases that a gate must handle, one change for each."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from attnbench.analysis.conclusion import Ending
from attnbench.analysis.gate.rulings import Decision, Ruling
from attnbench.analysis.results import Results, read
from attnbench.storage.events import (
    ArmSamples,
    CellChecked,
    CellEvent,
    CellFailed,
    CellMeasured,
    CellProfiled,
    Event,
    RunFinished,
    RunStarted,
    VisitFinished,
    WorkerStarted,
)
from attnbench.storage.journal import JOURNAL, events, write
from attnbench.storage.records import PROBE, Arm, Sample, Status
from tests import journals

POINTS = journals.workloads(mask=("none", "causal"), seq_len=(128,))
NAMES = ("sdpa", "fused", "bmm")
FIRST = POINTS[0].id
DIGESTS = {"sdpa": "11111111", "fused": "22222222", "bmm": "33333333"}

Change = Callable[[Event], Event | None]
"""Function that changes an event; None removes the event."""


def run(folder: Path, *changes: Change, names: tuple[str, ...] = NAMES, **asked) -> Results:
    """Write a run into `folder`, and apply each change to all of its events, one change after the other."""
    journals.write(folder, asked.pop("points", POINTS), names, **asked)
    return rewrite(folder, unprofiled, sources, *changes)


def rewrite(folder: Path, *changes: Change) -> Results:
    found = list(events(folder / JOURNAL))
    for change in changes:
        found = [kept for event in found if (kept := change(event)) is not None]
    write(folder / JOURNAL, found)
    return read(folder)


def unprofiled(event: Event) -> Event | None:
    """Remove the profile; tests about operators add their own."""
    return None if isinstance(event, CellProfiled) else event


def sources(event: Event) -> Event:
    """Give every implementation a digest, as if its source were known."""
    if isinstance(event, RunStarted):
        digests = {name: DIGESTS[name] for name in event.plan.implementations if name in DIGESTS}
        return msgspec.structs.replace(event, plan=msgspec.structs.replace(event.plan, digests=digests))
    return event


def is_cell(event: Event, name: str, workload: str = FIRST) -> bool:
    """Whether the event is about that cell alone."""
    of_a_cell = isinstance(event, CellChecked | CellMeasured | CellFailed)
    return of_a_cell and (event.workload, event.implementation) == (workload, name)


def ends(status: Status, message: str = "for a reason", **more) -> Change:
    """End `fused` on the first workload with this status."""

    def change(event: Event) -> Event | None:
        if is_cell(event, "fused") and isinstance(event, CellChecked):
            return msgspec.structs.replace(event, status=status, message=message, agreement=None, **more)
        return None if is_cell(event, "fused") else _without(event, "fused")

    return change


def _alters(kind: type[CellEvent], change: Callable) -> Change:
    """Change each event of that kind about `fused` on the first workload."""
    return lambda event: change(event) if isinstance(event, kind) and is_cell(event, "fused") else event


def fails(message: str) -> Change:
    """Let `fused` on the first workload pass its check, and raise in the memory pass."""

    def change(event: CellMeasured) -> Event:
        where = {"workload": event.workload, "implementation": event.implementation}
        return CellFailed(**where, status=Status.error, message=message)

    return _alters(CellMeasured, change)


def all_end(status: Status, **more) -> Change:
    def change(event: Event) -> Event | None:
        if isinstance(event, CellChecked):
            return msgspec.structs.replace(event, status=status, message="for a reason", agreement=None, **more)
        return None if isinstance(event, CellMeasured | VisitFinished) else event

    return change


def untimed(event: Event) -> Event | None:
    return None if isinstance(event, VisitFinished) else event


def shaken(event: Event) -> Event:
    """Multiply or divide all times but the reference's by up to 1.8, differently in each visit."""
    if not isinstance(event, VisitFinished):
        return event
    ratio = (1.0, 1.8, 1 / 1.8)[event.visit % 3]
    return scales("bmm", ratio)(scales("fused", ratio)(event))


def vanishes(name: str = "fused") -> Change:
    """Remove the implementation from the first workload."""
    return lambda event: None if is_cell(event, name) else _without(event, name)


def _without(event: Event, name: str) -> Event:
    if isinstance(event, VisitFinished) and event.workload == FIRST:
        kept = tuple(taken for taken in event.arms if taken.arm != Arm(implementation=name))
        return msgspec.structs.replace(event, arms=kept)
    return event


def scales(name: str, ratio: float, workload: str | None = None) -> Change:
    """Multiply the time of the implementation."""

    def change(event: Event) -> Event:
        if isinstance(event, VisitFinished) and workload in {None, event.workload}:
            return _scaled(event, Arm(implementation=name), ratio)
        return event

    return change


def _scaled(event: VisitFinished, arm: Arm, ratio: float) -> VisitFinished:
    slower = tuple(msgspec.structs.replace(sample, value=sample.value * ratio) for sample in event.samples(arm))
    arms = (ArmSamples(arm=arm, samples=slower) if taken.arm == arm else taken for taken in event.arms)
    return msgspec.structs.replace(event, arms=tuple(arms))


def holds(num_bytes: float) -> Change:
    """Set the peak memory of `fused` on the first workload."""

    def change(event: CellMeasured) -> Event:
        measured = msgspec.structs.replace(event.measurement, samples=(Sample(value=num_bytes),))
        return msgspec.structs.replace(event, measurement=measured)

    return _alters(CellMeasured, change)


def unread() -> Change:
    """Remove the peak memory of `fused` on the first workload."""
    return _alters(CellMeasured, lambda _: None)


def executes(num_flops: int | None) -> Change:
    """Set the FLOPs of a call of `fused` on the first workload; None means that they are unknown."""
    return _alters(CellChecked, lambda event: msgspec.structs.replace(event, executed_flops=num_flops))


def checks(change_agreement: Callable) -> Change:
    """Change the agreement of the check of `fused` on the first workload."""
    return _alters(
        CellChecked, lambda event: msgspec.structs.replace(event, agreement=change_agreement(event.agreement))
    )


def elsewhere(event: Event) -> Event:
    if isinstance(event, WorkerStarted):
        return msgspec.structs.replace(event, environment=msgspec.structs.replace(event.environment, cpu="another"))
    return event


def disturbed(event: Event) -> Event:
    """Let another program run in the second half of each process."""
    if isinstance(event, VisitFinished) and event.visit % 4 >= 2:
        return _scaled(event, PROBE, 3.0)
    return event


def killed(event: Event) -> Event | None:
    return None if isinstance(event, RunFinished) else event


def findings(decision: Decision) -> list[Ruling]:
    return [ruling for ruling in decision.rulings if ruling.ending is Ending.finding]
