"""A run, read back and judged: its records, disturbed blocks, and impossible times.

The journal holds raw samples only (storage/journal.py), so that old runs are judged by today's rules.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
from attnbench.storage.warned import Warned

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
    warnings: dict[Key, tuple[Warned, ...]] = field(default_factory=dict)  # warnings about suspicious times
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
    journal, fold = journal_of(path), Fold()
    for event in read_events(journal):
        if fold.started is None and not isinstance(event, events.RunStarted):
            break
        fold.add(event)
    if fold.started is None:
        raise DamagedError(f"{journal} holds no run: its first line is not run_started")
    return fold.results(journal.parent)


class Fold:
    """Folds the events of a journal one by one; there may be a million visits."""

    def __init__(self) -> None:
        self.started: events.RunStarted | None = None
        self.finished: events.RunFinished | None = None  # None: killed, or still running
        self.worker: events.WorkerStarted | None = None
        self.loads: list[events.WorkerStarted | events.RunFinished] = []
        self.timing_workers: set[int] = set()  # numbers of the workers that timed something
        self.doubts: dict[Key, str] = {}  # from the last visit of each cell
        self._num_workers = 0
        self._check_s = self._called_s = 0.0
        self._num_visits: Counter[str] = Counter()
        self._gauges: defaultdict[str, InterferenceGauge] = defaultdict(InterferenceGauge)  # by host
        self._states = defaultdict[str, list[Sequence[DeviceState]]](list)  # by workload, for each visit
        self._samples: defaultdict[tuple[str, Arm], Collector] = defaultdict(Collector)  # controls included
        self._cells: defaultdict[Key, dict[str, Any]] = defaultdict(dict)  # the fields of each record
        self._measured: defaultdict[Key, dict[str, Measurement]] = defaultdict(dict)  # in separate passes
        self._ceilings: dict[tuple[str, Place], Ceilings] = {}
        self._accepted: list[events.BaselineAccepted] = []
        self._num_restored = self._num_lost = 0

    def add(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case events.RunStarted():
                self.started = self.started or event
            case events.WorkerStarted():
                self.worker, self.finished = event, None
                self._num_workers += 1
                self.loads.append(event)
            case events.RunFinished():
                self.finished = event
                self.loads.append(event)
            case events.VisitFinished():
                self._add_visit(event)
            case events.CellChecked() | events.CellFailed():
                self._conclude(event)
            case events.CellMeasured():
                self._measured[event.key][event.measurement.metric] = event.measurement
            case events.CellProfiled():
                self._cells[event.key]["operators"] = event.operators
                if event.operators.fallback:
                    self._cells[event.key] |= {"status": Status.fallback, "message": event.operators.fallback}
            case events.CeilingsMeasured():
                self._ceilings[event.ceilings.host, event.ceilings.key] = event.ceilings
            case events.BaselineAccepted():
                self._accepted.append(event)
            case events.JournalRestored():
                self._num_restored += 1
            case events.LinesLost():
                self._num_lost += len(event.lines) + len(event.gaps)
            case events.StateChanged():
                pass

    def _add_visit(self, visit: events.VisitFinished) -> None:
        self.timing_workers.add(self._num_workers - 1)
        self._num_visits[visit.workload] += 1
        self._called_s += visit.called_s
        if visit.states:
            self._states[visit.workload].append(visit.states)
        for taken in visit.arms:
            if taken.arm.role is Role.probe:
                host = "" if self.worker is None else self.worker.host
                self._gauges[host].add(visit.workload, taken.samples, visit.probe)
                continue
            place = visit.workload, taken.arm
            if taken.arm.role is Role.measured:
                self.doubts.pop(place, None)
                if doubt := visit.doubts.get(taken.arm.implementation):
                    self.doubts[place] = doubt
            self._samples[place].extend(taken.samples)

    def _conclude(self, event: events.CellChecked | events.CellFailed) -> None:
        """Set the fields of a record that a check or a failure sets, with the environment."""
        fields: dict[str, Any] = {"status": event.status, "message": event.message}
        if isinstance(event, events.CellChecked):
            self._check_s += event.check_s
            fields |= {
                name: getattr(event, name) for name in ("is_predicted", "is_outpaced", "agreement", "executed_flops")
            }
        if (worker := self.worker) is not None:
            base = worker.base if event.side == BASE else None
            fields |= {"environment": base or worker.environment, "time": worker.time, "host": worker.host}
        self._cells[event.key] |= fields

    def results(self, folder: Path) -> Results:
        """The run that was read, judged by today's rules."""
        started, finished = self.started, self.finished
        assert started is not None
        is_cold = started.plan.cache != "warm"
        records, warnings = judged(tuple(self._records(started)), self._ceilings, is_cold=is_cold)
        slow = {workload: tuple(slowed(visits)) for workload, visits in self._states.items()}
        for record in records:
            if record.measurement(LATENCY) is not None and (texts := slow.get(record.workload.id)):
                warnings[record.key] = (*warnings.get(record.key, ()), *texts)
        gauges = self._gauges.values()
        return Results(
            folder=folder,
            started=started,
            records=records,
            elapsed_s=finished.elapsed_s if finished is not None else None,
            num_visits=dict(self._num_visits),
            check_s=self._check_s,
            called_s=self._called_s,
            num_blocks=sum(gauge.num_blocks for gauge in gauges),
            discarded={name: frozenset(blocks) for gauge in gauges for name, blocks in gauge.discarded.items()},
            reason=finished.reason if finished is not None else "",
            ceilings={place: each for (_, place), each in reversed(self._ceilings.items())},
            host_ceilings=self._ceilings,
            warnings=warnings,
            doubts=self.doubts,
            system_load=system_load(self.loads, self.timing_workers),
            devices={workload: summarized(visits) for workload, visits in self._states.items()},
            accepted=tuple(self._accepted),
            num_restored=self._num_restored,
            num_lost=self._num_lost,
        )

    def _records(self, started: events.RunStarted) -> Iterator[Record]:
        """One record for each finished cell, in the plan's order."""
        order = {workload.id: place for place, workload in enumerate(started.plan.workloads)}
        for key, fields in sorted(self._cells.items(), key=lambda item: order.get(item[0][0], -1)):
            workload, arm = key
            if "status" not in fields or workload not in order:
                continue
            known = {"environment": None, **fields, "time": fields.get("time") or started.time}
            measurements = (*self._times(key), *self._measured[key].values())
            yield Record(
                run=started.run,
                commit=started.commit_of(arm),
                workload=started.plan.workloads[order[workload]],
                implementation=arm.implementation,
                side=arm.side,
                measurements=measurements if known["status"] is Status.ok else (),
                **known,
            )

    def _times(self, key: Key) -> Iterator[Measurement]:
        """Times of a cell, and those of its A/A control as a metric of their own."""
        workload, arm = key
        for metric, own in ((LATENCY, arm), (CONTROL_LATENCY, arm.as_control())):
            if (workload, own) in self._samples:
                yield Measurement(metric=metric, unit="s", samples=self._samples[workload, own].samples)
