"""Run a plan: `execute` runs the stages of a session, from the checks to the timing.

Every finished step is written to the journal before the next one begins, so a run can be killed at any moment and
resumed. Each stage skips work whose results are already in the journal.
"""

import copy
import math
import os
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import compress
from operator import not_
from pathlib import Path
from queue import SimpleQueue
from types import NoneType
from typing import Any

import msgspec

from attnbench import plugins
from attnbench.devices import containers, device, read_counters
from attnbench.processes import first_calls
from attnbench.processes.messages import KEEPS_ANSWERS, PRELOADED, Failed, FirstCalls, SampleBlocks, T, Target
from attnbench.processes.revisions import SIDES_FOLDER, current_commit, side_folders
from attnbench.processes.worker_client import ProcessClient, Template, WorkerClient, harness_folder
from attnbench.processes.worker_pool import SHARED, ByThreads, WorkerPool
from attnbench.statistics.crossover import Point, next_value, point
from attnbench.statistics.effects import numbers
from attnbench.statistics.interference import InterferenceGauge
from attnbench.statistics.intervals import by_process
from attnbench.statistics.verdict import LOOKS
from attnbench.storage import events
from attnbench.storage.events import ALLOCATORS, SCHEMA, SUSTAINED_S, Ladder, Plan, now
from attnbench.storage.fold import MEASUREMENT, PROFILE, State
from attnbench.storage.journal import Journal, Unstored
from attnbench.storage.records import (
    BASE,
    CANDIDATE,
    FIRST_CALL,
    FIRST_CALLS,
    KEPT,
    LATENCY,
    PROBE,
    Arm,
    Ceilings,
    Counters,
    Status,
)
from attnbench.timing import visits
from attnbench.timing.blocks import known
from attnbench.timing.schedule import (
    SPENT,
    Choice,
    Live,
    Race,
    Step,
    Strategy,
    load_libraries,
    run_strategy,
    visit_seed,
)
from attnbench.tracing import folders
from attnbench.workloads import covering
from attnbench.workloads.counts import score_matrix_bytes
from attnbench.workloads.workload import RANKS_TIMEOUT, Workload

