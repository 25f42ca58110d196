"""A simulated worker client: it answers the requests of a run without a process, in simulated time.

True times are known, a run of minutes takes a second, and equal seeds give equal samples. A world (worlds.py) adds the
noise. All other code is attnbench's: timing/blocks.py takes samples, processes/execution.py writes the journal.
"""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from attnbench.analysis.results import Results, read
from attnbench.devices.loads import Load, measure_loads
from attnbench.plugins import name_of
from attnbench.processes import execution
from attnbench.processes.messages import Failed, SampleBlocks, Started, T, Target
from attnbench.processes.worker_client import WorkerClient
from attnbench.processes.worker_pool import WorkerPool
from attnbench.storage.events import (
    CeilingsMeasured,
    CellChecked,
    CellMeasured,
    CellProfiled,
    Plan,
    Side,
    Sides,
    VisitFinished,
)
from attnbench.storage.records import (
    BASE,
    CANDIDATE,
    COPY,
    KEPT,
    MATMUL,
    PROBE,
    Agreement,
    Arm,
    Ceilings,
    Environment,
    Measurement,
    Operator,
    Operators,
    ProbeResult,
    Sample,
    Status,
    TensorError,
)
from attnbench.timing import blocks
from attnbench.workloads.workload import Workload
from studies.simulated.machine import Machine, VirtualClock
from studies.simulated.worlds import World

PROBE_S = 0.3e-3
"""True seconds of one call of the interference probe, a fixed piece of work in every block."""
MATMUL_RATE, COPY_RATE = 1e13, 1e12
"""Highest rates of the simulated machine, in FLOP/s and bytes/s; no simulated implementation reaches them."""
START_S = 0.5
"""Simulated seconds to start two workers."""
CHECK_S = 0.05
"""Simulated seconds to check one implementation on one workload."""

ENVIRONMENT = Environment(
    cpu="simulated",
    cpu_capability="none",
    num_physical_cores=1,
    num_logical_cores=1,
    memory_bytes=2**30,
    system="virtual",
    python="3",
    versions={},
)
_TENSOR = TensorError(
    tensor="output",
    error=1e-7,
    allowed=1e-6,
    worst=(0, 0, 0),
    expected=0.5,
    actual=0.5,
)
AGREEMENT = Agreement(probes=(ProbeResult(probe="normal", tensors=(_TENSOR,)),))
OPERATORS = Operators(calls=(Operator(name="simulated", num_calls=1, self_s=1e-3),))

Seconds = Callable[[Workload, str], float]
"""Function from a workload and the name of an implementation to the true seconds of one call."""
Faults = Callable[[Workload, str], int]
"""Function from a workload and the name of an implementation to the number of minor page faults of one call."""
FLUSH_S = 20e-3
"""Simulated seconds to empty the caches."""


