"""Learn a policy from a run: the winner at each measured shape, and the cost of choosing by the nearest shape."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np

from attnbench import plugins
from attnbench.analysis.comparisons import doubts, session_effects
from attnbench.analysis.results import Results
from attnbench.storage.records import Status
from attnbench.workloads.policy import (
    OTHERWISE,
    Evidence,
    Policy,
    Regret,
    Row,
    is_plain,
    kind_of,
    logs_of,
    nearest,
    shape_of,
)
from attnbench.workloads.sweep import SMALLEST_EFFECT
from attnbench.workloads.workload import Workload

LOST = math.log(2.5)
"""Log ratio charged for an implementation that failed at a shape, or was predicted to be too slow to time."""
LEVEL = 0.05
"""Two-sided error of the intervals; not corrected over cells, since each shape decides only its own winner."""


@dataclass(kw_only=True)
class Measured:
    """The candidates on one workload: log ratios of their times to sdpa's, each with the half-width of its interval."""

    workload: Workload
    num_threads: int = 0
    logs: dict[str, tuple[float, float]] = field(default_factory=dict)
    unsupported: set[str] = field(default_factory=set)

    def log(self, name: str) -> float:
        """The log ratio of choosing a candidate, timed or not."""
        if name == OTHERWISE or name in self.unsupported:  # the policy falls back to sdpa
            return 0.0
        return self.logs[name][0] if name in self.logs else LOST

    def winner(self, smallest_effect: float) -> str:
        """The fastest candidate if it beats sdpa beyond the margin and the noise, else sdpa."""
        name = min([OTHERWISE, *self.logs], key=self.log)
        log, half = self.logs.get(name, (0.0, 0.0))
        return name if log < -math.log1p(smallest_effect) and log + half < 0 else OTHERWISE


def learn(run: Results, *, smallest_effect: float = SMALLEST_EFFECT) -> Policy:
    """Learn the policy that a run supports; candidates are implementations with a name.

    Raises:
        ValueError: the run is of several machines, compared with something other than `sdpa`, timed replayed graphs, or
            has no workload that timed both `sdpa` and another implementation.
    """
    if run.plan.launch == "graph":
        raise ValueError(
            f"{run.run} timed graphs that are replayed, and a policy chooses for calls that are made one by one: give "
            "a run without --conditions graph"
        )
    machines = {environment.machine_fingerprint: environment for environment in run.environments.values()}
    if len(machines) != 1:
        raise ValueError(f"a policy holds for one machine, and {run.run} is of {len(machines)}: give a run of one")
    ((fingerprint, machine),) = machines.items()
    table = measure(run)
    winners = [entry.winner(smallest_effect) for entry in table]
    return Policy(
        machine=fingerprint,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=machine.machine(),
        num_threads=machine.num_threads,
        evidence=Evidence(
            runs=(run.run,),
            candidates=tuple(sorted({name for entry in table for name in entry.logs})),
            fingerprints=tuple(run.environments),
            smallest_effect=smallest_effect,
            seconds=round(run.elapsed_s or 0.0, 1),
        ),
        regret=regret(table, winners),
        rows=tuple(
            Row(
                *kind_of(entry.workload, entry.num_threads),
                *shape_of(entry.workload),
                winner,
                float(f"{math.exp(entry.log(winner)):.3g}"),
            )
            for entry, winner in zip(table, winners, strict=True)
        ),
    )


def measure(run: Results) -> list[Measured]:
    """Workloads with a time of `sdpa`, without candidates that were wrong on any workload.

    No interval is known with too few processes, or if other work may have changed the times.

    Raises:
        ValueError: there is none, or no other implementation was timed.
    """
    wrong = {record.implementation for record in run.records if record.is_wrong}
    named = {plugins.name_of(spec) for spec in run.plan.implementations if is_named(spec)} - wrong
    effects, is_doubtful = session_effects(run), bool(doubts(run))
    timed = {
        record.workload.id
        for record in run.records
        if record.status is Status.ok and run.plan.is_reference(record.arm) and record.implementation == OTHERWISE
    }
    table: dict[Workload, Measured] = {}
    for record in run.records:
        workload, name = record.workload, record.implementation
        if workload.id not in timed or name not in named or not is_plain(workload):
            continue
        entry = table.setdefault(workload, Measured(workload=workload))
        if record.environment is not None:
            entry.num_threads = record.environment.num_threads
        if record.status is Status.unsupported:
            entry.unsupported.add(name)
        if (effect := effects.get(record.key)) is not None:
            half = None if is_doubtful else effect.half_width(LEVEL)
            entry.logs[name] = effect.log, math.inf if half is None else half
    if not any(entry.logs for entry in table.values()):
        raise ValueError(
            f"{run.run} has no workload of a policy on which {OTHERWISE}, its baseline, and another were timed: run "
            "several implementations in scope attention, sdpa among them"
        )
    return [*table.values()]


def regret(table: Sequence[Measured], winners: Sequence[str]) -> Regret:
    """Leave-one-out regret of the policy: each workload uses the winner at the nearest other workload."""
    kinds = [kind_of(entry.workload, entry.num_threads) for entry in table]
    logs = logs_of([shape_of(entry.workload) for entry in table])
    best = np.array([entry.log(winner) for entry, winner in zip(table, winners, strict=True)])  # sdpa's is 0
    costs = np.zeros(len(table))
    for row, entry in enumerate(table):
        others = np.array([other for other, kind in enumerate(kinds) if kind == kinds[row] and other != row], dtype=int)
        neighbour = nearest(logs[others], logs[row])
        costs[row] = 0.0 if neighbour is None else entry.log(winners[others[neighbour]])
    extra = np.maximum(costs - best, 0.0)
    return Regret(
        mean=math.expm1(extra.mean()),
        worst=math.expm1(extra.max()),
        sdpa_mean=math.expm1(abs(best.mean())),
        sdpa_worst=math.expm1(abs(best.min())),
    )


def is_named(spec: str) -> bool:
    """Whether a spec is a plain name, valid in other processes too."""
    base, _ = plugins.variant(spec)
    return base in plugins.implementation_names()
