"""Learn a policy from a run: the winner at each measured shape, and the cost of using the nearest shape's winner."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from attnbench import plugins
from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.results import Results
from attnbench.storage.events import now
from attnbench.storage.records import LATENCY, Status, Verdict
from attnbench.workloads.policy import (
    OTHERWISE,
    Evidence,
    Policy,
    Regret,
    Row,
    is_plain,
    logs_of,
    nearest,
    shape_key_of,
    shape_of,
)
from attnbench.workloads.workload import Workload

LOST = math.log(2.5)
"""Log ratio charged to an implementation without a time at a shape, because it failed or was too slow to try."""


@dataclass(kw_only=True)
class Measured:
    """Log ratios of the candidates' times to the time of sdpa on one workload, and the winner.

    The winner is the fastest candidate with the verdict faster, or sdpa if there is none.
    """

    workload: Workload
    logs: dict[str, float] = field(default_factory=dict)  # 0 for an unsupported candidate: the policy calls sdpa
    winner: str = OTHERWISE

    def log(self, name: str) -> float:
        """Return the log time ratio of a candidate to sdpa: 0 if the policy would call sdpa, LOST without a time."""
        return 0.0 if name == OTHERWISE else self.logs.get(name, LOST)


def learn(run: Results) -> Policy:
    """Learn a policy from a run; the candidates are implementations with a known name, not those in files.

    Raises:
        ValueError: the run used several machines, timed replays of CUDA graphs, has another baseline than `sdpa`, or
            has no workload on which both `sdpa` and another implementation were timed.
    """
    if run.plan.launch == "graph":
        timed = f"{run.run} timed replayed graphs"
        raise ValueError(f"{timed}, and a policy chooses single calls: leave out --conditions graph")
    machines = {environment.machine_fingerprint: environment for environment in run.environments.values()}
    if len(machines) != 1:
        raise ValueError(f"a policy holds for one machine, but {run.run} used {len(machines)}: give a run of one")
    ((fingerprint, machine),) = machines.items()
    table = measure(run)
    return Policy(
        machine=fingerprint,
        date=now(),
        environment=machine.machine(),
        num_threads=machine.num_threads,
        evidence=Evidence(
            runs=(run.run,),
            candidates=tuple(sorted({name for entry in table for name in entry.logs})),
            fingerprints=tuple(run.environments),
            smallest_effect=run.plan.smallest_effect,
            seconds=round(run.elapsed_s or 0.0, 1),
        ),
        regret=regret(table),
        rows=tuple(
            Row(
                *shape_key_of(entry.workload, machine.num_threads),
                *shape_of(entry.workload),
                entry.winner,
                float(f"{math.exp(entry.log(entry.winner)):.3g}"),
            )
            for entry in table
        ),
    )


def measure(run: Results) -> list[Measured]:
    """Return the log ratios on each plain workload (`is_plain`) on which `sdpa` was timed.

    Candidates that were wrong on any workload are left out.

    Raises:
        ValueError: no workload has times of both `sdpa` and a candidate.
    """
    wrong = {record.implementation for record in run.records if record.is_wrong}
    known = plugins.implementation_names()  # other processes know these too, unlike files
    named = {plugins.name_of(spec) for spec in run.plan.implementations if plugins.variant(spec)[0] in known} - wrong
    table = {
        record.workload.id: Measured(workload=record.workload)
        for record in run.records
        if record.implementation == OTHERWISE and record.samples(LATENCY) and is_plain(record.workload)
    }
    for record in run.records:
        if record.workload.id in table and record.implementation in named and record.status is Status.unsupported:
            table[record.workload.id].logs[record.implementation] = 0.0
    compared = [
        each
        for each in comparisons(run)
        if each.workload.id in table and each.implementation in named and each.baseline == OTHERWISE
    ]
    for each in compared:
        entry = table[each.workload.id]
        entry.logs[each.implementation] = each.effect.log
        if each.verdict is Verdict.faster and each.effect.log < entry.log(entry.winner):
            entry.winner = each.implementation
    if not compared:
        raise ValueError(
            f"{run.run} has no workload that a policy covers with times of {OTHERWISE}, its baseline, and of another "
            "implementation: run several implementations in scope attention, including sdpa"
        )
    return [*table.values()]


def regret(table: Sequence[Measured]) -> Regret:
    """Estimate the policy's regret (its extra time as a share of the best choice's time) by leaving one workload out.

    In turn, each workload is treated as unmeasured: the policy chooses the winner at the nearest other workload of the
    same kind or, if there is none, sdpa.
    """
    kinds = [shape_key_of(entry.workload, 0) for entry in table]
    logs = logs_of([shape_of(entry.workload) for entry in table])
    best = np.array([entry.log(entry.winner) for entry in table])  # 0 where sdpa wins
    costs = np.zeros(len(table))
    for row, entry in enumerate(table):
        others = np.array([other for other, kind in enumerate(kinds) if kind == kinds[row] and other != row], dtype=int)
        neighbour = nearest(logs[others], logs[row])
        costs[row] = 0.0 if neighbour is None else entry.log(table[others[neighbour]].winner)
    extra = np.maximum(costs - best, 0.0)
    return Regret(
        mean=math.expm1(extra.mean()),
        worst=math.expm1(extra.max()),
        sdpa_mean=math.expm1(abs(best.mean())),
        sdpa_worst=math.expm1(abs(best.min())),
    )
