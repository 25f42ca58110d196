"""A run, read back and judged: its records, disturbed blocks, and impossible times.

The journal holds raw samples only (storage/journal.py), so that old runs are judged by today's rules.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnbench.analysis.sanity import DeviceSummary, SystemLoad, judged, slowed, summarized, system_load
from attnbench.statistics.interference import InterferenceGauge
from attnbench.statistics.intervals import Block
from attnbench.storage import events
from attnbench.storage.events import DamagedError, Event, Plan
from attnbench.storage.journal import FIRST_WITH_DIGESTS, journal_of
from attnbench.storage.journal import events as read_events
from attnbench.storage.records import (
    BASE,
    CONTROL_LATENCY,
    LATENCY,
    Arm,
    Ceilings,
    DeviceState,
    Environment,
    Key,
    Measurement,
    Place,
    Record,
    Role,
    Status,
)
from attnbench.storage.samples import Collector

LOST = "which {} lines or gaps were left out: a failure may have been among them"
"""Warning about a run with a damaged journal."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Results:
    """One run as read back: its plan, its records in the plan's order, and whether it finished.

    Results compare by identity, so that `lru_cache` can hold values derived from them: do not modify them.
    """

    folder: Path
    started: events.RunStarted
    records: tuple[Record, ...]
    elapsed_s: float | None  # None: killed, or still running
    num_visits: dict[str, int]  # by workload id
    check_s: float  # total time of all checks
    called_s: float = 0.0  # total time of all visits spent inside calls
    num_blocks: int = 0  # blocks with an interference probe
    discarded: dict[str, frozenset[Block]] = field(default_factory=dict)  # disturbed blocks, by workload id
    reason: str = ""  # why timing ended
    ceilings: dict[Place, Ceilings] = field(default_factory=dict)  # for several hosts, those of the first
    host_ceilings: dict[tuple[str, Place], Ceilings] = field(default_factory=dict)  # by host name
    warnings: dict[Key, tuple[str, ...]] = field(default_factory=dict)  # warnings about suspicious times
    doubts: dict[Key, str] = field(default_factory=dict)  # by cell: why its times are doubtful
    system_load: SystemLoad | None = None  # load from other work during the run
    devices: Mapping[str, DeviceSummary] = field(default_factory=dict)  # by workload, if a driver reports its state
    accepted: tuple[events.BaselineAccepted, ...] = ()  # of a stored baseline and its predecessors
    num_restored: int = 0  # times that another process changed the journal while the run was active
    num_lost: int = 0  # lines lost from a damaged journal, as far as they can be counted

    @property
    def run(self) -> str:
        """The run's name."""
        return self.started.run

    @property
    def plan(self) -> Plan:
        """The plan of the run."""
        return self.started.plan

    @property
    def has_digests(self) -> bool:
        """Whether the journal has digests, which reveal edited numbers."""
        return self.started.schema >= FIRST_WITH_DIGESTS

    @property
    def num_discarded(self) -> int:
        """Number of blocks discarded because of interference."""
        return sum(map(len, self.discarded.values()))

    @property
    def num_left_out(self) -> int:
        """Number of cells that a finished run did not check, for lack of time."""
        unasked = set(self.plan.unasked)
        concluded = sum(record.workload.id not in unasked for record in self.records)
        return 0 if self.elapsed_s is None else self.plan.num_cells - concluded

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts that measured the cells, in order; empty if the run was on this machine only."""
        return tuple(dict.fromkeys(record.host for record in self.records if record.host))

    @property
    def environments(self) -> dict[str, Environment]:
        """Environments of the records by fingerprint, in order; several if the machine changed."""
        found = (record.environment for record in self.records if record.environment is not None)
        return {environment.fingerprint: environment for environment in found}


def read(path: Path) -> Results:
    """Read the run at `path`: its folder or its journal.

    Raises:
        ValueError: see `storage.journal.events`.
        DamagedError: see `storage.journal.events`; or the journal does not begin with a run.
    """
    journal = journal_of(path)
    history: list[Event] = []  # without visits: there may be a million
    timed = Timed()
    for event in read_events(journal):
        if isinstance(event, events.VisitFinished):
            timed.add(event)
        else:
            history.append(event)
            if isinstance(event, events.WorkerStarted):
                timed.start(event)
    if not history or not isinstance(history[0], events.RunStarted):
        raise DamagedError(f"{journal} holds no run: its first line is not run_started")
    started = history[0]
    marks = (each for each in reversed(history) if isinstance(each, events.RunFinished | events.WorkerStarted))
    last = next(marks, None)
    finished = last if isinstance(last, events.RunFinished) else None  # None: continued and killed
    reached = [event.ceilings for event in history if isinstance(event, events.CeilingsMeasured)]
    host_ceilings = {(each.host, each.key): each for each in reached}
    found = tuple(folded(started, history, timed))
    records, warnings = judged(found, host_ceilings, is_cold=started.plan.cache != "warm")
    held = {workload: tuple(slowed(visits)) for workload, visits in timed.states.items()}
    for record in records:
        if record.measurement(LATENCY) is not None and (said := held.get(record.workload.id)):
            warnings[record.key] = (*warnings.get(record.key, ()), *said)
    return Results(
        folder=journal.parent,
        started=started,
        records=records,
        elapsed_s=finished.elapsed_s if finished is not None else None,
        num_visits=dict(timed.num_visits),
        check_s=sum(event.check_s for event in history if isinstance(event, events.CellChecked)),
        called_s=timed.called_s,
        num_blocks=sum(gauge.num_blocks for gauge in timed.gauges.values()),
        discarded={
            workload: frozenset(blocks)
            for gauge in timed.gauges.values()
            for workload, blocks in gauge.discarded.items()
        },
        reason=finished.reason if finished is not None else "",
        ceilings={each.key: each for each in reversed(reached)},
        host_ceilings=host_ceilings,
        warnings=warnings,
        doubts=timed.doubts,
        system_load=system_load(history, timed.workers),
        devices={workload: summarized(visits) for workload, visits in timed.states.items()},
        accepted=tuple(event for event in history if isinstance(event, events.BaselineAccepted)),
        num_restored=sum(isinstance(event, events.JournalRestored) for event in history),
        num_lost=sum(len(each.lines) + len(each.gaps) for each in history if isinstance(each, events.LinesLost)),
    )


class Timed:
    """Collects the visits of a run while they are read."""

    def __init__(self) -> None:
        self.num_visits: Counter[str] = Counter()
        self.called_s = 0.0
        self.host = ""  # host of the next visits
        self.worker = -1  # worker number of the next visits
        self.workers: set[int] = set()  # numbers of all workers that timed something
        self.gauges: defaultdict[str, InterferenceGauge] = defaultdict(InterferenceGauge)  # by host
        self.states = defaultdict[str, list[Sequence[DeviceState]]](list)  # by workload, for each visit
        self.doubts: dict[Key, str] = {}  # from the last visit of each cell
        self._samples: dict[tuple[str, Arm], Collector] = {}  # of arms and their A/A controls

    def start(self, worker: events.WorkerStarted) -> None:
        """Note the worker of the next visits."""
        self.host, self.worker = worker.host, self.worker + 1

    def add(self, visit: events.VisitFinished) -> None:
        """Add the next visit."""
        self.workers.add(self.worker)
        self.num_visits[visit.workload] += 1
        self.called_s += visit.called_s
        if visit.states:
            self.states[visit.workload].append(visit.states)
        for taken in visit.arms:
            if taken.arm.role is Role.probe:
                self.gauges[self.host].add(visit.workload, taken.samples, visit.probe)
                continue
            place = visit.workload, taken.arm
            if taken.arm.role is Role.measured:
                self.doubts.pop(place, None)
                if doubt := visit.doubts.get(taken.arm.implementation):
                    self.doubts[place] = doubt
            collected = self._samples.get(place)
            if collected is None:
                collected = self._samples[place] = Collector()
            collected.extend(taken.samples)

    def measurements(self, key: Key) -> Iterator[Measurement]:
        """Times of a cell, and those of its A/A control as a metric of their own."""
        workload, arm = key
        for metric, own in ((LATENCY, arm), (CONTROL_LATENCY, arm.as_control())):
            if (collected := self._samples.get((workload, own))) is not None:
                yield Measurement(metric=metric, unit="s", samples=collected.samples)


def folded(started: events.RunStarted, history: Iterable[Event], timed: Timed) -> Iterator[Record]:
    """One record for each finished cell, in the plan's order."""
    cells: defaultdict[Key, dict[str, Any]] = defaultdict(dict)  # the fields of each record
    measured: defaultdict[Key, dict[str, Measurement]] = defaultdict(dict)  # measured in separate passes
    worker: events.WorkerStarted | None = None
    for event in history:
        match event:
            case events.WorkerStarted():
                worker = event
            case events.CellMeasured():
                measured[event.key][event.measurement.metric] = event.measurement
            case events.CellProfiled():
                cells[event.key]["operators"] = event.operators
                if event.operators.fallback:
                    cells[event.key] |= {"status": Status.fallback, "message": event.operators.fallback}
            case events.CellChecked() | events.CellFailed():
                cells[event.key] |= _concluded(event, worker)
            case events.VisitFinished() | events.StateChanged() | events.CeilingsMeasured() | events.JournalRestored():
                pass
            case events.RunStarted() | events.RunFinished() | events.BaselineAccepted() | events.LinesLost():
                pass
    order = {workload.id: place for place, workload in enumerate(started.plan.workloads)}
    for key, fields in sorted(cells.items(), key=lambda item: order.get(item[0][0], -1)):
        workload, arm = key
        if "status" in fields and workload in order:
            known = {"environment": None, **fields, "time": fields.get("time") or started.time}
            yield Record(
                run=started.run,
                commit=started.commit_of(arm),
                workload=started.plan.workloads[order[workload]],
                implementation=arm.implementation,
                side=arm.side,
                measurements=(*timed.measurements(key), *measured[key].values())
                if known["status"] is Status.ok
                else (),
                **known,
            )


def _concluded(event: events.CellChecked | events.CellFailed, worker: events.WorkerStarted | None) -> dict[str, Any]:
    """Fields of a record that a check or a failure sets, with the environment."""
    fields: dict[str, Any] = {"status": event.status, "message": event.message}
    if isinstance(event, events.CellChecked):
        fields |= {
            name: getattr(event, name) for name in ("is_predicted", "is_outpaced", "agreement", "executed_flops")
        }
    if worker is not None:
        own = worker.base if event.side == BASE else None
        fields |= {"environment": own or worker.environment, "time": worker.time, "host": worker.host}
    return fields
