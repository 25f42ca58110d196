"""Execute a plan: a session with a journal and a worker runs the stages.

Every step is on disk as an event before the next one begins, so that a run can be killed at any moment and resumed.
Each stage works on the session, and skips work that the journal already holds.
"""

import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attnbench.devices import read_counters
from attnbench.processes import messages
from attnbench.processes.choosing import Search, shortlist
from attnbench.processes.runners import SHARED, Runners
from attnbench.processes.sides import SIDES_FOLDER, current_commit, harness_folder, side_folders
from attnbench.processes.stages import (
    Session,
    Timing,
    Watch,
    check,
    measure_ceilings,
    measure_kept_memory,
    now,
    observe,
    trace,
)
from attnbench.processes.worker_client import ProcessClient, Template, WorkerClient, patience
from attnbench.storage import events
from attnbench.storage.events import ALLOCATORS, SCHEMA, Plan
from attnbench.storage.fold import State
from attnbench.storage.journal import JOURNAL, Journal, fold
from attnbench.storage.records import BASE, CANDIDATE, LATENCY, Counters
from attnbench.timing.schedule import Choice, Race, Strategy

STAGES = ("check", "operators", "metrics", "ceilings", "time")
"""The stages of a run. Operators and metrics are read together, cell by cell; "trace" is used by traces only.

A plan may have further stages: "shortlist", "choose" and "search" look for the fastest, and for crossovers.
"""
SHORT_SPIN = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}
"""Set if two workers take turns: waiting threads spin for at most a millisecond, as between the operators of a call,
and then sleep, so that they leave the cores to the other worker."""
SLOW_IMPORTS = dict.fromkeys(("transformers_eager", "transformers_sdpa"), "transformers.modeling_utils")
"""Bundled implementations with slow packages: the template imports these for fresh processes."""

INTERPRETED = {"TRITON_INTERPRET": "1"}
"""Environment variable of a worker that interprets Triton's kernels; Triton reads it at import. Source:
https://triton-lang.org/main/programming-guide/chapter-3/debugging.html"""


def execute(  # noqa: PLR0913 - all but the first three have useful defaults
    plan: Plan,
    folder: Path,
    watch: Watch,
    stages: Collection[str] = STAGES,
    *,
    stops_when_wrong: bool = False,
    template: Template | None = None,
    client: WorkerClient | None = None,
    clock: Callable[[], float] = time.monotonic,
    read_counters: Callable[[], Counters | None] = read_counters,
) -> None:
    """Start a run in `folder`, or continue the one there, to its end.

    With `stops_when_wrong`, workloads are checked in order of information per time, and an implementation is not
    checked further once it is wrong. The stages of the plan, if any, run before `stages`. Workers are forked from
    `template`, if set. `client`, `clock` and `read_counters` default to a worker process and the machine;
    studies/simulated replaces them.

    Raises:
        ValueError: the folder cannot be written, its journal is damaged, no worker can start, or Triton's interpreter
            would be timed.
    """
    if "time" in (plan.stages or stages) and LATENCY in plan.metrics:
        refuse_interpreted(plan)
    path = folder / JOURNAL
    state = fold(path) if path.exists() else State()
    client = client or client_for(plan, folder, template)
    with Journal(folder, keeps_copy=bool(plan.alone)) as journal, client as worker:
        session = Session(plan, journal, worker, watch, clock, read_counters, state)
        if state.started is None:
            session.record(
                events.RunStarted(schema=SCHEMA, run=folder.name, time=now(), commit=current_commit(), plan=plan)
            )
        session.start_worker()
        reason = _run_stages(session, plan.stages or stages, folder, stops_when_wrong=stops_when_wrong)
        finished = events.RunFinished(time=now(), elapsed_s=session.elapsed_s, reason=reason, counters=read_counters())
        session.record(finished)


def _run_stages(session: Session, names: Collection[str], folder: Path, *, stops_when_wrong: bool) -> str:
    """Run the stages with these names; return why checks or timing ended early, or ""."""
    plan, reason = session.plan, ""
    if "shortlist" in names:
        shortlist(session)
    if "check" in names:
        reason = check(session, stops_when_wrong=stops_when_wrong)
    if "check" in names and "trace" not in names:
        measure_kept_memory(session)
    if "operators" in names or "metrics" in names:
        metrics = [metric for metric in plan.metrics if metric != LATENCY and "metrics" in names]
        observe(session, metrics, with_operators="operators" in names)
    if "ceilings" in names and LATENCY in plan.metrics:
        measure_ceilings(session)
    if "trace" in names:
        trace(session, folder)
    strategies: dict[str, Strategy] = {"time": Race(plan), "choose": Choice(plan), "search": Search(session)}
    for name, strategy in strategies.items():
        if name in names and LATENCY in plan.metrics:
            reason = Timing(session, name).run(strategy)
    return reason


def refuse_interpreted(plan: Plan) -> None:
    """Refuse to time Triton's interpreter.

    Raises:
        ValueError: the plan or the environment enables the interpreter.
    """
    if plan.is_interpreted or INTERPRETED.items() <= os.environ.items():
        raise ValueError(
            "the times of Triton's interpreter say nothing of a kernel: check it with attnbench check --interpret, "
            "and time it on a GPU, without TRITON_INTERPRET=1 in the environment"
        )


@contextmanager
def checking_template(folder: Path, timeout_s: float, *, is_interpreted: bool = False) -> Iterator[Template]:
    """A template for checks, which begins its imports now. Checks time nothing, so one environment serves all plans."""
    settings = patience(timeout_s) | ALLOCATORS["retain"] | (INTERPRETED if is_interpreted else {})
    with closing(Template(folder / "worker.log", settings)) as template:
        template.start()
        yield template


def client_for(plan: Plan, folder: Path, template: Template | None = None) -> WorkerClient:
    """The worker of a run, which prints into its folder; several workers if the arms need separate processes."""
    settings = ALLOCATORS[plan.allocator] | (INTERPRETED if plan.is_interpreted else {})
    slow = {SLOW_IMPORTS.get(spec, "") for spec in plan.specs.values()} - {""}
    if slow and LATENCY in plan.metrics:
        settings = settings | {messages.PRELOADED: ",".join(sorted(slow))}
    if plan.has_runners:
        settings = {name: value for name, value in SHORT_SPIN.items() if name not in os.environ} | settings
    if plan.sides is None or not plan.has_runners:
        shared = ProcessClient(folder / "worker.log", plan.timeout_s, settings, template=template)
        return Runners({SHARED: shared}, plan.runner) if plan.has_runners else shared
    clients: dict[str, ProcessClient] = {}
    for name, side in ((BASE, plan.sides.base), (CANDIDATE, plan.sides.candidate)):
        log = folder / ("worker.log" if name == CANDIDATE else "worker_base.log")
        home = harness_folder(folder / SIDES_FOLDER / "modules")
        where: dict[str, Any] = {"python": side.python, "home": home, "folders": side_folders(side)}
        clients[name] = ProcessClient(log, plan.timeout_s, settings, **where)
    return Runners(clients, plan.runner, seed=plan.seed)


def new_folder(results: Path, sweep: str, kind: str = "runs") -> Path:
    """The folder of a new run below `results`/`kind`; its name begins with the time, so that names sort by age."""
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return results / kind / f"{moment}-{sweep}-{secrets.token_hex(2)}"
