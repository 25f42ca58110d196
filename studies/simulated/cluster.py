"""Simulated hosts that share a queue of workloads over virtual time: some are slow, some drift, some are lost.

Each host is a simulated worker client (virtual.py) with its own world, clock and journal. The coordinator leases some
workloads at a time to a host, which visits them in a fresh process in random order; a block never spans hosts. If a
host is lost, its finished visits count; the rest goes back into the queue. No messages pass during a visit.
"""

import heapq
import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from attnbench.processes.messages import SampleBlocks
from attnbench.storage.events import (
    SCHEMA,
    CellChecked,
    Event,
    Plan,
    RunFinished,
    RunStarted,
    VisitFinished,
    WorkerStarted,
)
from attnbench.storage.journal import JOURNAL, write
from attnbench.storage.records import PROBE, Arm, Status
from attnbench.timing.schedule import visit_seed
from attnbench.workloads.workload import Workload
from studies.simulated.virtual import AGREEMENT, CHECK_S, ENVIRONMENT, START_S, Seconds, SimulatedClient
from studies.simulated.worlds import WORLDS

MOMENT = "2026-01-01T00:00:00+00:00"
NUM_LEASED = 3
"""Workloads leased at a time: more save time for processes, fewer lose less work with a host."""
NUM_VISITS = 24
"""Visits of each leased workload, each in a fresh process, so that one host alone gives enough for a verdict."""


@dataclass(frozen=True, kw_only=True)
class SimulatedHost:
    """A host of a cluster."""

    name: str
    cpu: str
    world: str = "calm"
    slowness: float = 1.0  # factor on the time of its work
    layout: float = 0.002  # effect of a process's memory layout on an arm, as a standard deviation of the log
    joins_s: float = 0.0
    lost_s: float = math.inf


@dataclass(kw_only=True)
class Tally:
    """Cost of a sweep, apart from its journals."""

    num_visits: Counter[str] = field(default_factory=Counter)  # finished visits by host
    useful_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # inside finished visits
    num_cut: int = 0  # unfinished visits: the host was lost or the budget spent
    num_leases: int = 0
    num_messages: int = 0
    num_bytes: int = 0  # reported by hosts
    lost: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Queue:
    """Leases by workload to hosts of one kind; the least leased workload goes next."""

    workloads: Sequence[Workload]
    draws: random.Random
    given: Counter[str] = field(default_factory=Counter)  # visits, including those under way

    def lease(self) -> list[Workload]:
        """Return the next few workloads, and count them as under way."""
        order = self.draws.sample(self.workloads, len(self.workloads))
        chosen = sorted(order, key=lambda workload: self.given[workload.id])[:NUM_LEASED]
        self.given.update({workload.id: NUM_VISITS for workload in chosen})
        return chosen

    def give_back(self, visits: Sequence[Workload]) -> None:
        """Return visits that their host will not make."""
        self.given.subtract(Counter(workload.id for workload in visits))


