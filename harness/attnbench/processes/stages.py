"""A session, and the stages of a run: each writes its events to the journal, and skips finished work."""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from attnbench import plugins
from attnbench.devices import read_counters
from attnbench.processes import messages
from attnbench.processes.worker_client import WorkerClient
from attnbench.storage import events
from attnbench.storage.events import SUSTAINED_S, Plan
from attnbench.storage.fold import CEILINGS, MEASUREMENT, PROFILE, State
from attnbench.storage.journal import Journal
from attnbench.storage.records import KEPT, LATENCY, PROBE, Arm, Ceilings, Counters, Status
from attnbench.timing.blocks import WARM_S, known
from attnbench.timing.schedule import Step, Strategy, follow, visit_seed
from attnbench.tracing import folders
from attnbench.workloads import covering
from attnbench.workloads.counts import score_matrix_bytes
from attnbench.workloads.workload import Workload

CEILINGS_SHARE = 0.05
CEILINGS_S = 1.0
"""Seconds for the ceilings of one place beyond their fewest rounds, limited to their part of CEILINGS_SHARE of the
budget."""
VERIFY_EVERY = 4
"""Answers are verified in a workload's first visit and then in one visit of four, since the right answers cost as much
as the times in a fresh process. Foreign code in a shared process is verified in every visit."""
FRESH_S, MOST_BLOCKS = 0.2, 4
"""Seconds to prepare a process, shared by its visits; a shorter visit has more blocks, up to this factor."""
SPARED, MOST_SPARED = ("large", "huge", "shifted", "equal"), 2
"""Probes that a check may omit on a workload, and the largest number of them."""
VARIES_IN_A_KIND = {"batch_size", "seq_len", "kv_len", "seed"}
FEWEST_TOKENS = 16
"""Among fewer keys masks hide nothing, and a softmax is soon one-hot; among few queries mistakes look alike."""
SEE_FIRST = "it cannot be loaded: see its first cell"
UNLOADABLE = messages.Failed(status=Status.error, message=SEE_FIRST, is_predicted=True, is_unloadable=True)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run, for a watcher."""

    stage: str  # check, observe, ceilings, time or trace
    cell: str
    done: float  # completed part of `total` in the stage
    total: float
    counts: Mapping[str, int]  # number of cells by status
    left_s: float | None
    wrong: str = ""  # how the cell has just been found wrong


Watch = Callable[[Progress], None]


@dataclass
class Session:
    """One run in progress. `state` is its progress, which depends only on the journal."""

    plan: Plan
    journal: Journal
    client: WorkerClient
    watch: Watch
    clock: Callable[[], float] = time.monotonic
    read_counters: Callable[[], Counters | None] = read_counters
    state: State = field(default_factory=State)

    def __post_init__(self) -> None:
        """Start the clock; `earlier_s` is the time spent before the run was resumed, as far as its journal shows."""
        self.specs: dict[Arm, str] = self.plan.specs
        self.earlier_s = self.state.spent_s
        self.unloadable: set[str] = set()  # specs that cannot be loaded
        self._start = self._stage_start = self.clock()
        self._stage = ""

    @property
    def elapsed_s(self) -> float:
        """Seconds spent on the run, earlier processes included."""
        return self.earlier_s + self.clock() - self._start

    @property
    def live_cells(self) -> list[tuple[Workload, Arm]]:
        """Cells that have passed their check, workload by workload."""
        return [(workload, arm) for workload in self.plan.workloads for arm in self.state.live(workload.id, self.specs)]

    def record(self, event: events.Event) -> None:
        """Write an event to the journal, and apply it to the state."""
        self.journal.append(event)
        self.state.apply(event)

    def start_worker(self) -> None:
        """Start a fresh worker process, with the code and the environment of the run's start.

        Raises:
            ValueError: it cannot start, or the code or the environment has changed.
        """
        for spec, digest in self.plan.digests.items():
            if plugins.digest(spec) != digest:
                raise ValueError(f"{spec} has changed since the run began, so its check is obsolete: start a new run")
        before = self.read_counters()
        reply = self.client.start(self.state.num_workers)
        started = events.WorkerStarted(
            time=now(), environment=reply.environment, base=reply.base, before=before, counters=self.read_counters()
        )
        began = self.state.began or started
        for first, here in ((began.environment, started.environment), (began.base, started.base)):
            if first is not None and here is not None and first.fingerprint != here.fingerprint:
                there = f"fingerprint {first.fingerprint}, and here it is {here.fingerprint}"
                raise ValueError(f"the run began in another environment ({there}): start a new run")
        self.record(started)

    def require_worker(self) -> None:
        """Start a worker unless one is running."""
        if not self.client.is_running:
            self.start_worker()

    def ask(self, request: messages.Work) -> messages.Reply:
        """Send a request to the worker, starting one if necessary; return the reply.

        If its process ended meanwhile, or memory ran out, the request is repeated once in a fresh process before an arm
        is held responsible: the cause may be gone.
        """
        self.require_worker()
        reply = self.client.ask(request)
        if isinstance(reply, messages.Failed) and (reply.is_lost or reply.is_full):
            if reply.is_full:  # other workers hold memory, too
                self.client.stop()
            self.require_worker()
            if isinstance(request, messages.SampleBlocks):
                request = msgspec.structs.replace(request, epoch=self.state.num_workers - 1)
            reply = self.client.ask(request)
        return self._sensible(request, reply)

    def _sensible(self, request: messages.Work, reply: messages.Reply) -> messages.Reply:
        """Attribute the reply to the cell of the request, or return Failed if the journal could not accept it."""
        if isinstance(request, messages.CellRequest) and isinstance(reply, events.CellEvent):
            reply = msgspec.structs.replace(reply, **request.names)
        accepted = events.CellChecked | events.CellMeasured | events.CeilingsMeasured | events.VisitFinished
        if isinstance(reply, accepted) and (problem := self.state.problem(reply)):
            return messages.Failed(status=Status.invalid, message=f"its process answered what cannot be: {problem}")
        return reply

    @property
    def limits(self) -> dict[str, Any]:
        """The limits of a call, as fields of a request to check a cell."""
        limit_bytes = self.plan.memory_limit_bytes
        return {"call_limit_s": self.plan.call_limit_s, "memory_limit_bytes": limit_bytes, "is_rough": True}

    def request_of(self, workload: Workload, arm: Arm) -> dict[str, Any]:
        """Fields of a request that name its cell."""
        return {"workload": workload, "arm": arm, "spec": self.specs[arm]}

    def record_failure(self, workload: Workload, arm: Arm, failed: messages.Failed) -> None:
        """End a cell after its check had passed."""
        self.record(events.CellFailed(**named(workload, arm), status=failed.status, message=failed.message))

    def show_progress(self, stage: str, cell: str, done: float, total: float) -> None:
        """Call the watcher.

        The remaining time follows from the stage's pace, or is the rest of the budget if that is more.
        """
        spent_s = self.clock() - self._stage_start if self._stage == stage else 0.0
        if self._stage != stage:
            self._stage, self._stage_start = stage, self.clock()
        pace_s = spent_s / done * (total - done) if done and spent_s else 0.0
        left_s = max(pace_s, self.plan.budget_s - self.elapsed_s, 0.0) or None
        counts = {str(status): number for status, number in self.state.counts.items() if number}
        self._shown = Progress(stage=stage, cell=cell, done=done, total=total, counts=counts, left_s=left_s)
        self.watch(self._shown)

    def show_wrong(self, workload: Workload, arm: Arm, message: str) -> None:
        """Call the watcher: an answer is wrong."""
        self.watch(replace(self._shown, cell=f"{arm} on {workload.id}", wrong=message))


def named(workload: Workload, arm: Arm) -> dict[str, Any]:
    """Fields of an event that name its cell."""
    return {"workload": workload.id, "implementation": arm.implementation, "side": arm.side}


def now() -> str:
    """The current UTC time in ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def check(session: Session, *, stops_when_wrong: bool = False) -> str:
    """Check every cell; return why some were left out, or "".

    In a run that times, an implementation gets every probe and rule on the first workload of a kind that it passes, and
    only normal inputs on the others, which differ in size. With `stops_when_wrong` it is not checked further once it is
    wrong, the most informative workloads come first, and checks end with the budget.
    """
    plan, status = session.plan, session.state.status
    workloads = _most_informative_first(plan.asked) if stops_when_wrong else plan.asked
    is_brief_allowed = LATENCY in plan.metrics and not stops_when_wrong
    spared = _spared_probes(plan.asked) if LATENCY not in plan.metrics else {}
    wrong = {arm for (_, arm), status in status.items() if status is Status.disagrees}
    passed: set[tuple[Arm, frozenset[tuple[str, object]]]] = set()
    cells = [(workload, arm) for workload in workloads for arm in plan.cells(workload)]
    for number, (workload, arm) in enumerate(cells):
        if stops_when_wrong and 0 < plan.budget_s <= session.elapsed_s:
            return f"{len(cells) - number} of {len(cells)} cells were not reached in {plan.budget_s:g} s"
        if (workload.id, arm) not in status and not (stops_when_wrong and arm in wrong):
            session.show_progress("check", f"{arm} on {workload.id}", number, len(cells))
            is_brief = is_brief_allowed and (arm, _kind(workload)) in passed
            check_cell(session, workload, arm, is_brief=is_brief, left_out=spared.get(workload.id, ()))
        if status.get((workload.id, arm)) is Status.disagrees:
            wrong.add(arm)
        elif status.get((workload.id, arm)) is Status.ok:
            passed.add((arm, _kind(workload)))
    session.show_progress("check", "", len(cells), len(cells))
    return ""