STAGES = ("check", "operators", "metrics", "ceilings", "time")
"""The default stages of a run. Operators and metrics are read together, cell by cell.

A plan may name other stages: "choose" finds the fastest implementation, "search" finds the values of an axis at which
the faster of two implementations changes, and "trace" writes profiler traces.
"""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # environment variables for the number of threads
INTERPRETED = {"TRITON_INTERPRET": "1"}
"""Environment variable with which a worker runs Triton's kernels in Triton's interpreter; Triton reads it at import.
Source: https://triton-lang.org/main/programming-guide/chapter-3/debugging.html"""
SHORT_SPIN = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}
"""Environment variables of workers that check. Their idle OpenMP threads spin for at most about a millisecond, because
two processes, the judge and the one with the candidate, take turns on the same cores."""
RANKS_SHARE = 0.5
"""A call over several ranks gives up after this share of a step's timeout, so that its error can name the hanging rank
before the coordinator kills the process."""
SLOW_IMPORTS = dict.fromkeys(("transformers_eager", "transformers_sdpa"), "transformers.modeling_utils")
"""Modules that are slow to import, by the name of the bundled implementation that imports them. The template, from
which all workers are forked, imports them once."""
CEILINGS_SHARE = 0.02
CEILINGS_S = 1.0
"""Ceilings are the measured rates of matrix products and copies. Measuring those of one device, dtype and number of
threads takes at most CEILINGS_S seconds, and measuring all of them takes at most CEILINGS_SHARE of the budget; but
FEWEST_ROUNDS (devices/loads.py) are measured in any case."""
VERIFY_EVERY = 4
"""The outputs of timed calls are verified in a workload's first visit (a few timed blocks in one process), and then in
one of VERIFY_EVERY visits, because each fresh process must compute the right answers again, and this takes as long as
the timing. Every visit is verified if foreign code runs in the baseline's process, unless two states of the code are
compared."""
VARIES_IN_A_KIND = {"batch_size", "seq_len", "kv_len", "seed"}  # axes that may differ between workloads of one kind
FEWEST_TOKENS = 16
"""If `stops_when_wrong` is set, workloads with fewer keys or queries than this are checked last. With few keys, a mask
hides hardly anything; with few queries, different mistakes give similar errors."""
CHECK, MANY_ROWS, MANY_BLOCKS = "check", 512, 64
"""Name of the sweep `check`. Its workloads with more than MANY_ROWS queries and keys, or with a product of batch size
and number of heads above MANY_BLOCKS, are checked only on normally distributed inputs (`_has_many_rows`)."""
FEWEST_IN_TURN, NUM_TURNS = 40, 4
"""Fewest workloads of a check in which kinds of input take turns, and the number of these kinds (probes.IN_TURN)."""
WORKLOADS_OF_A_LANE = 20  # with fewer workloads in a lane (a thread of checks), a second lane is not worth its start
LANE_BYTES = 2**24  # largest score matrix with two lanes, in bytes: the oracle needs several copies of it in float64
CHECKS_SHARE, READINGS_SHARE = 0.5, 0.6
"""Shares of the budget: after the first, no more cells are checked; after the second, no more metrics and operators are
read. The rest is for timing."""
KNOWN_FROM = 0.1  # share of a stage's work after which its pace predicts the remaining time
SEE_FIRST = "it cannot be loaded: see its first cell"
FEWEST_FIRST = 2  # cells whose first calls are timed whatever the budget: one of the baseline, and another one
MOST_PROCESSES = LOOKS[2]  # a search visits one value of its axis in at most this many fresh processes
CALLS_AT_A_VALUE = 60
"""A search samples a value only if this many calls fit into the remaining time, including the calls of the check."""
LONGER_TURNS = 4  # samples of workers that take turns are about this many times as long as those in one process
SEARCHED = "every search came to its end"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run, as passed to the function that watches the run."""

    stage: str  # check, kept, observe, ceilings, time, choose, search or trace
    cell: str  # the work in progress, in words
    done: float  # completed part of `total` in the stage
    total: float
    counts: Mapping[str, int]  # number of cells by status
    left_s: float | None  # estimated seconds left; None: unknown
    wrong: str = ""  # the error, if the cell has just been found wrong


Watch = Callable[[Progress], None]


@dataclass
class Session:
    """One run in progress; `state` summarizes the events of its journal. Only checks use the second worker, `second`.

    The budget's clock starts when the first worker is ready, so the seconds for importing torch do not count.
    """

    plan: Plan
    folder: Path  # of the run
    journal: Journal | Unstored
    client: WorkerClient
    watch: Watch
    clock: Callable[[], float] = time.monotonic
    read_counters: Callable[[], Counters | None] = read_counters
    second: WorkerClient | None = None  # not yet entered as a context manager

    def __post_init__(self) -> None:
        """Start the clock at the seconds that the run has spent so far, according to the journal."""
        self.state = self.journal.state
        self.specs: dict[Arm, str] = self.plan.specs
        self.unloadable: dict[str, Failed] = {}  # why specs cannot be loaded
        self.told_unloadable: set[str] = set()  # specs of which a cell with that reason is recorded
        self._start, self.has_started = self.clock() - self.state.spent_s, False
        self.shown = Progress(stage="", cell="", done=0.0, total=0.0, counts={}, left_s=None)
        self._pace: tuple[str, float, float] = "", 0.0, 0.0  # the stage in progress, and at its start: time, work done

    @property
    def elapsed_s(self) -> float:
        """Seconds spent on the run, including the time before it was resumed."""
        return self.clock() - self._start

    @property
    def live_cells(self) -> list[tuple[Workload, Arm]]:
        """Cells (pairs of a workload and an arm) that have passed their check, workload by workload."""
        return [(workload, arm) for workload in self.plan.workloads for arm in self.state.live(workload.id, self.specs)]

    def limit_s(self, share: float) -> float:
        """Return the time limit in seconds of a stage before timing: `share` of the budget, from the start of the run.

        After this time, the stage leaves out the rest of its work. The limit is infinite if the run times nothing, or
        if the budget is 0.
        """
        return share * self.plan.budget_s if self.plan.budget_s and LATENCY in self.plan.metrics else math.inf

    def start_worker(self) -> None:
        """Start a fresh worker process; require that code and environment are the same as at the start of the run.

        Raises:
            ValueError: the worker cannot start, or the code or the environment has changed.
        """
        for spec, digest in self.plan.digests.items():
            if plugins.digest(spec) != digest:
                raise ValueError(f"{spec} has changed since the run began, so its check is obsolete: start a new run")
        before, start_s = self.read_counters(), self.clock()
        reply = self.client.start(self.state.num_workers)
        if not self.has_started:
            self._start += self.clock() - start_s
            self.has_started = True
        started = events.WorkerStarted(
            time=now(), environment=reply.environment, base=reply.base, before=before, counters=self.read_counters()
        )
        began = next((each for each in self.state.history if isinstance(each, events.WorkerStarted)), started)
        for first, here in ((began.environment, started.environment), (began.base, started.base)):
            if first is not None and here is not None and first.fingerprint != here.fingerprint:
                there = f"fingerprint {first.fingerprint}, and here it is {here.fingerprint}"
                raise ValueError(f"the run began in another environment ({there}): start a new run")
        self.journal.append(started)

    def require_worker(self) -> None:
        """Start a worker unless one is running."""
        if not self.client.is_running:
            self.start_worker()

    def ask(self, function: str, result: type[T], /, **arguments: Any) -> T | Failed:  # noqa: ANN401 - their types depend on the function
        """Call a function of the worker, which is started if necessary; return the result, or Failed.

        If the process ended by itself or memory ran out, the call is repeated once in a fresh process, because the
        cause may be gone; only a second failure counts. The names in an event about a cell are replaced by those of
        the requested cell. If the journal cannot accept an event, Failed is returned in its place.
        """
        self.require_worker()
        reply = self.client.ask(function, result, **arguments)
        if isinstance(reply, Failed) and (reply.is_lost or reply.is_full):
            if reply.is_full:  # stop all workers, since the others hold memory, too
                self.client.stop()
            self.require_worker()
            if "visit" in arguments:
                epoch = self.state.num_workers - 1
                arguments["visit"] = msgspec.structs.replace(arguments["visit"], epoch=epoch)
            reply = self.client.ask(function, result, **arguments)
        if isinstance(reply, events.CellEvent):
            reply = msgspec.structs.replace(reply, **arguments["cell"].names)
        if isinstance(reply, events.Event) and (problem := self.state.problem(reply)):
            return Failed(status=Status.invalid, message=f"its process sent an impossible result: {problem}")
        return reply

    def cell(self, workload: Workload, arm: Arm) -> Target:
        """Return what identifies one cell in a request: workload, arm (an implementation in a role) and spec."""
        return Target(workload=workload, arm=arm, spec=self.specs[arm])

    def record_failure(self, cell: Target, failed: Failed) -> None:
        """Record that a cell failed after it had passed its check."""
        self.journal.append(events.CellFailed(**cell.names, status=failed.status, message=failed.message))

    def show_progress(self, stage: str, cell: str, done: float, total: float) -> None:
        """Report progress to the watcher. The progress within a stage never decreases.

        The remaining time is the rest of the budget. Without a budget, it is an estimate for the stage, extrapolated
        from its pace after a tenth of its work.
        """
        if self._pace[0] != stage:
            self._pace = stage, self.clock(), done
        elif done < self.shown.done:
            done = self.shown.done
        _, start_s, before = self._pace
        left_s = max(0.0, self.plan.budget_s - self.elapsed_s) or None
        if self.plan.budget_s <= 0 and done - before >= KNOWN_FROM * (total - before) > 0:
            left_s = (self.clock() - start_s) / (done - before) * (total - done) or None
        counts = {str(status): number for status, number in dict(self.state.counts).items() if number}
        self.shown = Progress(stage=stage, cell=cell, done=done, total=total, counts=counts, left_s=left_s)
        self.watch(self.shown)


def check(session: Session, *, stops_when_wrong: bool = False) -> str:
    """Check every cell; return why some were left out, or "".

    If the run also times calls, no check starts after half of its budget, except on the first workload. Once an
    implementation has passed a workload in such a run, workloads that differ from it only in lengths, batch size or
    seed are checked only on normally distributed inputs, and without rules (tests of single properties of attention).

    If `stops_when_wrong` is set, an implementation is checked until its first wrong answer, workloads with few keys or
    queries come last, checks end with the budget, and some kinds of input take turns (`_turns`). In the sweep `check`,
    large workloads (`_has_many_rows`) are checked only on normally distributed inputs.

    If the session has a second worker, two threads (lanes) check at the same time. They write the same records as one
    lane, unless the code keeps state between calls. For this, each rule is tried in one lane only, and if
    `stops_when_wrong` is set, results of an implementation after its first wrong one are dropped.
    """
    plan, status = session.plan, session.state.status
    workloads = _shortest_last(plan.asked) if stops_when_wrong else plan.asked
    is_brief_allowed = LATENCY in plan.metrics and not stops_when_wrong
    turns = _turns(plan) if stops_when_wrong else {}
    every_cell = [(workload.id, arm) for workload in workloads for arm in plan.cells(workload)]
    places = {cell: place for place, cell in enumerate(every_cell)}
    first_wrong = {arm: -1 for (_, arm), found in status.items() if found is Status.disagrees}
    passed: set[tuple[Arm, frozenset[tuple[str, object]]]] = set()
    told = {*first_wrong}
    held = dict[int, events.CellChecked | None]()  # new results by the cell's index in `every_cell`; None: not checked
    limit_s = (plan.budget_s if stops_when_wrong else session.limit_s(CHECKS_SHARE)) or math.inf
    concluded = {place for cell, place in places.items() if cell in status}

    def checked(lane: Session, mine: Iterable[Workload]) -> Iterator[None]:
        """Check the cells of `mine` with the lane's worker; put each result, or None, into `held`, and yield."""
        for workload in mine:
            for arm in plan.cells(workload):
                place, found, reply = places[workload.id, arm], status.get((workload.id, arm)), None
                is_due = not stops_when_wrong or place < first_wrong.get(arm, math.inf)
                is_in_time = session.elapsed_s < limit_s or (is_brief_allowed and workload is workloads[0])
                if found is None and is_due and is_in_time:
                    session.show_progress("check", f"{arm} on {workload.id}", len(concluded), len(places))
                    is_known = is_brief_allowed and (arm, _kind(workload)) in passed
                    is_brief = is_known or (plan.sweep == CHECK and _has_many_rows(workload))
                    reply = ask_cell(lane, workload, arm, is_brief=is_brief, turn=turns.get(workload.id))
                    found = reply.status
                if found is Status.disagrees:
                    first_wrong[arm] = min(place, first_wrong.get(arm, place))
                elif found is Status.ok:
                    passed.add((arm, _kind(workload)))
                held[place] = reply
                concluded.add(place)
                yield

    def record(reply: events.CellChecked | None) -> None:
        if reply is not None and not (stops_when_wrong and reply.key[1] in told):
            told.update({reply.key[1]} if reply.status is Status.disagrees else ())
            record_check(session, reply)

    _record_in_order(in_lanes(session, checked, workloads), held, record)
    if left := [cell for cell in places if cell not in status and not (stops_when_wrong and cell[1] in told)]:
        return f"{len(left)} of {len(places)} cells were not reached in {min(limit_s, plan.budget_s):g} s"
    session.show_progress("check", "", len(places), len(places))
    return ""