class HostAtWork:
    """One host as the coordinator sees it: the rest of its lease, and its journal so far."""

    def __init__(self, host: SimulatedHost, plan: Plan, seconds: Seconds, seed: int) -> None:
        """Start without a lease."""
        self.host, self.plan, self.seed = host, plan, seed
        self.client = SimulatedClient(
            WORLDS[host.world], lambda *cell: host.slowness * seconds(*cell), seed=seed, layout=host.layout
        )
        self.environment = msgspec.structs.replace(ENVIRONMENT, cpu=host.cpu)
        self.left: list[Workload] = []  # each entry is one visit
        self.visited: set[str] = set()  # by the current process
        self.epoch = -1
        self.num_visits: Counter[str] = Counter()
        self.checked: set[str] = set()
        self.history: list[Event] = [
            RunStarted(schema=SCHEMA, run=host.name, time=MOMENT, commit="", plan=plan),
        ]
        specs = [(arm, spec) for arm, spec in plan.specs.items()]
        reference = Arm(implementation=plan.baseline)
        self.arms = (*specs, (reference.as_control(), plan.baseline), (PROBE, ""))

    def begin(self, workloads: Sequence[Workload]) -> float:
        """Start a process for a lease, and check new workloads; return the seconds that takes."""
        self._start()
        draws = random.Random(f"{self.seed}/{self.epoch}")
        self.left = [each for _ in range(NUM_VISITS) for each in draws.sample(workloads, len(workloads))]
        new = [workload for workload in workloads if workload.id not in self.checked]
        for workload in new:
            self.checked.add(workload.id)
            for name in self.plan.implementations:
                checked = CellChecked(
                    workload=workload.id, implementation=name, status=Status.ok, agreement=AGREEMENT, check_s=CHECK_S
                )
                self.history.append(checked)
        return START_S + self.host.slowness * CHECK_S * len(new) * len(self.plan.implementations)

    def _start(self) -> None:
        self.epoch += 1
        self.client.start(self.epoch)
        self.visited.clear()
        self.history.append(WorkerStarted(time=MOMENT, environment=self.environment))

    def visit(self) -> tuple[VisitFinished, float]:
        """Return the next visit and its seconds: a process visits each workload once."""
        workload, before_s = self.left[-1], self.client.clock.now()
        if workload.id in self.visited:
            self._start()
        self.visited.add(workload.id)
        number = self.num_visits[workload.id]
        asked = SampleBlocks(
            workload=workload,
            arms=self.arms,
            epoch=self.epoch,
            number=number,
            num_blocks=self.plan.num_blocks,
            seed=visit_seed(self.seed, workload.id, number),
        )
        taken = self.client.ask(asked)
        assert isinstance(taken, VisitFinished)
        return taken, self.client.clock.now() - before_s

    def keep(self, visit: VisitFinished) -> None:
        """Write a finished visit to the journal."""
        self.left.pop()
        self.num_visits[visit.workload] += 1
        self.history.append(visit)


def sweep(
    hosts: Sequence[SimulatedHost], plan: Plan, seconds: dict[str, Seconds], folder: Path, *, seed: int = 0
) -> Tally:
    """Let hosts work for the budget of the plan, and write a journal for each below `folder`.

    `seconds` is the truth for each host, by its name.
    """
    tally, encode = Tally(), msgspec.json.Encoder().encode
    queues: defaultdict[str, Queue] = defaultdict(lambda: Queue(workloads=plan.workloads, draws=random.Random(seed)))
    at_work = [HostAtWork(host, plan, seconds[host.name], seed + 7919 * place) for place, host in enumerate(hosts)]
    ready = [(each.host.joins_s, place) for place, each in enumerate(at_work)]
    heapq.heapify(ready)
    while ready:
        now_s, place = heapq.heappop(ready)
        worker = at_work[place]
        host, ends_s = worker.host, min(worker.host.lost_s, plan.budget_s)
        if not worker.left and now_s < ends_s:
            took_s = worker.begin(queues[host.cpu].lease())
            tally.num_leases += 1
            tally.num_messages += 2  # a request and its answer
        elif now_s < ends_s:
            visit, took_s = worker.visit()
            if now_s + took_s <= ends_s:
                worker.keep(visit)
                tally.num_visits[host.name] += 1
                tally.useful_s[host.name] += took_s
                tally.num_messages += 1  # the report
                tally.num_bytes += len(encode(visit))
            else:
                tally.num_cut += 1
        else:
            took_s = math.inf
        if now_s + took_s > ends_s:
            queues[host.cpu].give_back(worker.left)
            worker.left = []
            if host.lost_s < plan.budget_s:
                tally.lost.append(host.name)
            _write(worker, folder)
        else:
            heapq.heappush(ready, (now_s + took_s, place))
    return tally


def _write(worker: HostAtWork, folder: Path) -> None:
    is_lost = worker.host.lost_s < worker.plan.budget_s
    ended = [] if is_lost else [RunFinished(time=MOMENT, elapsed_s=worker.plan.budget_s, reason="made")]
    path = folder / worker.host.name / JOURNAL
    path.parent.mkdir(parents=True)
    write(path, [*worker.history, *ended])
    worker.history.clear()
    worker.client.stop()
