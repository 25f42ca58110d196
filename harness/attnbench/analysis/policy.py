"""Learn a policy from runs: what each candidate took over `sdpa`, and how far apart workloads are still alike.

What counts is the logarithm of the time divided by that of `sdpa`, which comes from blocks that have both. In each kind
of call all candidates share the scales of one Gaussian process, which make what was measured most likely. What the
policy costs is found by cross-validation: each workload is judged by a policy that was learned without it.

Source: C. Rasmussen and C. Williams, Gaussian Processes for Machine Learning, 2006, equations 2.30 and 5.8, with
automatic relevance determination (section 5.1).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnbench import plugins
from attnbench.analysis.comparisons import compared
from attnbench.analysis.results import Results
from attnbench.storage.records import Environment, Status
from attnbench.workloads.policy import (
    AXES,
    COORDINATES,
    ITSELF,
    KINDS,
    LEAST_SPREAD,
    LOST,
    NEARLY,
    OTHERWISE,
    Evidence,
    Kind,
    Policy,
    Regret,
    Values,
    coordinates,
    correlation,
    is_plain,
    values_of,
)
from attnbench.workloads.sweep import SMALLEST_EFFECT
from attnbench.workloads.workload import Workload

FEWEST_WORKLOADS = 3
"""Of a kind; with fewer, sdpa is called."""
NUM_FOLDS = 10
USUAL_SCALE = 2.5
"""Sizes are expected to be alike within so many natural logarithms."""
FIRMNESS = 0.02
"""How firmly that is expected, against each candidate's likelihood."""
LEAST_NOISE = 1e-4
"""Relative to the variance of the log ratios."""

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Workloads by their axes, and for each candidate the log of its time divided by `sdpa`'s; NaN: it did not run."""

    values: tuple[Values, ...]
    names: tuple[str, ...]
    logs: Floats  # (workloads, candidates)
    is_refused: Booleans  # unsupported there: whoever chooses it gets sdpa

    def part(self, chosen: Any) -> "Measured":  # noqa: ANN401 - whatever indexes an array
        """Some of the workloads."""
        values = tuple(self.values[each] for each in np.arange(len(self.values))[chosen])
        return replace(self, values=values, logs=self.logs[chosen], is_refused=self.is_refused[chosen])

    def cost(self, row: int, name: str) -> float:
        """The log ratio of choosing that candidate, known or not."""
        if name == OTHERWISE:
            return 0.0
        column = self.names.index(name)
        log = float(self.logs[row, column])
        if math.isnan(log):
            return 0.0 if self.is_refused[row, column] else LOST
        return log

    @property
    def best(self) -> Floats:
        """The least log ratio of each workload, sdpa's own 0 included."""
        known: Floats = np.nan_to_num(self.logs, nan=math.inf).min(axis=1, initial=0.0)
        return known


def learn(results: Sequence[Results], *, smallest_effect: float = SMALLEST_EFFECT) -> Policy:
    """The policy that runs of one machine support; candidates are implementations that have a name.

    Raises:
        ValueError: the runs are of several machines, replayed graphs, or have no workload on which `sdpa` and another
            were timed.
    """
    if graphs := [each.run for each in results if each.plan.launch == "graph"]:
        raise ValueError(
            f"{', '.join(graphs)} timed graphs that are replayed, and a policy chooses for calls that are made one by "
            "one: give runs with --launch eager"
        )
    runs = [each for each in results if each.plan.sides is None]
    environments = [environment for each in runs for environment in each.environments.values()]
    machines = {each.machine_fingerprint: each for each in environments}
    if len(machines) != 1:
        found = ", ".join(machines) or "none"
        raise ValueError(f"a policy holds for one machine, and these runs are of {found}: give the runs of one")
    machine: Environment = environments[0]
    measured = table(runs)
    regrets, without = held_out(measured, smallest_effect), -measured.best
    return Policy(
        machine=machine.machine_fingerprint,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=machine.machine(),
        num_threads=machine.num_threads,
        evidence=Evidence(
            runs=tuple(each.run for each in runs),
            num_workloads=len(measured.values),
            candidates=measured.names,
            fingerprints=tuple(dict.fromkeys(each.fingerprint for each in environments)),
            smallest_effect=smallest_effect,
        ),
        regret=Regret(
            mean=math.expm1(float(regrets.mean())),
            worst=math.expm1(float(regrets.max())),
            sdpa_mean=math.expm1(float(without.mean())),
            sdpa_worst=math.expm1(float(without.max())),
        ),
        kinds=tuple(kinds(measured, smallest_effect)),
    )


