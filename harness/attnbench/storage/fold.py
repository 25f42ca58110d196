"""The state of a run, folded from its events: the same while it runs and when it continues after a kill."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from attnbench.storage import events
from attnbench.storage.records import PROBE, Arm, Key, Place, Sample, Status


class ProbeVisit(NamedTuple):
    """The samples of the interference probe in one visit; `kind` names its device and number of threads."""

    workload: str
    samples: tuple[Sample, ...]
    kind: str


@dataclass
class State:
    """The progress of a run."""

    status: dict[Key, Status] = field(default_factory=dict)
    profiled: set[Key] = field(default_factory=set)
    observed: set[tuple[Key, str]] = field(default_factory=set)
    ceilings: set[Place] = field(default_factory=set)
    num_visits: Counter[str] = field(default_factory=Counter)
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

    def apply(self, event: events.Event) -> None:
        """Add one event."""
        match event:
            case events.CellChecked():
                self.conclude(event.key, event.status)
                self.spent_s += event.check_s
            case events.CellFailed():
                self.conclude(event.key, event.status)
            case events.CellProfiled():
                self.profiled.add(event.key)
                if event.operators.fallback:
                    self.conclude(event.key, Status.fallback)
            case events.CellMeasured():
                self.observed.add((event.key, event.measurement.metric))
            case events.CeilingsMeasured():
                self.ceilings.add(event.ceilings.key)
                self.spent_s += event.spent_s
            case events.VisitFinished():
                self.num_visits[event.workload] = event.visit + 1
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