def _turns(plan: Plan) -> dict[str, int]:
    """Return, by workload id, the number of the one kind of input of probes.IN_TURN on which the workload is checked.

    In a long sweep `check`, these kinds take turns, because every kind would take an eighth more time. In any other
    check, the result is empty. Each pair of values of two axes meets each kind (see `covering.turns`), as far as there
    are enough workloads. Workloads whose mask or dtype occurs fewer than NUM_TURNS times are not in the result:
    they are checked on every kind. So is a workload once its answer is wrong (checking/agreement.py).
    """
    if plan.sweep != CHECK or len(plan.asked) < FEWEST_IN_TURN:
        return {}
    axes = {workload.id: workload.axes() for workload in plan.asked}
    uses = Counter(each[name] for each in axes.values() for name in ("mask", "dtype"))
    often = {name: each for name, each in axes.items() if min(uses[each["mask"]], uses[each["dtype"]]) >= NUM_TURNS}
    turns = covering.turns([*often.values()], NUM_TURNS)
    return dict(zip(often, turns, strict=True))


def _shortest_last(workloads: Sequence[Workload]) -> list[Workload]:
    """Sort workloads so that those with fewer than FEWEST_TOKENS keys or queries come last."""
    return sorted(workloads, key=lambda each: min(each.kv_len, each.seq_len) < FEWEST_TOKENS)


def _record_in_order(
    steps: Generator[None],
    held: dict[int, events.CellChecked | None],
    record: Callable[[events.CellChecked | None], None],
) -> None:
    """Run `steps`, and record the results that they put into `held` in the order of the cells.

    The keys of `held` are the indices of the cells. After an exception, all remaining results are recorded.
    """
    due = 0
    try:
        with closing(steps):
            for _ in steps:
                while due in held:
                    record(held.pop(due))
                    due += 1
    finally:
        for place in sorted(held):
            record(held[place])