def table(results: Sequence[Results]) -> Measured:
    """What runs say of the workloads on which `sdpa` was timed; of one that several have, the mean.

    Raises:
        ValueError: there is none, or no other implementation was timed.
    """
    logs: dict[Workload, dict[str, list[float]]] = {}
    refused: set[tuple[Workload, str]] = set()
    wrong: set[str] = set()
    threads: dict[Workload, int] = {}
    for run in results:
        named = {plugins.name_of(spec) for spec in run.plan.implementations if is_named(spec)}
        ratios = {key: each.effect.log for key, each in compared(run).items()}
        for record in run.records:
            if record.is_wrong:
                wrong.add(record.implementation)
            if record.status is Status.ok and run.plan.is_reference(record.arm):
                ratios[record.key] = 0.0
        sdpa = {key[0]: each for key, each in ratios.items() if key[1].implementation == OTHERWISE}
        for record in run.records:
            workload, name = record.workload, record.implementation
            if workload.id not in sdpa or name not in named or not is_plain(workload):
                continue
            if record.environment is not None:
                threads[workload] = record.environment.num_threads
            own = logs.setdefault(workload, {})
            if record.status is Status.unsupported:
                refused.add((workload, name))
            if record.key in ratios and name != OTHERWISE:
                own.setdefault(name, []).append(ratios[record.key] - sdpa[workload.id])
    names = sorted({name for own in logs.values() for name in own} - wrong)
    if not names:
        raise ValueError(
            f"these runs have no workload of a policy on which {OTHERWISE} and another were timed: run several "
            "implementations in scope attention, sdpa among them"
        )
    workloads = list(logs)
    shape = (len(workloads), len(names))
    means, is_refused = np.full(shape, math.nan), np.zeros(shape, dtype=bool)
    for row, workload in enumerate(workloads):
        for column, name in enumerate(names):
            if several := logs[workload].get(name):
                means[row, column] = np.mean(several)
            is_refused[row, column] = (workload, name) in refused
    values = tuple(values_of(workload, threads.get(workload, 0)) for workload in workloads)
    return Measured(values=values, names=tuple(names), logs=means, is_refused=is_refused)


def is_named(spec: str) -> bool:
    """Whether a spec is a plain name, which means the same in another process, and not the policy's own."""
    base, _ = plugins.variant(spec)
    return base in plugins.implementation_names() and base != ITSELF


def held_out(measured: Measured, smallest_effect: float = SMALLEST_EFFECT) -> Floats:
    """The regret of each workload by a policy that was learned without it: log ratios to the fastest."""
    count = len(measured.values)
    num_folds = min(NUM_FOLDS, count)
    fold_of = np.random.default_rng(0).permutation(count) % num_folds
    costs = np.zeros(count)
    for fold in range(num_folds if count > 1 else 0):
        known = {each.key: each for each in kinds(measured.part(fold_of != fold), smallest_effect)}
        for row in map(int, np.flatnonzero(fold_of == fold)):
            kind = known.get(_key(measured.values[row]))
            if kind is not None:
                costs[row] = measured.cost(row, kind.choose(measured.values[row], smallest_effect))
    found: Floats = costs - measured.best
    return found


