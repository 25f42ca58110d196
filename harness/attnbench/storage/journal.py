"""The journal: one JSON line for each event, appended and synced as work finishes, and folded into records on read.

A journal is data, never executed. A line that a kill cut short is dropped; any other damage is an error that names it.
Idea of joining run and report by files alone: https://asv.readthedocs.io.
"""

import fcntl
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

import msgspec

from attnbench.analysis.rates import Rates, rates
from attnbench.analysis.sanity import judged
from attnbench.analysis.system_load import Crowd, crowd
from attnbench.statistics.interference import CANARY, Gauge
from attnbench.statistics.intervals import Block
from attnbench.storage.ceilings import Ceilings, Key
from attnbench.storage.events import (
    SCHEMA,
    BaselineAccepted,
    CeilingsMeasured,
    CellChecked,
    CellFailed,
    CellMeasured,
    CellProfiled,
    DamagedError,
    Event,
    Plan,
    RunFinished,
    RunStarted,
    VisitFinished,
    WorkerStarted,
)
from attnbench.storage.records import Agreement, Environment, Measurement, Operators, Record, Sample, Status
from attnbench.workloads.workload import Workload

JOURNAL = "journal.jsonl"
SYNC_EVERY_S = 0.1
"""What a power cut may cost; a kill costs nothing."""
_DECODER = msgspec.json.Decoder(Event)
_ENCODER = msgspec.json.Encoder()


class Journal:
    """An open journal to append to. Use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        """Open `folder`/journal.jsonl for appending, dropping a last line that a kill cut short.

        Raises:
            ValueError: the folder cannot be made or written, or another process is writing there.
        """
        self.path = folder / JOURNAL
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self.path.open("ab")
        except OSError as error:
            raise ValueError(
                f"cannot write results to {folder}: {error.strerror}; choose another folder with --results"
            ) from None
        _lock(self._file, folder)
        self._synced_s = -math.inf
        whole = self.path.read_bytes().rfind(b"\n") + 1
        self._file.truncate(whole)

    def append(self, event: Event) -> None:
        """Hand one event to the system, where no kill can reach it, and wait for the disk ten times a second.

        Waiting each time would take minutes for what is foreseen in milliseconds, a hundred thousand times.
        """
        self._file.write(_ENCODER.encode(event) + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced_s >= SYNC_EVERY_S:
            self._sync()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced_s = time.monotonic()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the disk, and close the file."""
        self._sync()
        self._file.close()


def _lock(file: IO[bytes], folder: Path) -> None:
    """For this process alone, until it ends, however it ends; where the file system knows no locks, for anybody."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"{folder} is being written by another process: wait for its end, or stop it") from None
    except OSError:
        return


@dataclass(frozen=True, kw_only=True)
class Results:
    """One run as read back: its plan, its records in the plan's order, and whether it came to its end."""

    folder: Path
    started: RunStarted
    records: tuple[Record, ...]
    elapsed_s: float | None  # None: killed, or still at work
    num_visits: dict[str, int]  # by workload id
    check_s: float  # what all checks took together
    called_s: float = 0.0  # what all visits spent inside calls
    num_blocks: int = 0  # that had a canary
    void: dict[str, frozenset[Block]] = field(default_factory=dict)  # disturbed blocks, by workload id
    reason: str = ""  # why timing ended
    ceilings: dict[Key, Ceilings] = field(default_factory=dict)
    doubts: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)  # of times, by workload id and name
    crowd: Crowd | None = None  # what others did meanwhile
    accepted: tuple[BaselineAccepted, ...] = ()  # of a stored baseline: what it and its predecessors were accepted for

    @property
    def run(self) -> str:
        """The run's name."""
        return self.started.run

    @property
    def plan(self) -> Plan:
        """What the run was asked to do."""
        return self.started.plan

    def rates(self, workload: Workload, time_s: float) -> Rates:
        """What a call of the workload that takes so long means as work, beside this run's ceilings."""
        return rates(workload, time_s, self.ceilings.get(workload.place), is_cold=self.plan.cache == "cold")


@dataclass
class _Cell:
    """What the events have said of one cell so far."""

    status: Status | None = None
    message: str = ""
    is_predicted: bool = False
    agreement: Agreement | None = None
    executed_flops: int | None = None
    operators: Operators | None = None
    environment: Environment | None = None
    time: str = ""
    measured: dict[str, Measurement] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)