def in_lanes(
    session: Session, work: Callable[[Session, Iterable[Workload]], Iterator[None]], workloads: Sequence[Workload]
) -> Generator[None]:
    """Yield after each step of `work`; if the session has a second worker, two lanes share the workloads.

    A lane is a thread with its own worker.
    """
    if session.second is None:
        yield from work(session, workloads)
        return
    mine, others = parts(workloads)
    steps, is_over, second = SimpleQueue[bool | BaseException](), threading.Event(), copy.copy(session)
    second.client = session.second

    def go(lane: Iterator[None]) -> None:
        try:
            for _ in lane:
                steps.put(True)  # noqa: FBT003 - True: a step is done; False: the lane has ended
                if is_over.is_set():
                    return
            steps.put(False)  # noqa: FBT003
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            steps.put(error)

    threads = [threading.Thread(target=go, args=[lane]) for lane in (work(session, mine), work(second, others))]
    with session.second:
        try:
            for thread in threads:
                thread.start()
            for _ in threads:
                while step := steps.get():
                    if isinstance(step, BaseException):
                        raise step  # noqa: TRY301 - a lane raised it
                    yield
        except BaseException:
            is_over.set()
            session.client.abandon()
            session.second.abandon()
            raise
        finally:
            for thread in threads:
                thread.join()


def parts(workloads: Sequence[Workload]) -> tuple[list[Workload], list[Workload]]:
    """Split workloads into those that match the first one in scope and need for gradients, and all others.

    The result of a rule (the test of a single property of attention) applies only to workloads that agree in both, so
    neither part needs results of the other.
    """
    kinds = [(each.scope, each.direction == "inference") for each in workloads]
    is_first = [kind == kinds[0] for kind in kinds]
    return [*compress(workloads, is_first)], [*compress(workloads, map(not_, is_first))]


def has_lanes(plan: Plan) -> bool:
    """Return whether two parallel threads (lanes) check a plan.

    They do if there are at least two processors, each lane gets at least WORKLOADS_OF_A_LANE workloads, and all
    workloads run on the host with score matrices of at most LANE_BYTES.
    """
    is_small = all(device(each.device).is_host and score_matrix_bytes(each) <= LANE_BYTES for each in plan.asked)
    is_worth = min(map(len, parts(plan.asked))) >= WORKLOADS_OF_A_LANE
    return is_small and is_worth and containers.processors() > 1


def _kind(workload: Workload) -> frozenset[tuple[str, object]]:
    """Return the axes that define a kind of workload, with their values: all but lengths, batch size and seed."""
    return frozenset((name, value) for name, value in workload.axes().items() if name not in VARIES_IN_A_KIND)


def _has_many_rows(workload: Workload) -> bool:
    """Return whether a workload exceeds MANY_ROWS in queries and keys, or MANY_BLOCKS in batch size times heads.

    The sweep `check` contains such workloads only to test large sizes, so normally distributed inputs are enough.
    """
    return min(workload.seq_len, workload.kv_len) > MANY_ROWS or workload.batch_size * workload.num_heads > MANY_BLOCKS


def ask_cell(session: Session, workload: Workload, arm: Arm, **options: object) -> events.CellChecked:
    """Check one cell; for `options` see Worker.check. What could not be loaded before is not tried again."""
    cell, plan = session.cell(workload, arm), session.plan
    reply: events.CellChecked | Failed
    if cell.spec in session.unloadable:
        reply = session.unloadable[cell.spec]
    else:
        fields = {"limit_s": plan.call_limit_s, "seed": plan.seed, "rejects": plan.rejects, **options}
        reply = session.ask("check", events.CellChecked, cell=cell, **fields)
    if isinstance(reply, Failed):
        if reply.is_unloadable:
            session.unloadable[cell.spec] = reply
        reply = events.CellChecked(
            **cell.names, status=reply.status, message=reply.message, is_predicted=reply.is_predicted
        )
    return reply


def record_check(session: Session, reply: events.CellChecked) -> None:
    """Record the result of a check, and report a wrong answer to the watcher at once.

    Why an implementation cannot be loaded is recorded with its first cell only; its other cells point there.
    """
    spec = session.specs[reply.key[1]]
    if spec in session.unloadable:
        if spec in session.told_unloadable:
            reply = msgspec.structs.replace(reply, message=SEE_FIRST, is_predicted=True)
        session.told_unloadable.add(spec)
    session.journal.append(reply)
    if reply.status is Status.disagrees:
        workload, arm = reply.key
        session.watch(replace(session.shown, cell=f"{arm} on {workload}", wrong=reply.message))


Readings = Iterable[tuple[Target, str]]  # pairs of a cell and the metric to read; "" for the operators


def read_cells(session: Session, readings: Readings, *, is_optional: bool = False) -> None:
    """Read metrics or operators of cells that have not failed, until READINGS_SHARE of the budget is spent.

    A plan with the stage "choose" has no such limit. If `is_optional` is set, failures are not recorded.
    """
    listed = list(readings)
    # no limit before the stage "choose", because it needs the memory metric of every cell
    limit_s = math.inf if "choose" in session.plan.stages else session.limit_s(READINGS_SHARE)
    for number, (cell, metric) in enumerate(listed):
        if session.elapsed_s >= limit_s:
            return
        if session.state.live(cell.workload.id, [cell.arm]):
            what = f"{metric or 'operators'} of {cell.arm} on {cell.workload.id}"
            session.show_progress("kept" if is_optional else "observe", what, number, len(listed))
            reply: events.CellProfiled | events.CellMeasured | Failed
            if metric:
                reply = session.ask("observe", events.CellMeasured, cell=cell, metric=metric)
            else:
                reply = session.ask("profile", events.CellProfiled, cell=cell)
            if not isinstance(reply, Failed):
                session.journal.append(reply)
            elif not is_optional:
                session.record_failure(cell, reply)


