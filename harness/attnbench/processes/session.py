"""The walk of a run: check each cell, see what runs in it, read its metrics, find ceilings, time; all into the journal.

Every step is an event on disk before the next begins, so that a run can be killed at any moment and resumed.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attnbench import plugins
from attnbench.devices import counters
from attnbench.processes.ceilings_stage import find_ceilings
from attnbench.processes.messages import Check, Checked, Failed, Observe, Observed, Profile, Profiled, Ready, Reply
from attnbench.processes.paired_client import apart
from attnbench.processes.revision import commit
from attnbench.processes.timing_stage import Timing
from attnbench.processes.worker_client import Crew, WorkerLostError
from attnbench.storage.events import (
    ALLOCATORS,
    SCHEMA,
    CellChecked,
    CellFailed,
    CellMeasured,
    CellProfiled,
    Event,
    Plan,
    RunFinished,
    RunStarted,
    WorkerStarted,
)
from attnbench.storage.journal import JOURNAL, Journal, events
from attnbench.storage.records import Arm, Counters
from attnbench.timing.state import State
from attnbench.workloads.workload import Workload

STAGES = ("check", "operators", "metrics", "ceilings", "time")
"""What `execute` may be asked for; operators and metrics are read together, cell by cell."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands, for those who watch."""

    stage: str  # check, observe, ceilings or time
    cell: str
    done: float  # of `total`, in the stage
    total: float
    counts: dict[str, int]  # cells by status
    left_s: float | None


Watch = Callable[[Progress], None]
Cell = dict[str, Any]
"""What names a cell in an event."""


class Run:
    """One run at work: plan, journal, worker and state."""

    def __init__(  # noqa: PLR0913 - the last two are the machine's unless others are given
        self,
        plan: Plan,
        journal: Journal,
        crew: Crew,
        watch: Watch,
        *,
        clock: Callable[[], float] = time.monotonic,
        count: Callable[[], Counters | None] = counters.read,
    ) -> None:
        """Begin with nothing done."""
        self.plan = plan
        self.journal = journal
        self.crew = crew
        self.watch = watch
        self.state = State()
        self.specs = plan.specs
        self.clock, self.count = clock, count
        self.start = clock()
        self.stage, self.stage_start = "", self.start
        self.earlier_s = 0.0  # what it had spent, as far as its journal tells

    def note(self, event: Event) -> None:
        """Journal an event, and take note of it."""
        self.journal.append(event)
        self.state.apply(event)

    def fresh_worker(self) -> Ready:
        """A new process takes up the work, with the code and in the environment that the run began with.

        Raises:
            ValueError: it cannot start, or the code or the environment is no longer the same.
        """
        _require_same_sources(self.plan)
        before = self.count()
        ready = self.crew.hello(self.state.num_workers)
        started = WorkerStarted(
            time=now(), environment=ready.environment, base=ready.base, before=before, counters=self.count()
        )
        _require_same_machine(self.state.began or started, started)
        self.note(started)
        return ready

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run has taken so far."""
        return self.earlier_s + self.clock() - self.start

    def tell(self, stage: str, cell: str, done: float, total: float) -> None:
        """Tell the watcher; the time left is what the stage's pace says, or the rest of the budget if that is more."""
        spent_s = self.clock() - self.stage_start if self.stage == stage else 0.0
        if self.stage != stage:
            self.stage, self.stage_start = stage, self.clock()
        pace_s = spent_s / done * (total - done) if done and spent_s else 0.0
        left_s = max(pace_s, self.plan.budget_s - self.elapsed_s)
        counts = {status: number for status, number in self.state.counts.items() if number}
        told = left_s if left_s > 0 else None
        self.watch(Progress(stage=stage, cell=cell, done=done, total=total, counts=counts, left_s=told))

    def check_all(self) -> None:
        """Bring every cell to a status."""
        cells = [(workload, arm) for workload in self.plan.workloads for arm in self.specs]
        for number, (workload, arm) in enumerate(cells):
            if (workload.id, arm) in self.state.status:
                continue
            self.tell("check", f"{arm} on {workload.id}", number, len(cells))
            self.note(self.check(workload, arm))
        self.tell("check", "", len(cells), len(cells))

    def check(self, workload: Workload, arm: Arm) -> CellChecked:
        """The outcome of one check, whatever becomes of the worker."""
        if not self.crew.is_at_work:
            self.fresh_worker()
        request = Check(
            workload=workload,
            spec=self.specs[arm],
            side=arm.side,
            call_limit_s=self.plan.call_limit_s,
            memory_limit_bytes=self.plan.memory_limit_bytes,
            seed=self.plan.seed,
        )
        try:
            reply = self.crew.ask(request)
        except WorkerLostError as lost:
            reply = Checked(status=lost.status, message=str(lost))
        assert isinstance(reply, Checked)
        return CellChecked(
            workload=workload.id,
            implementation=arm.implementation,
            side=arm.side,
            status=reply.status,
            message=reply.message,
            is_predicted=reply.is_predicted,
            agreement=reply.agreement,
            check_s=reply.check_s,
            executed_flops=reply.executed_flops,
        )

    def profile(self, workload: Workload, arm: Arm) -> CellProfiled | CellFailed:
        """What ran in one cell, or how the cell failed."""
        cell: Cell = {"workload": workload.id, "implementation": arm.implementation, "side": arm.side}
        reply = self.ask(Profile(workload=workload, spec=self.specs[arm], side=arm.side))
        if isinstance(reply, Failed):
            return CellFailed(**cell, status=reply.status, message=reply.message)
        assert isinstance(reply, Profiled)
        return CellProfiled(**cell, operators=reply.operators)

    def ask(self, request: Profile | Observe) -> Reply:
        """The answer, whatever becomes of the worker."""
        if not self.crew.is_at_work:
            self.fresh_worker()
        try:
            return self.crew.ask(request)
        except WorkerLostError as lost:
            return Failed(status=lost.status, message=str(lost))

    def observe_all(self, metrics: Sequence[str], *, sees_operators: bool) -> None:
        """See what runs in each live cell, and read each metric that has a pass of its own, cell by cell.

        One after the other of the same cell, since both are read from one recorded call where the device allows it.
        """
        known = plugins.plugs("attnbench.metrics", "METRIC")
        cells = [(workload, arm) for workload in self.plan.workloads for arm in self.specs]
        cells = [(workload, arm) for workload, arm in cells if self.state.live(workload.id, [arm])]
        for number, (workload, arm) in enumerate(cells):
            if sees_operators and (workload.id, arm) not in self.state.profiled:
                self.tell("observe", f"operators of {arm} on {workload.id}", number, len(cells))
                self.note(self.profile(workload, arm))
            for metric in metrics:
                is_known = ((workload.id, arm), metric) in self.state.observed or not known[metric].fits(workload)
                if not is_known and self.state.live(workload.id, [arm]):
                    self.tell("observe", f"{metric} of {arm} on {workload.id}", number, len(cells))
                    self.note(self.observe(workload, arm, metric))

    def observe(self, workload: Workload, arm: Arm, metric: str) -> CellMeasured | CellFailed:
        """One metric of one cell, or how the cell failed."""
        cell: Cell = {"workload": workload.id, "implementation": arm.implementation, "side": arm.side}
        reply = self.ask(Observe(workload=workload, spec=self.specs[arm], side=arm.side, metric=metric))
        if isinstance(reply, Failed):
            return CellFailed(**cell, status=reply.status, message=reply.message)
        assert isinstance(reply, Observed)
        return CellMeasured(**cell, measurement=reply.measurement)


