"""Read a run back and judge it: its records, disturbed blocks, and impossible times.

The journal has raw samples only (storage/journal.py), so that old runs are judged by today's rules.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from attnbench.analysis.sanity import SystemLoad, flag_impossible_times, slowdown_warnings, system_load, throttled_by
from attnbench.analysis.warned import Warned
from attnbench.plugins import is_dense
from attnbench.statistics.interference import InterferenceGauge
from attnbench.statistics.intervals import Block
from attnbench.storage import events
from attnbench.storage.events import DamagedError, Plan
from attnbench.storage.fold import State
from attnbench.storage.journal import fold, journal_of
from attnbench.storage.records import (
    LATENCY,
    Ceilings,
    Environment,
    HardwareKey,
    Key,
    Measurement,
    Record,
    Status,
)

LOST = "which {} lines or gaps were left out: a failure may have been among them"
"""End of the warnings about a run whose journal was damaged; {} is the number of lines and gaps."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Results:
    """One run as read from its journal: its plan, its records in the plan's order, and whether it finished.

    Values derived from a `Results` are cached by its identity (`lru_cache`), so do not modify its fields.
    """

    folder: Path
    started: events.RunStarted
    records: tuple[Record, ...]
    elapsed_s: float | None  # None: killed, or still running
    num_visits: dict[str, int]  # visits (short series of timed blocks), by workload id
    num_blocks: int = 0  # blocks with an interference probe, a fixed computation that shows disturbances
    discarded: dict[str, frozenset[Block]] = field(default_factory=dict)  # disturbed blocks, by workload id
    reason: str = ""  # why timing ended
    ceilings: dict[tuple[str, HardwareKey], Ceilings] = field(default_factory=dict)  # by host name and hardware
    warnings: dict[Key, tuple[Warned, ...]] = field(default_factory=dict)  # warnings about suspicious times
    system_load: SystemLoad | None = None  # load from other work during the run
    throttled: Mapping[str, int] = field(default_factory=dict)  # bits of the driver's reasons, by workload id
    accepted: tuple[events.BaselineAccepted, ...] = ()  # in a stored baseline: its acceptance and earlier ones
    num_restored: int = 0  # times that another process changed the journal while the run was active
    num_lost: int = 0  # lines lost from a damaged journal, as far as they can be counted

    def is_gathered(self, record: Record) -> bool:
        """Return whether the harness gathers the keys of a cell from their pages before its call."""
        return bool(record.workload.page_size) and is_dense(self.plan.specs[record.arm])

    @property
    def run(self) -> str:
        """The run's name."""
        return self.started.run

    @property
    def plan(self) -> Plan:
        """The plan of the run."""
        return self.started.plan

    @property
    def num_discarded(self) -> int:
        """Number of blocks discarded because of interference."""
        return sum(map(len, self.discarded.values()))

    @property
    def num_left_out(self) -> int:
        """Number of requested cells that a finished run left out, usually for lack of time; 0 in an unfinished run."""
        unasked = set(self.plan.unasked)
        concluded = sum(record.workload.id not in unasked for record in self.records)
        return 0 if self.elapsed_s is None else self.plan.num_cells - concluded

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts that measured the cells, in the order of the records; empty for a single machine."""
        return tuple(dict.fromkeys(record.host for record in self.records if record.host))

    @property
    def environments(self) -> dict[str, Environment]:
        """Environments of the records by fingerprint, in the order of the records; several if the machine changed."""
        known = (record.environment for record in self.records if record.environment is not None)
        return {environment.fingerprint: environment for environment in known}


def read(path: Path) -> Results:
    """Read the run at `path`: its folder or its journal.

    Raises:
        ValueError: there is no journal.
        DamagedError: the journal is damaged, empty, or of a newer schema.
    """
    return judge(path if path.is_dir() else path.parent, fold(journal_of(path)))


def judge(folder: Path, state: State) -> Results:
    """Derive the results of the run in `folder` from its state, by today's rules.

    Raises:
        DamagedError: the state has no run.
    """
    if (started := state.started) is None:
        raise DamagedError(f"{folder} holds no run: the first line of its journal is not run_started")
    records, finished = tuple(_records(state, started)), state.finished
    is_cold = started.plan.cache != "warm"
    gauge = InterferenceGauge()
    discarded = gauge.follow(state.probes)
    slow = {workload: tuple(slowdown_warnings(visits)) for workload, visits in state.devices.items()}
    records, warnings = flag_impossible_times(records, state.ceilings, slow, is_cold=is_cold)
    return Results(
        folder=folder,
        started=started,
        records=records,
        elapsed_s=finished.elapsed_s if finished is not None else None,
        num_visits=dict(Counter(visit.workload for visit in state.probes)),
        num_blocks=gauge.num_blocks,
        discarded={name: frozenset(blocks) for name, blocks in discarded.items()},
        reason=finished.reason if finished is not None else "",
        ceilings=state.ceilings,
        warnings=warnings,
        system_load=system_load(state.history, state.timing_workers),
        throttled={workload: throttled_by(visits) for workload, visits in state.devices.items()},
        accepted=tuple(state.accepted),
        num_restored=state.num_restored,
        num_lost=state.num_lost,
    )


def _records(state: State, started: events.RunStarted) -> Iterator[Record]:
    """Yield a record for each finished cell, in the plan's order."""
    order = {workload.id: place for place, workload in enumerate(started.plan.workloads)}
    for key, status in sorted(state.status.items(), key=lambda item: order[item[0][0]]):
        workload, arm = key
        fields = {"environment": None, "time": started.time, **state.cells[key]}
        measurements = (*_times(state, key), *fields.pop("measurements", ()))
        yield Record(
            run=started.run,
            commit=started.commit if started.plan.sides is None else getattr(started.plan.sides, arm.side).commit,
            workload=started.plan.workloads[order[workload]],
            implementation=arm.implementation,
            side=arm.side,
            status=status,
            measurements=measurements if status is Status.ok else (),
            **fields,
        )


def _times(state: State, key: Key) -> Iterator[Measurement]:
    """Yield the times of a cell as one measurement; nothing without samples."""
    workload, arm = key
    if samples := state.samples.get(workload, {}).get(arm):
        yield Measurement(metric=LATENCY, unit="s", samples=samples)