def observations(session: Session, metrics: Sequence[str], *, with_operators: bool) -> Readings:
    """Yield the readings that the journal lacks: each of `metrics` and, if requested, the operators, cell by cell.

    The readings of one cell come one after the other, so that they can share one recorded call.
    """
    known, done = plugins.plugs("attnbench.metrics", "METRIC"), session.state.done
    for workload, arm in session.live_cells:
        key, cell = (workload.id, arm), session.cell(workload, arm)
        if with_operators and (key, PROFILE) not in done:
            yield cell, ""
        for metric in metrics:
            if (key, MEASUREMENT + metric) not in done and known[metric].fits(workload):
                yield cell, metric


def read_first_calls(session: Session, cells: Iterable[tuple[Workload, Arm]]) -> None:
    """Time the first calls that the journal lacks, in fresh processes, for a third of the budget (`BUDGET_SHARE`).

    The first FEWEST_FIRST cells are timed even if this takes longer.
    """
    done, start_s = session.state.done, session.clock()
    fits = plugins.plugs("attnbench.metrics", "METRIC")[FIRST_CALL].fits
    due = [cell for cell in cells if ((cell[0].id, cell[1]), MEASUREMENT + FIRST_CALL) not in done and fits(cell[0])]
    limit_s = first_calls.BUDGET_SHARE * session.plan.budget_s or math.inf
    for number, place in enumerate(due):
        if number >= FEWEST_FIRST and session.clock() - start_s >= limit_s:
            return
        cell = session.cell(*place)
        session.show_progress("observe", f"first calls of {cell.arm} on {cell.workload.id}", number, len(due))

        def read(settings: dict[str, str], cell: Target = cell, *, has_others: bool) -> FirstCalls | Failed:
            session.start_worker()
            return session.ask("first_calls", FirstCalls, cell=cell, settings=settings, has_others=has_others)

        for measurement in first_calls.measurements(read):
            event = events.CellMeasured(**cell.names, measurement=measurement)
            if (event.key, MEASUREMENT + measurement.metric) not in done:  # a killed run may have recorded some of them
                session.journal.append(event)


def trace(session: Session) -> None:
    """Trace each live cell into a file of its own below the journal's folder (tracing/folders.py).

    Tracing slows calls down, so it is never combined with timing.
    """
    cells, folder = session.live_cells, session.folder
    for number, (workload, arm) in enumerate(cells):
        session.show_progress("trace", f"trace of {arm} on {workload.id}", number, len(cells))
        file, cell = folders.trace_file(folder, workload.id, arm.implementation), session.cell(workload, arm)
        reply = session.ask("trace", NoneType, cell=cell, file=str(file.resolve()))
        if isinstance(reply, Failed):
            session.record_failure(cell, reply)


def kept_memory(session: Session) -> Readings:
    """Yield the pairs (cell, metric) at which to measure kept memory: bytes still allocated after results are freed.

    Only implementations from the user's files or other packages are measured, each on at most two of the cells that
    passed their check: the one with the smallest score matrix among those with gradients, and among those without. Two
    are enough, because code that keeps memory keeps it on every workload. Workloads with several ranks, and pairs that
    are measured already, are left out.
    """
    cheapest: dict[tuple[Arm, bool], Workload] = {}
    for workload, arm in sorted(session.live_cells, key=lambda cell: score_matrix_bytes(cell[0])):
        if plugins.is_foreign(session.specs[arm]) and workload.world_size == 1:
            cheapest.setdefault((arm, workload.direction == "inference"), workload)
    for (arm, _), workload in cheapest.items():
        for metric in KEPT:
            if ((workload.id, arm), MEASUREMENT + metric) not in session.state.done:
                yield session.cell(workload, arm), metric


def measure_ceilings(session: Session) -> None:
    """Measure the ceilings of each device, dtype and number of threads that will be timed.

    Ceilings are rates of matrix products and copies. A failure is recorded with its reason; times are then not compared
    with ceilings.
    """
    live = [workload for workload in session.plan.workloads if session.state.live(workload.id, session.specs)]
    places = {workload.place: workload for workload in reversed(live)}
    for number, (place, workload) in enumerate(places.items()):
        if ("", place) in session.state.ceilings:
            continue
        if not number:
            session.start_worker()  # a fresh worker, because checks set the number of threads
        device, dtype, num_threads = place
        session.show_progress("ceilings", f"{device}, {dtype}", number, len(places))
        session.require_worker()
        start_s = session.clock()
        limit_s = min(CEILINGS_S, CEILINGS_SHARE * session.plan.budget_s / len(places))
        reply = session.ask("measure_ceilings", events.CeilingsMeasured, workload=workload, limit_s=limit_s)
        if isinstance(reply, Failed):
            none = Ceilings(device=device, dtype=dtype, num_threads=num_threads, message=reply.message)
            reply = events.CeilingsMeasured(ceilings=none)
        session.journal.append(msgspec.structs.replace(reply, spent_s=session.clock() - start_s))