def kinds(measured: Measured, smallest_effect: float = SMALLEST_EFFECT) -> list[Kind]:
    """What was measured, by kinds: those with a candidate that was faster than `sdpa` somewhere, beyond that effect.

    Whoever was nearly as fast as `sdpa` at some workload is a candidate, too, but has no part in what makes workloads
    alike.
    """
    keys = [_key(each) for each in measured.values]
    found = []
    for key in dict.fromkeys(keys):
        own = measured.part(np.array([each == key for each in keys]))
        least = np.nan_to_num(own.logs, nan=math.inf).min(axis=0, initial=math.inf)
        near = np.flatnonzero(least < NEARLY)
        is_faster = least[near] < -math.log1p(smallest_effect)
        if len(own.values) >= FEWEST_WORKLOADS and is_faster.any():
            found.append(_kind(key, own, near, is_faster, smallest_effect))
    return found


def _key(values: Values) -> tuple[str, ...]:
    return tuple(str(values[axis]) for axis in KINDS)


def _kind(
    key: tuple[str, ...], own: Measured, columns: NDArray[np.intp], is_faster: Booleans, smallest_effect: float
) -> Kind:
    logs = own.logs[:, columns]
    places = np.array([coordinates(each) for each in own.values])
    scales, signal, noise = likeliest(places, np.nan_to_num(logs[:, is_faster], nan=LOST))
    ratios = [[None if math.isnan(log) else _rounded(math.exp(log)) for log in row] for row in logs.tolist()]
    kind = Kind(
        **dict(zip(KINDS, key, strict=True)),  # type: ignore[arg-type] # KINDS are fields
        chosen={},
        candidates=tuple(own.names[each] for each in columns),
        scales={name: _rounded(scale) for name, scale in zip(COORDINATES, scales.tolist(), strict=True)},
        signal=_rounded(signal),
        noise=_rounded(noise),
        workloads=tuple((*(each[axis] for axis in AXES), *row) for each, row in zip(own.values, ratios, strict=True)),
    )
    choices = [kind.choose(each, smallest_effect) for each in own.values]
    counts = {name: choices.count(name) for name in sorted(set(choices), key=choices.count, reverse=True)}
    kind.chosen.update(counts)
    return kind


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")


def likeliest(places: Floats, logs: Floats) -> tuple[Floats, float, float]:
    """Of log ratios (N, candidates) at coordinates (N, D): the scales (D,), signal and noise that make them likeliest.

    Scales are drawn to USUAL_SCALE, so that an axis that hardly varies does not decide.
    """
    from scipy.linalg import cho_factor, cho_solve
    from scipy.optimize import minimize

    spreads = np.maximum(logs.std(axis=0), LEAST_SPREAD)
    scaled = (logs - logs.mean(axis=0)) / spreads
    number, axes = places.shape
    usual = math.log(USUAL_SCALE)

    def unlikely(given: Floats) -> float:
        """Of the logarithms of scales, signal and noise: the negative log likelihood of all candidates."""
        scales, signal, noise = np.exp(given[:axes]), math.exp(given[axes]), math.exp(given[axes + 1])
        matrix = signal * correlation(places, places, scales) + noise * np.eye(number)
        factor = cho_factor(matrix, lower=True)
        fit = float((scaled * cho_solve(factor, scaled)).sum()) / 2
        volume = scaled.shape[1] * float(np.log(np.diag(factor[0])).sum())
        drawn = FIRMNESS * scaled.shape[1] * float(((given[:axes] - usual) ** 2).sum())
        return float(fit + volume + drawn)

    start = np.concatenate([np.full(axes, usual), [0.0, math.log(0.02)]])
    bounds = [(-1.5, 4.0)] * axes + [(-3.0, 3.0), (math.log(LEAST_NOISE), 0.0)]
    found = minimize(unlikely, start, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40}).x
    return np.exp(found[:axes]), math.exp(found[axes]), math.exp(found[axes + 1])


__all__ = ["FEWEST_WORKLOADS", "Measured", "held_out", "kinds", "learn", "likeliest", "table"]