def _require_same_sources(plan: Plan) -> None:
    """Raises ValueError where a file that is measured has changed: its check would no longer hold."""
    for spec, digest in plan.digests.items():
        if plugins.digest(spec) != digest:
            raise ValueError(
                f"{spec} has changed since the run began, so that its check no longer holds: start a new run"
            )


def _require_same_machine(began: WorkerStarted, now: WorkerStarted) -> None:
    """Raises ValueError where a run would go on in another environment than it began in, on either side."""
    for first, here in ((began.environment, now.environment), (began.base, now.base)):
        if first is not None and here is not None and first.fingerprint != here.fingerprint:
            there = f"fingerprint {first.fingerprint}, and here it is {here.fingerprint}"
            raise ValueError(f"the run began in another environment ({there}): start a new run")


def execute(  # noqa: PLR0913 - all but the first three have defaults that serve
    plan: Plan,
    folder: Path,
    watch: Watch,
    stages: Iterable[str] = STAGES,
    *,
    crew: Crew | None = None,
    clock: Callable[[], float] = time.monotonic,
    count: Callable[[], Counters | None] = counters.read,
) -> None:
    """Start a run in `folder`, or go on with the one that is there, to its end.

    `crew`, `clock` and `count` are a real worker's and the machine's unless others are given, as in studies/simulated.

    Raises:
        ValueError: the folder cannot be written, its journal is damaged, or no worker can start.
    """
    journal_path = folder / JOURNAL
    earlier = list(events(journal_path)) if journal_path.exists() else []
    with Journal(folder) as journal, crew or crew_of(plan, folder) as worker:
        run = Run(plan, journal, worker, watch, clock=clock, count=count)
        if not earlier:
            run.note(RunStarted(schema=SCHEMA, run=folder.name, time=now(), commit=commit(), plan=plan))
        for event in earlier:
            run.state.apply(event)
        run.earlier_s = run.state.spent_s
        run.fresh_worker()
        if "check" in stages:
            run.check_all()
        metrics = [metric for metric in plan.metrics if metric != "latency"] if "metrics" in stages else []
        run.observe_all(metrics, sees_operators="operators" in stages)
        if "ceilings" in stages and "latency" in plan.metrics:
            find_ceilings(run)
        timed = "time" in stages and "latency" in plan.metrics
        reason = Timing(run).time_all() if timed else ""
        run.note(RunFinished(time=now(), elapsed_s=run.elapsed_s, reason=reason, counters=run.count()))


def crew_of(plan: Plan, folder: Path) -> Crew:
    """The worker of a run, which prints into its folder; two of them where the sides have processes of their own."""
    settings = ALLOCATORS[plan.allocator]
    if plan.sides is not None and plan.sides.is_apart:
        return apart(plan, folder, settings)
    return Crew(folder / "worker.log", plan.timeout_s, settings)


def now() -> str:
    """This moment in UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def new_folder(results: Path, sweep: str) -> Path:
    """A new run's folder below `results`; its name begins with the time, so that names sort by age."""
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return results / "runs" / f"{moment}-{sweep}-{secrets.token_hex(2)}"
