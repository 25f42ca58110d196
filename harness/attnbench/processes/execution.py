"""Execute a plan: open its journal and its worker, go through the stages, and close both."""

import os
import secrets
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path

from attnbench.devices import counters
from attnbench.processes.checkout import current_commit
from attnbench.processes.isolation import SIDES_FOLDER, harness_folder, side_folders
from attnbench.processes.paired_client import PairedClient
from attnbench.processes.session import Session, Watch, now
from attnbench.processes.stages import check_cells, measure_ceilings, observe_cells, trace_cells
from attnbench.processes.timing_stage import TimingStage
from attnbench.processes.worker_client import ProcessClient, WorkerClient
from attnbench.storage.events import ALLOCATORS, SCHEMA, Plan, RunFinished, RunStarted, Side
from attnbench.storage.journal import JOURNAL, Journal, events
from attnbench.storage.records import LATENCY, Counters
from attnbench.timing.state import State

STAGES = ("check", "operators", "metrics", "ceilings", "time")
"""The stages of a run. Operators and metrics are read together, cell by cell; "trace" is a stage of its own kind."""
SHORT_SPIN = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}
"""Where two workers take turns: threads that wait for work spin for a millisecond at most, as between the operators of
a call, and then sleep, so that they take none of the other's cores."""


def execute(  # noqa: PLR0913 - all but the first three have defaults that serve
    plan: Plan,
    folder: Path,
    watch: Watch,
    stages: Collection[str] = STAGES,
    *,
    client: WorkerClient | None = None,
    clock: Callable[[], float] = time.monotonic,
    read_counters: Callable[[], Counters | None] = counters.read,
) -> None:
    """Start a run in `folder`, or go on with the one that is there, to its end.

    `client`, `clock` and `read_counters` are a worker process's and the machine's unless others are given, as in
    studies/simulated.

    Raises:
        ValueError: the folder cannot be written, its journal is damaged, or no worker can start.
    """
    state, path = State(), folder / JOURNAL
    earlier = list(events(path)) if path.exists() else []
    for event in earlier:
        state.apply(event)
    with Journal(folder) as journal, client or client_for(plan, folder) as worker:
        session = Session(plan, journal, worker, watch, clock, read_counters, state)
        if not earlier:
            session.record(RunStarted(schema=SCHEMA, run=folder.name, time=now(), commit=current_commit(), plan=plan))
        session.start_worker()
        if "check" in stages:
            check_cells(session)
        if "operators" in stages or "metrics" in stages:
            read = [metric for metric in plan.metrics if metric != LATENCY and "metrics" in stages]
            observe_cells(session, read, with_operators="operators" in stages)
        if "ceilings" in stages and LATENCY in plan.metrics:
            measure_ceilings(session)
        if "trace" in stages:
            trace_cells(session, folder)
        reason = TimingStage(session).run() if "time" in stages and LATENCY in plan.metrics else ""
        finished = RunFinished(time=now(), elapsed_s=session.elapsed_s, reason=reason, counters=read_counters())
        session.record(finished)


def client_for(plan: Plan, folder: Path) -> WorkerClient:
    """The worker of a run, which prints into its folder; two of them where the sides have processes of their own."""
    settings = ALLOCATORS[plan.allocator]
    if plan.sides is None or not plan.sides.is_apart:
        return ProcessClient(folder / "worker.log", plan.timeout_s, settings)
    spin = {name: value for name, value in SHORT_SPIN.items() if name not in os.environ}
    below = folder / SIDES_FOLDER
    ours = harness_folder(below / "modules")

    def client(side: Side, name: str) -> ProcessClient:
        own = side_folders(side, below / f"{name}_modules")
        log = folder / f"{name}.log"
        return ProcessClient(log, plan.timeout_s, {**spin, **settings}, python=side.python, folders=[ours, *own])

    return PairedClient(client(plan.sides.base, "worker_base"), client(plan.sides.candidate, "worker"), plan.seed)


def new_folder(results: Path, sweep: str) -> Path:
    """A new run's folder below `results`; its name begins with the time, so that names sort by age."""
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return results / "runs" / f"{moment}-{sweep}-{secrets.token_hex(2)}"