def _spared_probes(workloads: Sequence[Workload]) -> dict[str, tuple[str, ...]]:
    """The probes that a check may omit on each workload, by id: costly workloads rely on cheaper ones."""
    costly = sorted(workloads, key=lambda each: -each.num_scores * each.head_dim)
    spared = covering.dispensable([each.axes() for each in costly], SPARED, MOST_SPARED)
    return {each.id: tuple(probes) for each, probes in zip(costly, spared, strict=True)}


def _kind(workload: Workload) -> frozenset[tuple[str, object]]:
    """The axes that define a kind of workload: all but lengths, batch size and seed."""
    return frozenset((name, value) for name, value in workload.axes().items() if name not in VARIES_IN_A_KIND)


def check_cell(session: Session, workload: Workload, arm: Arm, **more: Any) -> None:  # noqa: ANN401 - of Check
    """Check one cell, and record its status; `more` overrides the fields of the request.

    An implementation that cannot be loaded is tried only once for all its cells.
    """
    reply: messages.Reply = UNLOADABLE
    if session.specs[arm] not in session.unloadable:
        fields = {"seed": session.plan.seed, "rejects": session.plan.rejects, **session.limits, **more}
        reply = session.ask(messages.Check(**session.request_of(workload, arm), **fields))
    if isinstance(reply, messages.Failed):
        session.unloadable |= {session.specs[arm]} if reply.is_unloadable else set()
        reply = events.CellChecked(
            **named(workload, arm), status=reply.status, message=reply.message, is_predicted=reply.is_predicted
        )
    assert isinstance(reply, events.CellChecked)
    session.record(reply)
    if reply.status is Status.disagrees:
        session.show_wrong(workload, arm, reply.message)


