"""Learn a policy from runs: the winner at each measured shape, and the cost of choosing by the nearest shape."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np

from attnbench import plugins
from attnbench.analysis.comparisons import doubts, session_effects
from attnbench.analysis.results import Results
from attnbench.storage.records import Key, Status
from attnbench.workloads.policy import (
    ITSELF,
    OTHERWISE,
    Evidence,
    Kind,
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
    logs: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # one entry for each run
    unsupported: set[str] = field(default_factory=set)

    def log(self, name: str) -> float:
        """The log ratio of choosing a candidate, timed or not."""
        if name == OTHERWISE or name in self.unsupported:  # the policy falls back to sdpa
            return 0.0
        return float(np.mean([log for log, _ in self.logs[name]])) if name in self.logs else LOST

    def half_width(self, name: str) -> float:
        """Half-width of the interval of that log ratio; infinite with too few processes."""
        halves = [half for _, half in self.logs[name]]
        return math.hypot(*halves) / len(halves)

    def winner(self, smallest_effect: float) -> str:
        """The fastest candidate if it beats sdpa beyond the margin and the noise, else sdpa."""
        name = min([OTHERWISE, *self.logs], key=self.log)
        is_faster = name != OTHERWISE and self.log(name) < -math.log1p(smallest_effect)
        return name if is_faster and self.log(name) + self.half_width(name) < 0 else OTHERWISE


def learn(results: Sequence[Results], *, smallest_effect: float = SMALLEST_EFFECT) -> Policy:
    """Learn the policy that the runs of one machine support; candidates are implementations with a name.

    Raises:
        ValueError: the runs are from several machines, timed replayed graphs, or have no workload that timed both
            `sdpa` and another implementation.
    """
    if graphs := [run.run for run in results if run.plan.launch == "graph"]:
        raise ValueError(
            f"{', '.join(graphs)} timed graphs that are replayed, and a policy chooses for calls that are made one by "
            "one: give runs without --conditions graph"
        )
    runs = [run for run in results if run.plan.sides is None]
    environments = [environment for run in runs for environment in run.environments.values()]
    machines = {environment.machine_fingerprint: environment for environment in environments}
    if len(machines) != 1:
        names = ", ".join(machines) or "none"
        raise ValueError(f"a policy holds for one machine, and these runs are of {names}: give the runs of one")
    machine = environments[0]
    table = measure(runs)
    winners = [entry.winner(smallest_effect) for entry in table]
    return Policy(
        machine=machine.machine_fingerprint,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=machine.machine(),
        num_threads=machine.num_threads,
        evidence=Evidence(
            runs=tuple(run.run for run in runs),
            candidates=tuple(sorted({name for entry in table for name in entry.logs})),
            fingerprints=tuple(dict.fromkeys(environment.fingerprint for environment in environments)),
            smallest_effect=smallest_effect,
            seconds=round(sum(run.elapsed_s or 0.0 for run in runs), 1),
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


def measure(results: Sequence[Results]) -> list[Measured]:
    """Workloads with a time of `sdpa`, without candidates that were wrong on any workload.

    Raises:
        ValueError: there is none, or no other implementation was timed.
    """
    table: dict[Workload, Measured] = {}
    wrong = {record.implementation for run in results for record in run.records if record.is_wrong}
    for run in results:
        named = {plugins.name_of(spec) for spec in run.plan.implementations if is_named(spec)} - wrong
        logs = _log_ratios(run)
        sdpa = {key[0]: log for key, log in logs.items() if key[1].implementation == OTHERWISE}
        for record in run.records:
            workload, name = record.workload, record.implementation
            if workload.id not in sdpa or name not in named or not is_plain(workload):
                continue
            entry = table.setdefault(workload, Measured(workload=workload))
            if record.environment is not None:
                entry.num_threads = record.environment.num_threads
            if record.status is Status.unsupported:
                entry.unsupported.add(name)
            if record.key in logs and name != OTHERWISE:
                (log, half), (sdpa_log, sdpa_half) = logs[record.key], sdpa[workload.id]
                width = math.inf if half is None or sdpa_half is None else math.hypot(half, sdpa_half)
                entry.logs.setdefault(name, []).append((log - sdpa_log, width))
    if not any(entry.logs for entry in table.values()):
        raise ValueError(
            f"these runs have no workload of a policy on which {OTHERWISE} and another were timed: run several "
            "implementations in scope attention, sdpa among them"
        )
    return [*table.values()]


def _log_ratios(run: Results) -> dict[Key, tuple[float, float | None]]:
    """For each cell, the log ratio to its baseline and the half-width of its interval.

    The width is None if there are too few processes, or if other work may have changed the times.
    """
    is_doubtful = bool(doubts(run))
    logs = {
        key: (effect.log, None if is_doubtful else effect.half_width(LEVEL))
        for key, effect in session_effects(run).items()
    }
    baselines = (record.key for record in run.records if record.status is Status.ok)
    return logs | {key: (0.0, 0.0) for key in baselines if run.plan.is_reference(key[1])}


def regret(table: Sequence[Measured], winners: Sequence[str]) -> Regret:
    """Leave-one-out regret of the policy: each workload uses the winner at the nearest other workload."""
    kinds: dict[Kind, list[int]] = {}
    for row, entry in enumerate(table):
        kinds.setdefault(kind_of(entry.workload, entry.num_threads), []).append(row)
    best = np.array([entry.log(winner) for entry, winner in zip(table, winners, strict=True)])
    costs = np.zeros(len(table))
    for rows in kinds.values():
        logs = logs_of([shape_of(table[row].workload) for row in rows])
        for place, row in enumerate(rows):
            others = logs.copy()
            others[place] = math.inf
            neighbour = nearest(others, logs[place])
            costs[row] = 0.0 if neighbour is None else table[row].log(winners[rows[neighbour]])
    extra = np.maximum(costs - best, 0.0)
    return Regret(
        mean=math.expm1(extra.mean()),
        worst=math.expm1(extra.max()),
        sdpa_mean=math.expm1(-best.mean()),
        sdpa_worst=math.expm1(-best.min()),
    )


def is_named(spec: str) -> bool:
    """Whether a spec is a plain name, valid in other processes too, and not the policy's own."""
    base, _ = plugins.variant(spec)
    return base in plugins.implementation_names() and base != ITSELF
