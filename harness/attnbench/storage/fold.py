"""The state of a run after its events so far, in order; used while the run is active, and whenever it is read later.

`State.problem` returns the reason why an event cannot come next, for example that its cell is not in the plan, that its
work is already done, or that a time is not above 0.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from attnbench.storage import events
from attnbench.storage.records import BASE, PROBE, Arm, Ceilings, DeviceState, HardwareKey, Key, Sample, Status
from attnbench.storage.samples import Samples

CHECK, PROFILE, MEASUREMENT = "check", "profile", "measurement of "
"""Kinds of work that are done at most once for a cell; MEASUREMENT is completed by the name of a metric."""


class ProbeVisit(NamedTuple):
    """The samples of the interference probe in one visit; `kind` names its host, device and number of threads."""

    workload: str
    samples: tuple[Sample, ...]
    kind: str


@dataclass
class State:
    """The progress of a run, with all samples; there may be a million visits and 100,000 cells."""

    started: events.RunStarted | None = None
    finished: events.RunFinished | None = None  # None: the run was killed, or is still active
    history: list[events.WorkerStarted | events.RunFinished] = field(default_factory=list)
    worker: events.WorkerStarted | None = None  # the latest process
    host: str = ""  # the host that measures; "" for this machine
    num_workers: int = 0  # processes that were started
    timing_workers: set[int] = field(default_factory=set)  # indices in `history` of workers that timed something
    workloads: frozenset[str] = frozenset()
    known: frozenset[Arm] = frozenset()  # the arms, and the probe
    # pairs (cell, kind of work) in the journal: repeated work, such as a second check of a cell, is an error
    done: set[tuple[Key, str]] = field(default_factory=set)
    status: dict[Key, Status] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)  # number of cells by status
    cells: dict[Key, dict[str, Any]] = field(default_factory=dict)  # fields of each cell's Record, by name
    num_visits: Counter[str] = field(default_factory=Counter)  # by workload: the number of the last visit plus one
    samples: dict[str, dict[Arm, Samples]] = field(default_factory=dict)  # by workload and arm, the probe included
    probes: list[ProbeVisit] = field(default_factory=list)
    # states of the device by workload: a tuple for each visit
    devices: defaultdict[str, list[tuple[DeviceState, ...]]] = field(default_factory=lambda: defaultdict(list))
    ceilings: dict[tuple[str, HardwareKey], Ceilings] = field(default_factory=dict)  # by host and hardware
    spent_s: float = 0.0  # seconds of the run up to its last visit, plus the seconds of later checks and ceilings
    accepted: list[events.BaselineAccepted] = field(default_factory=list)
    num_restored: int = 0  # times that another process changed the journal while the run was active
    num_lost: int = 0  # lines lost from a damaged journal, as far as they can be counted

    def problem(self, event: events.Event) -> str:
        """Return the reason why an event cannot come next; "" if it can."""
        if isinstance(event, events.RunStarted):
            return "" if self.started is None else f"a second run, {event.run}, begins"
        if self.started is None:
            return "it does not begin with run_started"
        match event:
            case events.VisitFinished():
                arms = [taken.arm for taken in event.arms]
                times_s = [sample.value for taken in event.arms for sample in taken.samples]
                if (last := self.num_visits[event.workload] - 1) >= event.visit:
                    return f"visit {event.visit} of {event.workload} comes after visit {last}"
            case events.CellEvent():
                arms, times_s = [event.key[1]], []
                if (event.key, work_of(event)) in self.done:
                    return f"a second {work_of(event)} of {arms[0]}, {event.workload}"
            case events.CeilingsMeasured():
                is_right = all(sample.value > 0 and sample.amount >= 0 for sample in event.ceilings.samples)
                return "" if is_right else "a time of 0 seconds or less"
            case _:
                return ""
        if event.workload not in self.workloads:
            return f"the plan has no workload {event.workload}"
        if unknown := [arm for arm in arms if arm not in self.known]:
            return f"the plan has no implementation {unknown[0]}"
        if min(times_s, default=1.0) <= 0:
            return f"a sample has {min(times_s)} s for a call"
        samples = event.measurement.samples if isinstance(event, events.CellMeasured) else ()
        least = min((sample.value for sample in samples), default=0.0)
        return "" if least >= 0 else f"{least} is not allowed: 0 or more"

    def apply(self, event: events.Event) -> None:
        """Apply one event, for which `problem` returns ""."""
        if isinstance(event, events.CellEvent) and (work := work_of(event)):
            self.done.add((event.key, work))
        match event:
            case events.RunStarted():
                self.started = event
                self.workloads = frozenset(workload.id for workload in event.plan.workloads)
                arms = frozenset(event.plan.specs)
                self.known = arms | {PROBE}
            case events.WorkerStarted():
                self.worker, self.host = event, event.host
                self.finished = None
                self.num_workers += 1
                self.history.append(event)
            case events.RunFinished():
                self.finished = event
                self.history.append(event)
            case events.CellChecked() | events.CellFailed():
                self._conclude(event)
            case events.CellMeasured():
                cell = self.cells.setdefault(event.key, {})
                cell["measurements"] = (*cell.get("measurements", ()), event.measurement)
            case events.CellProfiled(operators=operators):
                fields = {"message": operators.fallback} if operators.fallback else {}
                self._set(event.key, Status.fallback if fields else None, operators=operators, **fields)
            case events.CeilingsMeasured():
                self.ceilings.setdefault((self.host, event.ceilings.key), event.ceilings)
                self.spent_s += event.spent_s
            case events.VisitFinished():
                self._add_visit(event)
            case events.BaselineAccepted():
                self.accepted.append(event)
            case events.JournalRestored():
                self.num_restored += 1
            case events.LinesLost():
                self.num_lost += len(event.lines) + len(event.gaps)

    def _set(self, cell: Key, status: Status | None, **fields: Any) -> None:  # noqa: ANN401 - fields of a record have several types
        """Set fields of a cell's record and, unless `status` is None, its status."""
        self.cells.setdefault(cell, {}).update(fields)
        if status is not None:
            if cell in self.status:
                self.counts[self.status[cell]] -= 1
            self.status[cell] = status
            self.counts[status] += 1

    def _conclude(self, event: events.CellChecked | events.CellFailed) -> None:
        """Store the result of a check, or a failure, with the environment, time and host of the process."""
        fields: dict[str, Any] = {"message": event.message}
        if isinstance(event, events.CellChecked):
            self.spent_s += event.check_s
            for name in ("is_predicted", "agreement", "executed_flops"):
                fields[name] = getattr(event, name)
        if (worker := self.worker) is not None:
            base = worker.base if event.side == BASE else None
            fields |= {"environment": base or worker.environment, "time": worker.time, "host": worker.host}
        self._set(event.key, event.status, **fields)

    def _add_visit(self, visit: events.VisitFinished) -> None:
        self.num_visits[visit.workload] = visit.visit + 1
        self.num_workers = max(self.num_workers, visit.epoch + 1)  # also if the worker's start was lost
        self.timing_workers.add(len(self.history) - 1)
        self.spent_s = max(self.spent_s + visit.called_s, visit.elapsed_s)
        if visit.states:
            self.devices[visit.workload].append(visit.states)
        arms = self.samples.setdefault(visit.workload, {})
        for taken in visit.arms:
            arms.setdefault(taken.arm, Samples()).extend(taken.samples)
        self.probes.append(ProbeVisit(visit.workload, visit.samples(PROBE), f"{self.host} {visit.probe}"))

    def live(self, workload: str, arms: Iterable[Arm]) -> list[Arm]:
        """Return the members of `arms` whose status on the workload is ok."""
        return [arm for arm in arms if self.status.get((workload, arm)) is Status.ok]


def work_of(event: events.CellEvent) -> str:
    """Return the kind of work that an event reports, or "" for a `CellFailed`, which a cell may have several times."""
    if isinstance(event, events.CellMeasured):
        return MEASUREMENT + event.measurement.metric
    return CHECK if isinstance(event, events.CellChecked) else PROFILE if isinstance(event, events.CellProfiled) else ""