class Timing:
    """The timing of the visits (a few blocks of one workload in one process) that a strategy selects.

    Progress is reported under the stage `name`.
    """

    def __init__(self, session: Session, name: str) -> None:
        self.session, self.state, self.plan, self.name = session, session.state, session.plan, name
        fits = plugins.plugs("attnbench.metrics", "METRIC")[LATENCY].fits
        alive = [each.id for each in self.plan.asked if fits(each) and self.state.live(each.id, session.specs)]
        self.places = {workload: number for number, workload in enumerate(alive)}
        is_ours = all(self.plan.is_alone(arm) or not plugins.is_foreign(spec) for arm, spec in session.specs.items())
        self.num_verified = 1 if self.plan.sides is not None or is_ours else math.inf
        self.workloads = {workload.id: workload for workload in self.plan.workloads}
        self.spent_s, self.num_visits = 0.0, 0  # in this process: seconds outside of blocks, and visits

    def run(self, strategy: Strategy) -> str:
        """Time what the strategy selects, visit by visit, until it ends; return why it ended."""

        def live() -> dict[str, list[Arm]]:
            return {workload: self.live(workload, self.session.specs) for workload in self.places}

        return run_strategy(strategy, self.state, live, lambda: self.session.elapsed_s, self.visit)

    def live(self, workload: str, arms: Iterable[Arm]) -> list[Arm]:
        """Return the arms that passed their check on a workload; of two compared states of the code, both must pass."""
        live = self.state.live(workload, arms)
        sides = Counter(map(self.plan.reference, live))
        return [arm for arm in live if self.plan.sides is None or sides[self.plan.reference(arm)] > 1]

    def _show_progress(self, step: Step) -> None:
        share = min(1.0, self.session.elapsed_s / max(self.plan.budget_s, 1e-9))
        if self.name == "time":
            num_first = sum(min(self.state.num_visits[workload], self.plan.num_rounds) for workload in self.places)
            share = min(num_first / (self.plan.num_rounds * len(self.places)), share)
        number = self.state.num_visits[step.workload] + 1
        cell = f"{len(step.arms)} on {step.workload}, process {number}"
        self.session.show_progress(self.name, cell, share, 1.0)

    def _share(self, workload: Workload, arms: Iterable[Arm]) -> visits.Share:
        """Return the number of blocks of the next visit, and, except in a search, a time limit (timing/visits.py)."""
        taken, least = self.state.samples.get(workload.id, {}), self.plan.num_blocks
        if self.plan.has_runners:  # their samples are LONGER_TURNS times as long
            least = max(visits.FEWEST_BLOCKS, math.ceil(least / LONGER_TURNS))
        if not taken:
            longest_s = max(self._left_s() / LOOKS[1] - visits.FRESH_S, 0.0) if self.places else 0.0
            return visits.Share(num_blocks=least, longest_s=longest_s)
        process_s = self.spent_s / self.num_visits if self.num_visits else visits.FRESH_S
        blocks_s, num_blocks = visits.in_blocks(taken)
        costs = visits.Costs(process_s=process_s, block_s=blocks_s / num_blocks)
        references = {arm: self.plan.reference(arm) for arm in arms}
        spread = visits.spread_of(taken, references)
        if not self.places:
            return visits.Share(num_blocks=int(min(max(visits.best(costs, spread), least), visits.MOST_TIMES * least)))
        number, limits = self.state.num_visits[workload.id], (least, self.plan.num_rounds)
        return visits.share(costs, spread, num_taken=number, left_s=self._left_s(), limits=limits)

    def _left_s(self) -> float:
        """Return the remaining seconds of the budget, divided by the number of workloads that are still being timed.

        These are the workloads that are at most one visit behind the workload with the most visits.
        """
        latest = max(map(self.state.num_visits.__getitem__, self.places), default=0)
        num_open = sum(self.state.num_visits[workload] >= latest - 1 for workload in self.places)
        return max(0.0, self.plan.budget_s - self.session.elapsed_s) / max(1, num_open)

    def visit(self, step: Step) -> None:
        """Time one visit, a few blocks with the arms of `step` and the interference probe in a random order.

        If an arm fails, it is dropped, and the visit is repeated without it.
        """
        start_s = self.session.clock()
        if step.is_fresh:
            self.session.start_worker()
        self._show_progress(step)
        workload = self.workloads[step.workload]
        while live := self.live(workload.id, step.arms):
            self.session.require_worker()  # before the request is built, because it contains the worker's epoch
            number = self.state.num_visits[workload.id]
            is_due = (number + self.places.get(workload.id, 0)) % VERIFY_EVERY == 0  # spread over processes
            seed = visit_seed(self.plan.seed, workload.id, number)
            taken = [(arm, self.session.specs[arm]) for arm in live]
            taken.append((PROBE, ""))
            random.Random(seed).shuffle(taken)
            share = self._share(workload, live)
            request = SampleBlocks(
                workload=workload,
                arms=tuple(taken),
                epoch=self.state.num_workers - 1,
                number=number,
                num_blocks=share.num_blocks,
                longest_s=share.longest_s,
                references=tuple(filter(self.plan.is_reference, live)),
                seed=seed,
                known=known(self.state.samples.get(workload.id, {})),
                cache=self.plan.cache,
                launch=self.plan.launch,
                sustained_s=SUSTAINED_S if self.plan.pace == "sustained" else 0.0,
                verifies=is_due or number < self.num_verified,
                is_refereed=self.plan.is_refereed,
            )
            reply = self.session.ask("sample_blocks", events.VisitFinished, visit=request)
            if isinstance(reply, events.VisitFinished):
                elapsed_s = round(self.session.elapsed_s, 3)
                self.session.journal.append(msgspec.structs.replace(reply, elapsed_s=elapsed_s))
                blocks_s, _ = visits.in_blocks({each.arm: each.samples for each in reply.arms})
                self.spent_s += max(0.0, self.session.clock() - start_s - blocks_s)
                self.num_visits += 1
                return
            if reply.arm != PROBE:
                self.session.record_failure(self.session.cell(workload, reply.arm), reply)
                continue
            # The harness itself failed. Drop the arms that run in processes of their own; if there are none, drop all.
            message = f"while the harness prepared or read the workload: {reply.message}"
            every = self.state.live(workload.id, self.session.specs)
            for arm in [arm for arm in every if self.plan.is_alone(arm)] or every:
                failed = msgspec.structs.replace(reply, message=message)
                self.session.record_failure(self.session.cell(workload, arm), failed)