def _most_informative_first(workloads: Sequence[Workload]) -> list[Workload]:
    """Order workloads by the number of new values of axes that each adds; among equals the cheapest first.

    Those with few keys or queries come last: several mistakes look alike there, or change nothing.
    """
    tried: set[tuple[str, object]] = set()
    rest, ordered = list(workloads), list[Workload]()

    def rank(workload: Workload) -> tuple[bool, int, int]:
        new = len(set(workload.axes().items()) - tried)
        says_little = min(workload.kv_len, workload.seq_len) < FEWEST_TOKENS
        return says_little, -new, workload.num_scores * workload.head_dim

    while rest:
        ordered.append(min(rest, key=rank))
        rest.remove(ordered[-1])
        tried |= set(ordered[-1].axes().items())
    return ordered


Requests = Mapping[str, messages.Work]
"""The requests about a cell, by a word for each."""


def ask_about_cells(session: Session, stage: str, requests: Callable[[Workload, Arm], Requests]) -> None:
    """Send the requests about each live cell, and record the replies."""
    cells = session.live_cells
    for number, (workload, arm) in enumerate(cells):
        for what, request in requests(workload, arm).items():
            if session.state.live(workload.id, [arm]):
                session.show_progress(stage, f"{what} of {arm} on {workload.id}", number, len(cells))
                reply = session.ask(request)
                if isinstance(reply, messages.Failed):
                    session.record_failure(workload, arm, reply)
                elif isinstance(reply, events.CellProfiled | events.CellMeasured):
                    session.record(reply)


