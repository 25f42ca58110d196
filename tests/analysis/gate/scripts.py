"""Journals whose events are changed by hand: what a gate has to cope with, one change at a time."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from attnbench.analysis.results import Results, read
from attnbench.storage.events import (
    ArmSamples,
    CellChecked,
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
from attnbench.storage.records import PROBE, Arm, Role, Sample, Status
from tests import journals

POINTS = journals.workloads(mask=("none", "causal"), seq_len=(128,))
NAMES = ("sdpa", "fused", "bmm")
FIRST = POINTS[0].id
DIGESTS = {"sdpa": "11111111", "fused": "22222222", "bmm": "33333333", "tiled": "22222222"}

Change = Callable[[Event], Event | None]
"""What becomes of an event; None takes it out."""


def run(folder: Path, *changes: Change, names: tuple[str, ...] = NAMES, **asked) -> Results:
    """A run in `folder`, its events changed one change after the other."""
    journals.write(folder, asked.pop("points", POINTS), names, **asked)
    return rewrite(folder, unprofiled, sources, *changes)


def rewrite(folder: Path, *changes: Change) -> Results:
    """The same run with its journal changed."""
    found = list(events(folder / JOURNAL))
    for change in changes:
        found = [kept for event in found if (kept := change(event)) is not None]
    write(folder / JOURNAL, found)
    return read(folder)


def unprofiled(event: Event) -> Event | None:
    """As if nobody had looked at what ran: tests about that say so themselves."""
    return None if isinstance(event, CellProfiled) else event


def sources(event: Event) -> Event:
    """Every implementation has a source, and so a digest."""
    if isinstance(event, RunStarted):
        digests = {name: DIGESTS[name] for name in event.plan.implementations if name in DIGESTS}
        return msgspec.structs.replace(event, plan=msgspec.structs.replace(event.plan, digests=digests))
    return event


def is_cell(event: Event, name: str, workload: str = FIRST) -> bool:
    """Whether the event is about that cell alone."""
    of_a_cell = isinstance(event, CellChecked | CellMeasured | CellFailed)
    return of_a_cell and (event.workload, event.implementation) == (workload, name)


def ends(status: Status, message: str = "for a reason", **more) -> Change:
    """`fused` on the first workload ends so."""

    def change(event: Event) -> Event | None:
        if is_cell(event, "fused") and isinstance(event, CellChecked):
            return msgspec.structs.replace(event, status=status, message=message, agreement=None, **more)
        return None if is_cell(event, "fused") else _without(event, "fused")

    return change


def fails(message: str) -> Change:
    """`fused` on the first workload passes its check, and raises when its memory is read."""

    def change(event: Event) -> Event:
        if is_cell(event, "fused") and isinstance(event, CellMeasured):
            where = {"workload": event.workload, "implementation": event.implementation}
            return CellFailed(**where, status=Status.error, message=message)
        return event

    return change


def all_end(status: Status, **more) -> Change:
    """Every cell ends so."""

    def change(event: Event) -> Event | None:
        if isinstance(event, CellChecked):
            return msgspec.structs.replace(event, status=status, message="for a reason", agreement=None, **more)
        return None if isinstance(event, CellMeasured | VisitFinished) else event

    return change


def untimed(event: Event) -> Event | None:
    """No time was taken."""
    return None if isinstance(event, VisitFinished) else event


def shaken(event: Event) -> Event:
    """What is not the reference takes up to twice as long or as short, from visit to visit."""
    if not isinstance(event, VisitFinished):
        return event
    ratio = (1.0, 1.8, 1 / 1.8)[event.visit % 3]
    return scales("bmm", ratio)(scales("fused", ratio)(event))


def vanishes(name: str = "fused") -> Change:
    """The first workload never saw that implementation."""
    return lambda event: None if is_cell(event, name) else _without(event, name)


def _without(event: Event, name: str) -> Event:
    if isinstance(event, VisitFinished) and event.workload == FIRST:
        kept = tuple(taken for taken in event.arms if taken.arm != Arm(implementation=name))
        return msgspec.structs.replace(event, arms=kept)
    return event


def renames(old: str, new: str) -> Change:
    """The implementation goes by another name."""

    def change(event: Event) -> Event:
        if isinstance(event, RunStarted):
            plan = event.plan
            names = tuple(new if name == old else name for name in plan.implementations)
            digests = {new if name == old else name: digest for name, digest in plan.digests.items()}
            plan = msgspec.structs.replace(plan, implementations=names, digests=digests)
            return msgspec.structs.replace(event, plan=plan)
        if isinstance(event, CellChecked | CellMeasured | CellFailed) and event.implementation == old:
            return msgspec.structs.replace(event, implementation=new)
        if isinstance(event, VisitFinished):
            arm = Arm(implementation=new)
            arms = (
                ArmSamples(arm=arm, samples=taken.samples) if taken.arm == Arm(implementation=old) else taken
                for taken in event.arms
            )
            return msgspec.structs.replace(event, arms=tuple(arms))
        return event

    return change


def scales(name: str, ratio: float, workload: str | None = None, role: Role = Role.measured) -> Change:
    """The implementation, or its A/A control, takes so many times longer."""

    def change(event: Event) -> Event:
        if isinstance(event, VisitFinished) and workload in {None, event.workload}:
            return _scaled(event, Arm(implementation=name, role=role), ratio)
        return event

    return change


def _scaled(event: VisitFinished, arm: Arm, ratio: float) -> VisitFinished:
    slower = tuple(msgspec.structs.replace(sample, value=sample.value * ratio) for sample in event.samples(arm))
    arms = (ArmSamples(arm=arm, samples=slower) if taken.arm == arm else taken for taken in event.arms)
    return msgspec.structs.replace(event, arms=tuple(arms))


def holds(num_bytes: float) -> Change:
    """`fused` on the first workload holds so much at its peak."""

    def change(event: Event) -> Event:
        if is_cell(event, "fused") and isinstance(event, CellMeasured):
            found = msgspec.structs.replace(event.measurement, samples=(Sample(value=num_bytes),))
            return msgspec.structs.replace(event, measurement=found)
        return event

    return change


def executes(num_flops: int | None) -> Change:
    """`fused` on the first workload says that one call executes so many FLOPs; None: it does not say."""

    def change(event: Event) -> Event:
        if is_cell(event, "fused") and isinstance(event, CellChecked):
            return msgspec.structs.replace(event, executed_flops=num_flops)
        return event

    return change


def checks(change_agreement: Callable) -> Change:
    """The check of `fused` on the first workload came out otherwise."""

    def change(event: Event) -> Event:
        if is_cell(event, "fused") and isinstance(event, CellChecked):
            return msgspec.structs.replace(event, agreement=change_agreement(event.agreement))
        return event

    return change


def elsewhere(event: Event) -> Event:
    """Another machine."""
    if isinstance(event, WorkerStarted):
        return msgspec.structs.replace(event, environment=msgspec.structs.replace(event.environment, cpu="another"))
    return event


def disturbed(event: Event) -> Event:
    """In the second half of each process somebody else was at work."""
    if isinstance(event, VisitFinished) and event.visit % 4 >= 2:
        return _scaled(event, PROBE, 3.0)
    return event


def killed(event: Event) -> Event | None:
    """The run did not come to its end."""
    return None if isinstance(event, RunFinished) else event