class Search:
    """Strategy that searches each ladder for the values between which the faster of two implementations changes.

    A ladder is one workload at increasing values of an axis. Each pass is a fresh process that times a few blocks (a
    visit) at one value of each unfinished search. A search stays at a value until the faster implementation is known
    there, or MOST_PROCESSES processes have visited it; then it bisects (statistics/crossover.py).
    """

    def __init__(self, session: Session) -> None:
        self.session, self.plan, self.reason = session, session.plan, ""
        self.gauge = InterferenceGauge()
        self._pass: dict[str, dict[Arm, None]] = {}  # remaining visits of the current process: arms by workload
        self._workloads = {each.id: each for each in session.plan.workloads}

    def next(self, state: State, live: Live, now_s: float = 0.0) -> Step | None:  # noqa: ARG002 - the signature of Strategy
        """Return the next visit; None if all searches have ended, or the budget is spent."""
        is_fresh = not self._pass
        for ladder in self.plan.ladders if is_fresh else ():
            for names in ladder.pairs:
                pair = [Arm(implementation=name) for name in names]
                if workload := self._place(state, ladder, pair):
                    self._pass.setdefault(workload, {}).update(dict.fromkeys(pair))
        if not self._pass or self._is_spent:
            self.reason = SPENT if self._is_spent else SEARCHED
            return None
        workload, arms = self._pass.popitem()
        return Step(workload=workload, arms=tuple(arms), is_fresh=is_fresh)

    @property
    def _is_spent(self) -> bool:
        return self.session.elapsed_s >= self.plan.budget_s

    def _place(self, state: State, ladder: Ladder, pair: Sequence[Arm]) -> str:
        """Return the id of the workload that the search of a pair visits next; "" if the search has ended.

        Both arms of the pair are checked on that workload first.
        """
        allowed = list(ladder.values)
        while len(allowed) > 1 and not self._is_spent:
            discarded, seen = self.gauge.follow(state.probes), dict[int, Point]()
            for value in allowed:
                workload = ladder.by_value[value]
                logs = numbers(state.samples.get(workload, {}), pair[0], pair[1], discarded.get(workload, ()))
                if ratios := by_process(logs):
                    seen[value] = point([*ratios.values()], self.plan.num_searches)
            open_ones = [
                each for each, known in seen.items() if not known.sign and known.num_processes < MOST_PROCESSES
            ]
            chosen = open_ones[0] if open_ones else next_value(seen, allowed)
            if chosen is None:
                return ""
            workload = ladder.by_value[chosen]
            self._check(state, workload, pair)
            if len(state.live(workload, pair)) == len(pair):
                return workload
            # the ladder ends at a value that is unsupported, or too large for the remaining time
            allowed = [each for each in allowed if (each < chosen if chosen > allowed[0] else each > chosen)]
        return ""

    def _check(self, state: State, workload: str, arms: Sequence[Arm]) -> None:
        """Check the arms that have no status on this workload yet."""
        for arm in arms:
            if (workload, arm) not in state.status:
                left_s = max(0.0, self.plan.budget_s - self.session.elapsed_s)
                limit_s = min(self.plan.call_limit_s, left_s / CALLS_AT_A_VALUE)
                share = 1.0 - left_s / max(self.plan.budget_s, 1e-9)
                self.session.show_progress("search", f"{arm} on {workload}", share, 1.0)
                record_check(self.session, ask_cell(self.session, self._workloads[workload], arm, limit_s=limit_s))


def execute(  # noqa: PLR0913 - all but the first three have useful defaults
    plan: Plan,
    folder: Path,
    watch: Watch,
    stages: Collection[str] = STAGES,
    *,
    stops_when_wrong: bool = False,
    then: Callable[[Session], object] | None = None,
    templates: Sequence[Template] = (),
    unstored: Unstored | None = None,
    client: WorkerClient | None = None,
    clock: Callable[[], float] = time.monotonic,
    read_counters: Callable[[], Counters | None] = read_counters,
) -> None:
    """Start a run in `folder`, or continue the run that is there, and finish it.

    `watch` is called with each Progress. If `stops_when_wrong` is set, an implementation is not checked further after
    its first wrong answer. The stages of the plan, if it has any, replace `stages`. `then` is called with the session
    at the end. Workers are forked from `templates[0]`, and those of a second, parallel lane of checks from
    `templates[1]`. If `unstored` is given, it takes the events, and nothing is written. By default, `client` is a
    worker process, and `clock` and `read_counters` read this machine.

    Raises:
        ValueError: the folder cannot be written, its journal is damaged, no worker can start, or Triton's interpreter
            would be timed.
    """
    is_timed = "time" in (plan.stages or stages) and LATENCY in plan.metrics
    if is_timed and (plan.is_interpreted or INTERPRETED.items() <= os.environ.items()):
        raise ValueError(
            "Triton's interpreter does not show the speed of a kernel: check it with attnbench check --interpret, and "
            "time it on a GPU, without TRITON_INTERPRET=1 in the environment"
        )
    client = client or client_for(plan, folder, *templates[:1])
    second = client_for(plan, folder, templates[1]) if len(templates) > 1 and has_lanes(plan) else None
    with unstored or Journal(folder, keeps_copy=bool(plan.alone)) as journal, client as worker:
        session = Session(plan, folder, journal, worker, watch, clock, read_counters, second)
        if journal.state.started is None:
            journal.append(
                events.RunStarted(schema=SCHEMA, run=folder.name, time=now(), commit=current_commit(), plan=plan)
            )
        if is_timed:
            threading.Thread(target=load_libraries).start()  # while the worker imports torch
        session.start_worker()
        reason = _run_stages(session, plan.stages or stages, stops_when_wrong=stops_when_wrong)
        if then is not None:
            then(session)
        finished = events.RunFinished(time=now(), elapsed_s=session.elapsed_s, reason=reason, counters=read_counters())
        journal.append(finished)


