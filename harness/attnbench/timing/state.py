"""Where a run stands, as its events tell it: what is checked, read and visited, and so what comes next."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from attnbench.statistics.interference import CANARY, Gauge
from attnbench.storage.ceilings import Key
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
from attnbench.storage.records import Sample, Status


@dataclass
class State:
    """What the journal has said so far; the next step follows from it."""

    status: dict[tuple[str, str], Status] = field(default_factory=dict)
    profiled: set[tuple[str, str]] = field(default_factory=set)
    observed: set[tuple[str, str, str]] = field(default_factory=set)
    ceilings: set[Key] = field(default_factory=set)
    num_visits: Counter[str] = field(default_factory=Counter)
    num_workers: int = 0
    began: WorkerStarted | None = None  # the first of them
    spent_s: float = 0.0  # of the run: until its last visit, and inside checks and ceilings after it
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)  # by workload and arm
    gauge: Gauge = field(default_factory=Gauge)
    counts: Counter[str] = field(default_factory=Counter)  # cells by status

    def conclude(self, cell: tuple[str, str], status: Status) -> None:
        """A cell has a status, in place of an earlier one."""
        if cell in self.status:
            self.counts[self.status[cell]] -= 1
        self.status[cell] = status
        self.counts[status] += 1

    def apply(self, event: Event) -> None:
        """Take note of an event."""
        match event:
            case CellChecked():
                self.conclude((event.workload, event.implementation), event.status)
                self.spent_s += event.check_s
            case CellFailed():
                self.conclude((event.workload, event.implementation), event.status)
            case CellProfiled():
                self._profiled(event)
            case CellMeasured():
                self.observed.add((event.workload, event.implementation, event.measurement.metric))
            case CeilingsMeasured():
                self.ceilings.add(event.ceilings.key)
                self.spent_s += event.spent_s
            case VisitFinished():
                self._visited(event)
            case WorkerStarted():
                self.num_workers += 1
                self.began = self.began or event
            case RunStarted() | RunFinished() | BaselineAccepted():
                pass

    def _profiled(self, event: CellProfiled) -> None:
        self.profiled.add((event.workload, event.implementation))
        if event.operators.fallback:
            self.conclude((event.workload, event.implementation), Status.fallback)

    def _visited(self, event: VisitFinished) -> None:
        self.num_visits[event.workload] += 1
        self.spent_s = max(self.spent_s + event.called_s, event.elapsed_s)
        arms = self.samples.setdefault(event.workload, {})
        for arm, taken in event.arms.items():
            arms.setdefault(arm, []).extend(taken)
        self.gauge.hear(event.workload, event.arms.get(CANARY, ()))

    def live(self, workload: str, names: Iterable[str]) -> list[str]:
        """The implementations that have passed so far on that workload."""
        return [name for name in names if self.status.get((workload, name)) is Status.ok]
