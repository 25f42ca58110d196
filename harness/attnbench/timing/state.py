"""How far a run is, as its events say: what is checked, read and visited, and so what comes next."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from attnbench.statistics.interference import InterferenceGauge
from attnbench.storage.events import (
    BaselineAccepted,
    CeilingsMeasured,
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
from attnbench.storage.records import PROBE, Arm, Key, Place, Sample, Status


@dataclass
class State:
    """What follows from the events so far."""

    status: dict[Key, Status] = field(default_factory=dict)
    profiled: set[Key] = field(default_factory=set)
    observed: set[tuple[Key, str]] = field(default_factory=set)
    ceilings: set[Place] = field(default_factory=set)
    num_visits: Counter[str] = field(default_factory=Counter)
    num_workers: int = 0
    began: WorkerStarted | None = None  # the first of them
    spent_s: float = 0.0  # of the run: until its last visit, and inside checks and ceilings after it
    samples: dict[str, dict[Arm, list[Sample]]] = field(default_factory=dict)  # by workload and arm
    gauge: InterferenceGauge = field(default_factory=InterferenceGauge)
    counts: Counter[str] = field(default_factory=Counter)  # cells by status

    def conclude(self, cell: Key, status: Status) -> None:
        """Give a cell a status, in place of an earlier one."""
        if cell in self.status:
            self.counts[self.status[cell]] -= 1
        self.status[cell] = status
        self.counts[status] += 1

    def apply(self, event: Event) -> None:
        """Add one event."""
        match event:
            case CellChecked():
                self.conclude(event.key, event.status)
                self.spent_s += event.check_s
            case CellFailed():
                self.conclude(event.key, event.status)
            case CellProfiled():
                self.profiled.add(event.key)
                if event.operators.fallback:
                    self.conclude(event.key, Status.fallback)
            case CellMeasured():
                self.observed.add((event.key, event.measurement.metric))
            case CeilingsMeasured():
                self.ceilings.add(event.ceilings.key)
                self.spent_s += event.spent_s
            case VisitFinished():
                self.num_visits[event.workload] += 1
                self.spent_s = max(self.spent_s + event.called_s, event.elapsed_s)
                arms = self.samples.setdefault(event.workload, {})
                for taken in event.arms:
                    arms.setdefault(taken.arm, []).extend(taken.samples)
                self.gauge.add(event.workload, event.samples(PROBE))
            case WorkerStarted():
                self.num_workers += 1
                self.began = self.began or event
            case RunStarted() | RunFinished() | BaselineAccepted():
                pass

    def live(self, workload: str, arms: Iterable[Arm]) -> list[Arm]:
        """Those of the arms that have passed on that workload so far."""
        return [arm for arm in arms if self.status.get((workload, arm)) is Status.ok]
