"""The state of a run, folded from its events: the same while it runs, when it continues after a kill, and on read.

`Sense` holds what the next event must fit: runs, cells and visits exist, nothing happens twice, times are above 0.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from attnbench.storage import events
from attnbench.storage.events import Event
from attnbench.storage.records import PROBE, Arm, Key, Place, Sample, Status

CHECK, PROFILE, CEILINGS, MEASUREMENT = "check", "profile", "ceilings", "measurement of "
"""Work that is done once for a cell or a place; a measurement has its metric's name after it."""


class ProbeVisit(NamedTuple):
    """The samples of the interference probe in one visit; `kind` names its device and number of threads."""

    workload: str
    samples: tuple[Sample, ...]
    kind: str


@dataclass
class Sense:
    """Facts of a journal up to now, without samples."""

    workloads: frozenset[str] | None = None  # None: no run has started
    arms: frozenset[Arm] = frozenset()
    known: frozenset[Arm] = frozenset()  # with their controls, and the probe
    has_ended: bool = False
    epoch: int = 0
    num_visits: Counter[str] = field(default_factory=Counter)  # one more than the number of the last visit
    done: set[tuple[Key | Place, str]] = field(default_factory=set)  # events that happen once for a cell or place

    def problem(self, event: Event) -> str:
        """Why an event cannot follow, in words, or ""."""
        if isinstance(event, events.RunStarted):
            return "" if self.workloads is None else f"a second run, {event.run}, begins"
        if self.workloads is None:
            return "it does not begin with run_started"
        match event:
            case events.VisitFinished():
                return self._visit_problem(event)
            case events.CellEvent():
                return self._cell_problem(event)
            case events.CeilingsMeasured():
                if once(event) in self.done:
                    return f"a second measurement of what {', '.join(map(str, event.ceilings.key))} reaches"
                is_right = all(each.value > 0 and each.amount >= 0 for each in event.ceilings.samples)
                return "" if is_right else "a time of 0 seconds or less"
            case events.RunFinished():
                return "" if event.elapsed_s >= 0 else f"a run of {event.elapsed_s} seconds"
        return ""

    def _cell_problem(self, event: events.CellEvent) -> str:
        arm = event.key[1]
        if self.workloads is not None and event.workload not in self.workloads:
            return f"the plan has no workload {event.workload}"
        if arm not in self.arms:
            return f"the plan has no implementation {arm}"
        if once(event) in self.done:
            return f"a second {once(event)[1]} of {arm} on {event.workload}"
        samples = event.measurement.samples if isinstance(event, events.CellMeasured) else ()
        least = min((sample.value for sample in samples), default=0.0)
        return "" if least >= 0 else f"{least} is not allowed: 0 or more"

    def _visit_problem(self, visit: events.VisitFinished) -> str:
        if self.workloads is not None and visit.workload not in self.workloads:
            return f"the plan has no workload {visit.workload}"
        if self.has_ended:
            return "a visit after the end of the run"
        if visit.visit < self.num_visits[visit.workload]:
            last = self.num_visits[visit.workload] - 1
            return f"visit {visit.visit} of {visit.workload} comes after visit {last}"
        if visit.epoch < self.epoch:
            return f"process {visit.epoch} comes after process {self.epoch}"
        if visit.elapsed_s < 0 or visit.called_s < 0:
            return "a visit that took less than 0 seconds"
        for taken in visit.arms:
            if taken.arm not in self.known:
                return f"the plan has no implementation {taken.arm.as_measured()}"
            for sample in taken.samples:
                if sample.value <= 0:  # the type requires a call
                    return f"a sample of {taken.arm} says {sample.value} s for a call"
        return ""

    def apply(self, event: Event) -> None:
        """Add one event."""
        match event:
            case events.VisitFinished():
                self.num_visits[event.workload], self.epoch = event.visit + 1, event.epoch
            case events.RunStarted():
                self.workloads = frozenset(workload.id for workload in event.plan.workloads)
                self.arms = frozenset(event.plan.specs)
                self.known = self.arms | {arm.as_control() for arm in self.arms} | {PROBE}
            case events.WorkerStarted():
                self.has_ended = False
            case events.RunFinished():
                self.has_ended = True
            case events.CellChecked() | events.CellProfiled() | events.CellMeasured() | events.CeilingsMeasured():
                self.done.add(once(event))


@dataclass
class State(Sense):
    """The progress of a run."""

    status: dict[Key, Status] = field(default_factory=dict)
    num_workers: int = 0
    began: events.WorkerStarted | None = None  # the first worker
    spent_s: float = 0.0  # of the run: until its last visit, plus later checks and ceilings
    samples: dict[str, dict[Arm, list[Sample]]] = field(default_factory=dict)  # by workload and arm
    probes: list[ProbeVisit] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # cells by status, kept up to date: there may be 100,000

    def conclude(self, cell: Key, status: Status) -> None:
        """Set the status of a cell, replacing an earlier one."""
        if cell in self.status:
            self.counts[self.status[cell]] -= 1
        self.status[cell] = status
        self.counts[status] += 1

    def apply(self, event: Event) -> None:
        """Add one event."""
        super().apply(event)
        match event:
            case events.CellChecked():
                self.conclude(event.key, event.status)
                self.spent_s += event.check_s
            case events.CellFailed():
                self.conclude(event.key, event.status)
            case events.CellProfiled() if event.operators.fallback:
                self.conclude(event.key, Status.fallback)
            case events.CeilingsMeasured():
                self.spent_s += event.spent_s
            case events.VisitFinished():
                self.num_workers = max(self.num_workers, event.epoch + 1)  # its start was lost
                self.spent_s = max(self.spent_s + event.called_s, event.elapsed_s)
                arms = self.samples.setdefault(event.workload, {})
                for taken in event.arms:
                    arms.setdefault(taken.arm, []).extend(taken.samples)
                self.probes.append(ProbeVisit(event.workload, event.samples(PROBE), event.probe))
            case events.WorkerStarted():
                self.num_workers += 1
                self.began = self.began or event

    def live(self, workload: str, arms: Iterable[Arm]) -> list[Arm]:
        """Arms that have passed their check on that workload."""
        return [arm for arm in arms if self.status.get((workload, arm)) is Status.ok]


def once(event: events.CellEvent | events.CeilingsMeasured) -> tuple[Key | Place, str]:
    """The key of an event that happens once in a run: a cell or a place, and the work."""
    match event:
        case events.CellMeasured():
            return event.key, MEASUREMENT + event.measurement.metric
        case events.CellChecked():
            return event.key, CHECK
        case events.CellProfiled():
            return event.key, PROFILE
        case events.CeilingsMeasured():
            return event.ceilings.key, CEILINGS + event.ceilings.host
    return event.key, ""