def events(path: Path) -> Iterator[Event]:
    """The events of a journal file, in order.

    Raises:
        ValueError: no such file, or a newer schema.
        DamagedError: a damaged line, or not a journal at all.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; give a run's folder or its {JOURNAL}") from None
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline was cut short
        try:
            event = _DECODER.decode(line)
        except msgspec.DecodeError as error:
            raise DamagedError(f"{path}, line {number}: not an event of a journal ({error})") from None
        if isinstance(event, RunStarted) and event.schema > SCHEMA:
            raise ValueError(f"{path} has schema {event.schema}, newer than {SCHEMA}: update attnbench to read it")
        yield event


def journal_of(path: Path) -> Path:
    """The journal of a run that is given by its folder or by its journal."""
    return path / JOURNAL if path.is_dir() or not path.suffix else path


def read(path: Path) -> Results:
    """The run at `path`: its folder or its journal.

    Raises:
        ValueError: see `events`.
        DamagedError: likewise; or the journal does not begin with a run.
    """
    journal = journal_of(path)
    found = list(events(journal))
    if not found or not isinstance(found[0], RunStarted):
        raise DamagedError(f"{journal} holds no run: its first line is not run_started")
    started = found[0]
    ending = next((each for each in reversed(found) if isinstance(each, RunFinished | WorkerStarted)), None)
    finished = ending if isinstance(ending, RunFinished) else None  # a worker after the end: it went on, and was killed
    visits = [event for event in found if isinstance(event, VisitFinished)]
    gauge = Gauge()
    for visit in visits:
        gauge.hear(visit.workload, visit.arms.get(CANARY, ()))
    ceilings = {event.ceilings.key: event.ceilings for event in found if isinstance(event, CeilingsMeasured)}
    records, doubts = judged(tuple(_fold(started, found)), ceilings, is_cold=started.plan.cache == "cold")
    return Results(
        folder=journal.parent,
        started=started,
        records=records,
        elapsed_s=finished.elapsed_s if finished is not None else None,
        num_visits=dict(Counter(visit.workload for visit in visits)),
        check_s=sum(event.check_s for event in found if isinstance(event, CellChecked)),
        called_s=sum(visit.called_s for visit in visits),
        num_blocks=gauge.num_blocks,
        void={workload: frozenset(blocks) for workload, blocks in gauge.void.items()},
        reason=finished.reason if finished is not None else "",
        ceilings=ceilings,
        doubts=doubts,
        crowd=crowd(found),
        accepted=tuple(event for event in found if isinstance(event, BaselineAccepted)),
    )


def _fold(started: RunStarted, found: Iterable[Event]) -> Iterator[Record]:
    """One record for each cell that the events have concluded, in the plan's order."""
    cells: dict[tuple[str, str], _Cell] = {}
    worker: WorkerStarted | None = None
    for event in found:
        match event:
            case WorkerStarted():
                worker = event
            case CellChecked() | CellProfiled() | CellMeasured() | CellFailed():
                cell = cells.setdefault((event.workload, event.implementation), _Cell())
                _apply(event, cell, worker, is_base=started.plan.is_base(event.implementation))
            case VisitFinished():
                _distribute(event, cells, started.plan)
            case RunStarted() | RunFinished() | CeilingsMeasured() | BaselineAccepted():
                pass
    workloads = {workload.id: workload for workload in started.plan.workloads}
    order = {workload: place for place, workload in enumerate(workloads)}
    for (workload, implementation), cell in sorted(cells.items(), key=lambda item: order.get(item[0][0], -1)):
        if cell.status is None or workload not in workloads:
            continue
        yield Record(
            run=started.run,
            time=cell.time or started.time,
            commit=started.commit_of(implementation),
            workload=workloads[workload],
            implementation=implementation,
            environment=cell.environment,
            status=cell.status,
            message=cell.message,
            is_predicted=cell.is_predicted,
            agreement=cell.agreement,
            executed_flops=cell.executed_flops,
            operators=cell.operators,
            measurements=tuple(_measurements(cell)) if cell.status is Status.ok else (),
        )


def _apply(
    event: CellChecked | CellProfiled | CellMeasured | CellFailed,
    cell: _Cell,
    worker: WorkerStarted | None,
    *,
    is_base: bool,
) -> None:
    if isinstance(event, CellMeasured):
        cell.measured[event.measurement.metric] = event.measurement
        return
    if isinstance(event, CellProfiled):
        cell.operators = event.operators
        if event.operators.fallback:
            cell.status, cell.message = Status.fallback, event.operators.fallback
        return
    cell.status, cell.message = event.status, event.message
    if isinstance(event, CellChecked):
        cell.is_predicted, cell.agreement = event.is_predicted, event.agreement
        cell.executed_flops = event.executed_flops
    if worker is not None:
        own = worker.base if is_base else None
        cell.environment, cell.time = own or worker.environment, worker.time


def _distribute(event: VisitFinished, cells: dict[tuple[str, str], _Cell], plan: Plan) -> None:
    """Give each arm's samples to its cell; a twin's go to its baseline's cell under a metric of their own."""
    for arm, samples in event.arms.items():
        if arm == CANARY:
            continue
        owner = plan.owner(arm)
        metric = "latency" if owner == arm else "latency_twin"
        cell = cells.setdefault((event.workload, owner), _Cell())
        cell.samples.setdefault(metric, []).extend(samples)


def _measurements(cell: _Cell) -> Iterator[Measurement]:
    for metric, samples in cell.samples.items():
        yield Measurement(metric=metric, unit="s", samples=tuple(samples))
    yield from cell.measured.values()