def observe(session: Session, metrics: Sequence[str], *, with_operators: bool) -> None:
    """Profile the operators of each live cell, and read each metric with a pass of its own, cell by cell.

    Both are read right after each other, since they share one recorded call if the device allows it.
    """
    known, done = plugins.plugs("attnbench.metrics", "METRIC"), session.state.done

    def requests(workload: Workload, arm: Arm) -> Requests:
        key, cell = (workload.id, arm), session.request_of(workload, arm)
        asked: dict[str, messages.Work] = {}
        if with_operators and (key, PROFILE) not in done:
            asked["operators"] = messages.Profile(**cell)
        for metric in metrics:
            if (key, MEASUREMENT + metric) not in done and known[metric].fits(workload):
                asked[metric] = messages.Observe(**cell, metric=metric)
        return asked

    ask_about_cells(session, "observe", requests)


def trace(session: Session, folder: Path) -> None:
    """Trace each live cell into a file of its own below `folder` (tracing/folders.py).

    Tracing slows calls down, so traces have a pass of their own, and a folder apart from those of runs.
    """

    def requests(workload: Workload, arm: Arm) -> Requests:
        file = folders.trace_file(folder, workload.id, arm.implementation)
        return {"trace": messages.Trace(**session.request_of(workload, arm), file=str(file.resolve()))}

    ask_about_cells(session, "trace", requests)


def measure_kept_memory(session: Session) -> None:
    """Measure memory kept by calls of each foreign implementation, with and without gradients, in its cheapest cells.

    One cell suffices: code that keeps memory keeps it everywhere.
    """
    cheapest: dict[tuple[Arm, bool], Workload] = {}
    for workload, arm in sorted(session.live_cells, key=lambda cell: score_matrix_bytes(cell[0])):
        if plugins.is_foreign(session.specs[arm]) and workload.world_size == 1:
            cheapest.setdefault((arm, workload.direction == "inference"), workload)
    for (arm, _), workload in cheapest.items():
        for metric in KEPT:
            if ((workload.id, arm), MEASUREMENT + metric) not in session.state.done:
                reply = session.ask(messages.Observe(**session.request_of(workload, arm), metric=metric))
                if isinstance(reply, events.CellMeasured):  # otherwise unknown, which is no fault
                    session.record(reply)


def measure_ceilings(session: Session) -> None:
    """Measure the ceilings of each device, dtype and number of threads that will be timed.

    Failures are recorded with their reason, and times are then not compared with ceilings.
    """
    live = [workload for workload in session.plan.workloads if session.state.live(workload.id, session.specs)]
    places = {workload.place: workload for workload in reversed(live)}
    for number, (place, workload) in enumerate(places.items()):
        if (place, CEILINGS) in session.state.done:
            continue
        device, dtype, num_threads = place
        session.show_progress("ceilings", f"{device}, {dtype}", number, len(places))
        session.require_worker()
        start_s = session.clock()
        limit_s = min(CEILINGS_S, CEILINGS_SHARE * session.plan.budget_s / len(places))
        reply = session.ask(messages.MeasureCeilings(workload=workload, limit_s=limit_s))
        if isinstance(reply, messages.Failed):
            none = Ceilings(device=device, dtype=dtype, num_threads=num_threads, message=reply.message)
            reply = events.CeilingsMeasured(ceilings=none)
        assert isinstance(reply, events.CeilingsMeasured)
        session.record(msgspec.structs.replace(reply, spent_s=session.clock() - start_s))