class SimulatedClient(WorkerClient):
    """A client that answers like a worker, on a simulated machine; a new process continues the clock of the last one.

    `seconds` gives the true time of a call. Each process has random effects on the log scale: one for each arm
    (implementation in a block), such as memory addresses cause, with standard deviation `layout`, and one for all arms,
    with standard deviation `process`. `faults` gives the page faults of a call; the true time includes their time.
    """

    def __init__(  # noqa: PLR0913 - all but the first two have defaults
        self,
        world: World,
        seconds: Seconds,
        *,
        seed: int = 0,
        layout: float = 0.0,
        process: float = 0.0,
        faults: Faults = lambda *_: 0,
    ) -> None:
        """Create the machine and its clock; `start` starts the first process."""
        self.seconds, self.faults = seconds, faults
        self.machine = Machine(world, seed)
        self.clock = VirtualClock(self.machine)
        self.seed, self.layout, self.process = seed, layout, process
        self._epoch: int | None = None
        self._calls: dict[tuple[str, Arm], blocks.TimedCall] = {}

    @property
    def is_running(self) -> bool:
        """Whether a simulated process was started and not stopped."""
        return self._epoch is not None

    def start(self, layout: int = 0) -> Started:
        """Start a fresh process; the number `layout` is part of the seed of its random effects."""
        self.stop()
        self._epoch = layout
        return Started(environment=ENVIRONMENT)

    def ask(self, function: str, result: type[T], /, **arguments: Any) -> T | Failed:  # noqa: ANN401 - of any function
        """Call the method `function`, and return its reply."""
        assert self._epoch is not None
        reply = getattr(self, function)(**arguments)
        assert isinstance(reply, result | Failed)
        return reply

    def check(self, cell: Target, **_: object) -> CellChecked | Failed:
        """Reply that the cell (implementation on a workload) is right, after CHECK_S simulated seconds."""
        self.clock.spend(CHECK_S)
        return CellChecked(**cell.names, status=Status.ok, agreement=AGREEMENT, check_s=CHECK_S)

    def profile(self, cell: Target) -> CellProfiled | Failed:
        """Reply with the same profile for every cell: one operator."""
        return CellProfiled(**cell.names, operators=OPERATORS)

    def observe(self, cell: Target, metric: str) -> CellMeasured | Failed:
        """Reply with a fixed number of bytes: 0 for a metric in KEPT, 1 MiB for any other metric."""
        sample = Sample(value=0.0 if metric in KEPT else 2.0**20)
        return CellMeasured(**cell.names, measurement=Measurement(metric=metric, unit="bytes", samples=(sample,)))

    def measure_ceilings(self, workload: Workload, limit_s: float) -> CeilingsMeasured | Failed:
        """Reply with the ceilings of the machine: the measured rates of simulated matrix products and copies."""
        device, dtype, num_threads = workload.place
        spend = self.clock.spend
        made = [
            Load(kind=kind, dtype=dtype, size=1, amount=int(amount), call=lambda s=amount / rate: spend(s))  # type: ignore[misc] # mypy knows no type of a default
            for kind, rate in ((MATMUL, MATMUL_RATE), (COPY, COPY_RATE))
            for amount in (1e-3 * rate, 1e-2 * rate)
        ]
        samples = measure_loads(made, self.clock, limit_s, self.machine.turn)
        return CeilingsMeasured(ceilings=Ceilings(device=device, dtype=dtype, num_threads=num_threads, samples=samples))

    def sample_blocks(self, visit: SampleBlocks) -> VisitFinished | Failed:
        """Time a visit (a few blocks of one workload) on the simulated machine, and reply with the samples."""
        start_s = self.clock.now()
        calls = [self._timed((visit.workload.id, arm), visit.workload, spec) for arm, spec in visit.arms]
        taken = blocks.visit(calls, self.clock, visit, self._conditions(len(calls), is_cold=visit.cache == "cold"))
        return visit.finished(taken, self.clock.now() - start_s)

    def _conditions(self, num_slots: int, *, is_cold: bool) -> blocks.Conditions:
        def flush() -> None:
            self.clock.spend(FLUSH_S)
            self.machine.forget()

        return blocks.Conditions(
            on_turn=lambda _: self.machine.turn(),
            count_faults=lambda: self.machine.num_faults,
            read_load=lambda: self.machine.load(self.clock.now()),
            read_waits=dict,
            flush=flush if is_cold else None,
            on_block=lambda: self.machine.begin_visit(num_slots),
        )

    def _timed(self, key: tuple[str, Arm], workload: Workload, spec: str) -> blocks.TimedCall:
        """Return the call of an arm (implementation in a block), built at first use and kept until the process ends."""
        place, arm = key
        if key not in self._calls:
            truth_s = PROBE_S if arm == PROBE else self.seconds(workload, name_of(spec))
            shift = self.layout * random.Random(f"{self.seed}/{self._epoch}/{place}/{arm}").gauss(0.0, 1.0)
            shift += self.process * random.Random(f"{self.seed}/{self._epoch}").gauss(0.0, 1.0)
            cost_s = truth_s * math.exp(shift)
            num_faults = 0 if arm == PROBE else self.faults(workload, name_of(spec))

            def call() -> None:
                self._call(cost_s, num_faults)

            self._calls[key] = blocks.TimedCall(arm=arm, call=call)
        return self._calls[key]

    def _call(self, cost_s: float, num_faults: int) -> None:
        self.clock.spend(cost_s)
        self.machine.num_faults += num_faults

    def stop(self) -> None:
        """End the process at once."""
        self._epoch = None
        self._calls.clear()


class SimulatedPair(WorkerPool):
    """Two simulated workers on one machine, as if two compared states of the code had separate processes."""

    def __init__(
        self, world: World, seconds: Seconds, *, seed: int = 0, layout: float = 0.0, process: float = 0.0
    ) -> None:
        """Create two workers that share one machine and its clock; `start` starts their processes."""
        base, candidate = (SimulatedClient(world, seconds, seed=seed, layout=layout, process=process) for _ in range(2))
        super().__init__({BASE: base, CANDIDATE: candidate}, lambda arm: arm.side, seed=seed)
        self.clock = base.clock
        candidate.clock, candidate.machine = base.clock, base.machine

    def start(self, layout: int = 0) -> Started:
        """Start two fresh processes, which takes START_S simulated seconds."""
        self.clock.spend(START_S)
        return super().start(layout)


def execute(plan: Plan, folder: Path, client: SimulatedClient | SimulatedPair) -> Results:
    """Run the whole plan with a simulated client, store the run in `folder`, and return its results."""
    execution.execute(plan, folder, lambda _: None, client=client, clock=client.clock.now, read_counters=lambda: None)
    return read(folder)


def workloads(number: int) -> tuple[Workload, ...]:
    """Build workloads that differ in length: 8, 16, 24 and so on."""
    return tuple(Workload(seq_len=8 * (place + 1)) for place in range(number))


def plan(num_workloads: int, names: Sequence[str], *, budget_s: float, seed: int = 0) -> Plan:
    """Plan a run that checks and times the implementations `names`, the first of which is the baseline."""
    return Plan(
        sweep="virtual",
        workloads=workloads(num_workloads),
        implementations=tuple(names),
        baseline=names[0],
        metrics=("latency",),
        budget_s=budget_s,
        call_limit_s=60.0,
        timeout_s=60.0,
        seed=seed,
    )


def with_sides(given: Plan, *, is_apart: bool = False) -> Plan:
    """Change a plan so that it compares two sides (states of the code) of each implementation, without a baseline."""
    base = {name: f"{name} (base)" for name in given.implementations}
    sides = Sides(
        base=Side(given="rev:old", implementations=base),
        candidate=Side(given="rev:new", implementations={name: name for name in base}),
        is_apart=is_apart,
    )
    return msgspec.structs.replace(given, implementations=(), baseline="", sides=sides)