def _run_stages(session: Session, names: Collection[str], *, stops_when_wrong: bool) -> str:
    """Run the stages with these names; return why checks were cut short and why timing ended, or ""."""
    plan, reason, is_timed = session.plan, "", LATENCY in session.plan.metrics
    if "check" in names:
        reason = check(session, stops_when_wrong=stops_when_wrong)
        if "trace" not in names:
            read_cells(session, kept_memory(session), is_optional=True)  # a failed reading is not the code's fault
    if "operators" in names or "metrics" in names:
        apart = {LATENCY, *FIRST_CALLS}
        metrics = [metric for metric in plan.metrics if metric not in apart and "metrics" in names]
        read_cells(session, observations(session, metrics, with_operators="operators" in names))
    if "metrics" in names and {*FIRST_CALLS} & {*plan.metrics}:
        order = {workload.id: place for place, workload in enumerate(plan.workloads)}
        cells = session.live_cells
        cells.sort(key=lambda cell: (order[cell[0].id], not plan.is_reference(cell[1])))
        read_first_calls(session, cells)
    if "ceilings" in names and is_timed:
        measure_ceilings(session)
    if "trace" in names:
        trace(session)
    strategies: dict[str, Strategy] = {"time": Race(plan), "choose": Choice(plan), "search": Search(session)}
    for name, strategy in strategies.items():
        if name in names and is_timed:
            reason = "; ".join(filter(None, [reason, Timing(session, name).run(strategy)]))
    return reason


def _usual(timeout_s: float, spin: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return default environment variables of a worker, except those that the user has set.

    These are the variables in `spin`, which limit the spinning of idle threads, and the time limit of a call over
    several ranks: the share RANKS_SHARE of `timeout_s`, the seconds that a step may take.
    """
    usual = {RANKS_TIMEOUT: f"{RANKS_SHARE * timeout_s:g}", **(spin or {})}
    return {name: value for name, value in usual.items() if name not in os.environ}


def threads_settings(number: int) -> dict[str, str]:
    """Return environment variables that set the number of threads; 0: torch chooses, up to a container's CPU quota.

    Torch itself ignores the quota. torch.set_num_threads is not used, because it changes how MKL behaves.
    """
    is_set = any(name in os.environ for name in THREADS)
    if not number and not is_set and containers.processors() < containers.affinity():
        number = containers.processors()
    return dict.fromkeys(THREADS, str(number)) if number else {}


@contextmanager
def checking_templates(
    folder: Path, timeout_s: float, *, is_interpreted: bool = False, keeps_answers: bool = False
) -> Iterator[list[Template]]:
    """Yield started templates, the processes from which workers are forked, one for each parallel lane of checks.

    There are two lanes, or one on a single processor. Checks time nothing, so workers with the same environment can
    check all plans. If `keeps_answers` is set, the right answers that were computed for one plan are kept for the
    next. `timeout_s` limits the seconds of each step.
    """
    settings = _usual(timeout_s, SHORT_SPIN) | ALLOCATORS["retain"] | (INTERPRETED if is_interpreted else {})
    if keeps_answers:  # if a module is saved twice within a second, Python would load the bytecode of its first version
        settings |= {KEEPS_ANSWERS: "1", "PYTHONDONTWRITEBYTECODE": "1"}
    names = ("worker", "second")[: containers.processors()]
    with ExitStack() as stack:
        templates = [stack.enter_context(closing(Template(folder / f"{name}.log", settings))) for name in names]
        for each in templates:
            each.start()
        yield templates


def client_for(plan: Plan, folder: Path, template: Template | None = None) -> WorkerClient:
    """Return a client of the run's worker, or of several workers if one process cannot run all arms.

    Workers print into logs in `folder`. They are forked from `template`, if it is given and the two compared states of
    the code do not need templates of their own. The caller closes a template that it passes.
    """
    if len(numbers := {each.num_threads for each in plan.workloads}) > 1:
        clients_of = dict[int, WorkerClient]()
        for number in sorted(numbers):
            alike = tuple(each for each in plan.workloads if each.num_threads == number)
            clients_of[number] = client_for(msgspec.structs.replace(plan, workloads=alike), folder, template)
        return ByThreads(clients_of)
    settings = _usual(plan.timeout_s) | threads_settings(*numbers) | ALLOCATORS[plan.allocator]
    settings |= INTERPRETED if plan.is_interpreted else {}
    slow = {SLOW_IMPORTS.get(spec, "") for spec in plan.specs.values()} - {""}
    if slow and LATENCY in plan.metrics:
        settings |= {PRELOADED: ",".join(sorted(slow))}
    log = folder / "worker.log"
    if plan.sides is None or not plan.has_runners:
        own = template or Template(log, settings)
        shared = ProcessClient(own, plan.timeout_s, owns_template=template is None)
        return WorkerPool({SHARED: shared}, plan.runner) if plan.has_runners else shared
    clients: dict[str, ProcessClient] = {}
    home = harness_folder(folder / SIDES_FOLDER / "modules")
    for name, side in ((BASE, plan.sides.base), (CANDIDATE, plan.sides.candidate)):
        file = log if name == CANDIDATE else folder / "worker_base.log"
        of_side = Template(file, settings, python=side.python, home=home, folders=side_folders(side))
        clients[name] = ProcessClient(of_side, plan.timeout_s)
    return WorkerPool(clients, plan.runner, seed=plan.seed)


def new_folder(results: Path, sweep: str, kind: str = "runs") -> Path:
    """Return the path of a new run's folder in `results`/`kind`; its name begins with the time, to sort by age."""
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return results / kind / f"{moment}-{sweep}-{secrets.token_hex(2)}"