class Timing:
    """Times the visits that a strategy selects; `name` is shown as the stage."""

    def __init__(self, session: Session, name: str) -> None:
        self.session, self.state, self.plan, self.name = session, session.state, session.plan, name
        fits = plugins.plugs("attnbench.metrics", "METRIC")[LATENCY].fits
        alive = [each.id for each in self.plan.asked if fits(each) and self.state.live(each.id, session.specs)]
        self.places = {workload: number for number, workload in enumerate(alive)}
        is_ours = all(self.plan.is_alone(arm) or not plugins.is_foreign(spec) for arm, spec in session.specs.items())
        self.num_verified = 1 if self.plan.sides is not None or is_ours else math.inf

    def run(self, strategy: Strategy) -> str:
        """Visit until the strategy ends; return its reason."""
        workloads = {workload.id: workload for workload in self.plan.workloads}

        def visit(step: Step) -> None:
            if step.is_fresh:
                self.session.start_worker()
            number = self.state.num_visits[step.workload] + 1
            self._show_progress(f"{len(step.arms)} on {step.workload}, process {number}")
            self.visit(workloads[step.workload], step.arms)

        return follow(strategy, self.state, self._live, lambda: self.session.elapsed_s, visit)

    def _live(self) -> dict[str, list[Arm]]:
        """The live arms of each workload; for two sides those that are live on both."""
        live = {workload: self.state.live(workload, self.session.specs) for workload in self.places}
        if self.plan.sides is not None:
            live = {workload: self._on_both_sides(arms) for workload, arms in live.items()}
        return live

    def _on_both_sides(self, arms: Iterable[Arm]) -> list[Arm]:
        live = list(arms)
        sides = Counter(map(self.plan.reference, live))
        return [arm for arm in live if sides[self.plan.reference(arm)] > 1]

    def _show_progress(self, cell: str) -> None:
        share = min(1.0, self.session.elapsed_s / max(self.plan.budget_s, 1e-9))
        if self.name == "time":
            visits = sum(min(self.state.num_visits[workload], self.plan.num_rounds) for workload in self.places)
            share = min(visits / (self.plan.num_rounds * len(self.places)), share)
        self.session.show_progress(self.name, cell, share, 1.0)

    def _num_blocks(self, workload: Workload) -> int:
        """The number of blocks of the next visit: more if they are short compared with the cost of a fresh process.

        Used from the second visit on, since it needs the time of a block.
        """
        least, taken = self.plan.num_blocks, self.state.samples.get(workload.id, {})
        if not taken:
            return least
        block_s = sum(
            median(sample.value * sample.num_calls for sample in samples) for samples in taken.values() if samples
        )
        fixed_s = FRESH_S / max(1, len(self.places))
        if any(map(self.plan.is_alone, self.session.specs)):
            block_s += 2 * WARM_S  # both processes of a comparison begin their part with untimed calls
        else:
            fixed_s += WARM_S  # untimed calls before the first block
        return min(MOST_BLOCKS * least, max(least, int(fixed_s / block_s)))

    def visit(self, workload: Workload, arms: Iterable[Arm]) -> None:
        """Take one visit with the arms, A/A controls and the interference probe, in a random order.

        An arm that fails is dropped, and the visit repeated without it.
        """
        arms = list(arms)
        while live := self.state.live(workload.id, arms):
            if self.plan.sides is not None and not (live := self._on_both_sides(live)):
                return
            self.session.require_worker()  # first, since the request names the epoch
            number = self.state.num_visits[workload.id]
            is_due = (number + self.places.get(workload.id, 0)) % VERIFY_EVERY == 0  # not all in one process
            seed = visit_seed(self.plan.seed, workload.id, number)
            taken = [(arm, self.session.specs[arm]) for arm in live]
            taken += [(arm.as_control(), self.session.specs[arm]) for arm in live if self.plan.is_reference(arm)]
            taken.append((PROBE, ""))
            random.Random(seed).shuffle(taken)
            request = messages.SampleBlocks(
                workload=workload,
                arms=tuple(taken),
                epoch=self.state.num_workers - 1,
                number=number,
                num_blocks=self._num_blocks(workload),
                longest_s=self.plan.visit_s,
                seed=seed,
                known=known(self.state.samples.get(workload.id, {})),
                cache=self.plan.cache,
                launch=self.plan.launch,
                sustained_s=SUSTAINED_S if self.plan.pace == "sustained" else 0.0,
                verifies=is_due or number < self.num_verified,
            )
            reply = self.session.ask(request)
            if isinstance(reply, events.VisitFinished):
                elapsed_s = round(self.session.elapsed_s, 3)
                self.session.record(msgspec.structs.replace(reply, elapsed_s=elapsed_s))
                return
            assert isinstance(reply, messages.Failed)
            if reply.arm != PROBE:
                self.session.record_failure(workload, reply.arm, reply)
                continue
            # The harness itself failed: no arm is responsible, none can be measured, and the workload ends for all.
            message = f"while the harness prepared or read the workload: {reply.message}"
            for arm in self.state.live(workload.id, self.session.specs):
                self.session.record_failure(workload, arm, msgspec.structs.replace(reply, message=message))
            return
