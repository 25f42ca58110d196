"""Check that a journal makes sense: runs, cells and visits exist, nothing happens twice, times are above 0."""

from collections.abc import Iterable

from attnbench.storage import events
from attnbench.storage.events import Event
from attnbench.storage.records import PROBE, Arm, Key, Place


class Sense:
    """Facts of a journal up to now, which the next event must fit."""

    def __init__(self) -> None:
        self.workloads: frozenset[str] | None = None  # None: no run has started
        self.arms: frozenset[Arm] = frozenset()
        self.known: set[Arm] = set()  # with their controls, and the probe
        self.has_ended = False
        self.epoch = 0
        self.visits: dict[str, int] = {}  # last visit of each workload
        self.once: set[tuple[str, Key | Place, str]] = set()  # events that happen once for each cell or place

    def problem(self, event: Event) -> str:
        """Why an event cannot follow, in words, or ""."""
        if isinstance(event, events.VisitFinished) and self.workloads is not None:  # the most frequent event
            return self._visit_problem(event)
        if isinstance(event, events.RunStarted):
            return "" if self.workloads is None else f"a second run, {event.run}, begins"
        if self.workloads is None:
            return "it does not begin with run_started"
        match event:
            case events.CellEvent():
                if not (problem := self._unknown(event.workload, [event.key[1]])) and _once(event) in self.once:
                    problem = f"a second {_once(event)[0]} of {event.key[1]} on {event.workload}"
                if not problem and isinstance(event, events.CellMeasured):
                    values = [sample.value for sample in event.measurement.samples]
                    problem = "" if all(value >= 0 for value in values) else f"{min(values)} is not allowed: 0 or more"
                return problem
            case events.CeilingsMeasured():
                if _once(event) in self.once:
                    return f"a second measurement of what {', '.join(map(str, event.ceilings.key))} reaches"
                is_right = all(each.value > 0 and each.amount >= 0 for each in event.ceilings.samples)
                return "" if is_right else "a time of 0 seconds or less"
            case events.RunFinished():
                return "" if event.elapsed_s >= 0 else f"a run of {event.elapsed_s} seconds"
        return ""

    def add(self, event: Event) -> None:
        """Add an event that has no problem."""
        match event:
            case events.VisitFinished():
                self.visits[event.workload], self.epoch = event.visit, event.epoch
            case events.RunStarted():
                self.workloads = frozenset(workload.id for workload in event.plan.workloads)
                self.arms = frozenset(event.plan.specs)
                self.known = {*self.arms, *(arm.as_control() for arm in self.arms), PROBE}
            case events.WorkerStarted():
                self.has_ended = False
            case events.RunFinished():
                self.has_ended = True
            case events.CellChecked() | events.CellProfiled() | events.CellMeasured() | events.CeilingsMeasured():
                self.once.add(_once(event))

    def _unknown(self, workload: str, arms: Iterable[Arm]) -> str:
        if self.workloads is not None and workload not in self.workloads:
            return f"the plan has no workload {workload}"
        return next((f"the plan has no implementation {arm}" for arm in arms if arm not in self.arms), "")

    def _visit_problem(self, visit: events.VisitFinished) -> str:
        if self.workloads is not None and visit.workload not in self.workloads:
            return f"the plan has no workload {visit.workload}"
        for taken in visit.arms:
            if taken.arm not in self.known:
                return f"the plan has no implementation {taken.arm.as_measured()}"
        if self.has_ended:
            return "a visit after the end of the run"
        if visit.visit <= self.visits.get(visit.workload, -1):
            return f"visit {visit.visit} of {visit.workload} comes after visit {self.visits[visit.workload]}"
        if visit.epoch < self.epoch:
            return f"process {visit.epoch} comes after process {self.epoch}"
        if visit.elapsed_s < 0 or visit.called_s < 0:
            return "a visit that took less than 0 seconds"
        for taken in visit.arms:
            for sample in taken.samples:
                if sample.value <= 0:  # the type requires a call
                    return f"a sample of {taken.arm} says {sample.value} s for a call"
        return ""


def _once(event: events.CellEvent | events.CeilingsMeasured) -> tuple[str, Key | Place, str]:
    """The key of an event that happens once in a run; the keys of other events are never stored."""
    match event:
        case events.CellMeasured():
            return f"measurement of {event.measurement.metric}", event.key, event.measurement.metric
        case events.CellChecked():
            return "check", event.key, ""
        case events.CellProfiled():
            return "profile", event.key, ""
        case events.CeilingsMeasured():
            return "ceilings", event.ceilings.key, event.ceilings.host
    return "event", event.key, ""
