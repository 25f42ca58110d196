"""A run in progress: plan, journal, worker, state and clock. The stages (stages.py, timing_stage.py) work on it.

Every step is an event on disk before the next begins, so that a run can be killed at any moment and resumed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from attnbench import plugins
from attnbench.devices import counters
from attnbench.processes.messages import Failed, Reply, SampleBlocks, Work
from attnbench.processes.worker_client import WorkerClient, WorkerLostError
from attnbench.storage.events import Event, Plan, WorkerStarted
from attnbench.storage.journal import Journal
from attnbench.storage.records import PROBE, Arm, Counters
from attnbench.timing.state import State
from attnbench.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is, for whoever watches it."""

    stage: str  # check, observe, ceilings, time or trace
    cell: str
    done: float  # of `total`, in the stage
    total: float
    counts: dict[str, int]  # cells by status
    left_s: float | None


Watch = Callable[[Progress], None]


@dataclass
class Session:
    """One run in progress. What it has done so far is in `state`, which follows from the journal alone."""

    plan: Plan
    journal: Journal
    client: WorkerClient
    watch: Watch
    clock: Callable[[], float] = time.monotonic
    read_counters: Callable[[], Counters | None] = counters.read
    state: State = field(default_factory=State)

    def __post_init__(self) -> None:
        """Begin now; `earlier_s` is what the run had spent before it was resumed, as far as its journal says."""
        self.specs: dict[Arm, str] = self.plan.specs
        self.earlier_s = self.state.spent_s
        self._start = self._stage_start = self.clock()
        self._stage = ""

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run has taken so far."""
        return self.earlier_s + self.clock() - self._start

    @property
    def cells(self) -> list[tuple[Workload, Arm]]:
        """Every cell of the plan, workload by workload."""
        return [(workload, arm) for workload in self.plan.workloads for arm in self.specs]

    @property
    def live_cells(self) -> list[tuple[Workload, Arm]]:
        """Those that have passed so far."""
        return [(workload, arm) for workload, arm in self.cells if self.state.live(workload.id, [arm])]

    def record(self, event: Event) -> None:
        """Write an event to the journal, and apply it to the state."""
        self.journal.append(event)
        self.state.apply(event)

    def start_worker(self) -> None:
        """Start a fresh worker process, with the code and in the environment that the run began with.

        Raises:
            ValueError: it cannot start, or the code or the environment is no longer the same.
        """
        for spec, digest in self.plan.digests.items():
            if plugins.digest(spec) != digest:
                raise ValueError(
                    f"{spec} has changed since the run began, so that its check no longer holds: start a new run"
                )
        before = self.read_counters()
        reply = self.client.start(self.state.num_workers)
        started = WorkerStarted(
            time=now(), environment=reply.environment, base=reply.base, before=before, counters=self.read_counters()
        )
        began = self.state.began or started
        for first, here in ((began.environment, started.environment), (began.base, started.base)):
            if first is not None and here is not None and first.fingerprint != here.fingerprint:
                there = f"fingerprint {first.fingerprint}, and here it is {here.fingerprint}"
                raise ValueError(f"the run began in another environment ({there}): start a new run")
        self.record(started)

    def require_worker(self) -> None:
        """Start a worker where none is running."""
        if not self.client.is_running:
            self.start_worker()

    def ask(self, request: Work) -> Reply:
        """The worker's answer; where the worker is lost, Failed at the arm that it was trying."""
        self.require_worker()
        try:
            return self.client.ask(request)
        except WorkerLostError as lost:
            arms = request.arms if isinstance(request, SampleBlocks) else ()
            arm = arms[lost.arm][0] if lost.arm < len(arms) else PROBE
            return Failed(arm=arm, status=lost.status, message=str(lost))

    def show_progress(self, stage: str, cell: str, done: float, total: float) -> None:
        """Call the watcher. The time left is what the stage's pace says, or the rest of the budget if that is more."""
        spent_s = self.clock() - self._stage_start if self._stage == stage else 0.0
        if self._stage != stage:
            self._stage, self._stage_start = stage, self.clock()
        pace_s = spent_s / done * (total - done) if done and spent_s else 0.0
        left_s = max(pace_s, self.plan.budget_s - self.elapsed_s, 0.0) or None
        counts = {str(status): number for status, number in self.state.counts.items() if number}
        self.watch(Progress(stage=stage, cell=cell, done=done, total=total, counts=counts, left_s=left_s))


def now() -> str:
    """This moment in UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
