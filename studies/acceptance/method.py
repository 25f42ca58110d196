"""The tests V2 and V3 in simulated worlds: false alarms, coverage and power of the verdicts.

Hundreds of sessions are simulated at once. Each is judged by the rules of statistics/verdict.py at each look, that is,
after 4, 8, 16, 32 and 64 processes. In a world, each implementation has a random bias in each process, and all
comparisons of a workload share the bias of the baseline. Blocks add noise: normal, with spikes, or with a drift that
persists between processes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnbench.statistics.verdict import LOOKS, half_widths, holm_level, p_values
from attnbench.storage.records import FALSE_SHARE
from attnbench.workloads.sweep import SMALLEST_EFFECT
from studies.acceptance.outcome import upper_limit
from studies.frame import Row

Floats = NDArray[np.float32]
NUM_BLOCKS, NOISE = 4, 0.01
NUM_ARMS = 4
"""Number of comparisons of one workload; they share one baseline."""
POOL = 2**20
LARGEST_FALSE, COVERAGE, POWER, LARGEST_EQUAL = 0.06, (0.93, 0.98), 0.9, 0.01
"""Limits, as shares: sessions with a false verdict, coverage of intervals, slowdowns found, slowdowns called equal."""
SPIKE = 0.3
"""Mean size of a spike, on the log scale."""
KEPT = 0.5
"""Correlation between a comparison's drift in one process and its drift in the next."""


@dataclass(frozen=True, kw_only=True)
class World:
    """A simulated machine: the sizes of its noise on the log scale, and the true log ratio of each comparison."""

    bias: float = 0.0  # standard deviation of an implementation's bias in a process
    num_cells: int = 1
    noise: float = NOISE  # standard deviation of one sample on the log scale
    spikes: float = 0.0  # share of disturbed samples
    drift: float = 0.0  # standard deviation of the part of a comparison's noise that persists between processes
    log_ratio: float = 0.0


def _nulls(num_cells: int) -> dict[str, World]:
    """Build worlds without a true difference, by name, with `num_cells` comparisons each."""
    worlds = {}
    for bias in (0.005, 0.01, 0.015):
        name = f"{num_cells} comparison{'s' * (num_cells > 1)}, bias {bias:.1%}"
        worlds[name] = World(bias=bias, num_cells=num_cells)
        worlds[f"{name}, spikes and drift"] = World(bias=bias, num_cells=num_cells, spikes=0.05, drift=0.005)
    return worlds


ONE_CELL, NULLS = _nulls(1), _nulls(1) | _nulls(64)
SLOWDOWNS = {
    "normal noise": World(noise=0.02, log_ratio=math.log(1.03)),
    "bias 0.67 %": World(bias=0.0067, log_ratio=math.log(1.03)),
    "spikes": World(noise=0.02, spikes=0.1, log_ratio=math.log(1.03)),
}


def noise_pool(world: World, draws: np.random.Generator) -> Floats:
    """Draw errors (POOL,) of log ratios; one error is the median over the blocks of one process."""
    logs = world.noise * draws.standard_normal((2, POOL // 16, NUM_BLOCKS), dtype=np.float32)
    if world.spikes:
        logs += (draws.random(logs.shape) < world.spikes) * draws.exponential(SPIKE, logs.shape)
    arm, base = logs
    numbers = np.median(arm - base, axis=1)
    pool: Floats = numbers[draws.integers(len(numbers), size=POOL)].astype(np.float32)
    return pool


def numbers(world: World, num_runs: int, pool: Floats, draws: np.random.Generator) -> Floats:
    """Draw the log ratio of each session, process and comparison (num_runs, LOOKS[-1], num_cells)."""
    shape = (num_runs, LOOKS[-1], world.num_cells)
    size = int(np.prod(shape))
    start = int(draws.integers(POOL))
    logs = np.resize(np.roll(pool, start)[: min(size, POOL)], shape) + np.float32(world.log_ratio)
    logs = draws.permuted(logs, axis=1) if size > POOL else logs
    if world.bias:
        logs = logs + np.float32(world.bias) * draws.standard_normal(shape, dtype=np.float32)
        num_bases = -(-world.num_cells // NUM_ARMS)
        shared = np.float32(world.bias) * draws.standard_normal((*shape[:2], num_bases), dtype=np.float32)
        logs = logs - np.repeat(shared, NUM_ARMS, axis=2)[:, :, : world.num_cells]
    if world.drift:
        state = world.drift * draws.standard_normal((num_runs, world.num_cells), dtype=np.float32)
        for process in range(shape[1]):
            logs[:, process] += state
            fresh = draws.standard_normal(state.shape, dtype=np.float32)
            state = KEPT * state + world.drift * np.float32(np.sqrt(1 - KEPT**2)) * fresh
    return logs


@dataclass(kw_only=True)
class Tally:
    """Counts over a world's sessions."""

    num_runs: int = 0  # sessions
    num_cells: int = 0  # comparisons in all sessions
    alarms: int = 0  # sessions with a false "faster" or "slower"
    slower: int = 0  # comparisons that are judged slower
    equal: int = 0  # comparisons that are judged equal
    covered: int = 0  # comparisons whose intervals contain the true ratio at all looks
    processes: int = 0  # processes before the verdict, summed over the comparisons judged slower


def watch(world: World, logs: Floats, tally: Tally) -> None:
    """Judge sessions with the given `logs` (num_runs, LOOKS[-1], num_cells) at each look, and add them to `tally`.

    A comparison keeps the first verdict that decides it.
    """
    num_runs, _, num_cells = logs.shape
    beyond = np.log1p(SMALLEST_EFFECT)
    is_open = np.ones((num_runs, num_cells), dtype=bool)
    means, errors, degrees = np.zeros(is_open.shape), np.ones(is_open.shape), np.ones(is_open.shape)
    count, sign = np.zeros(is_open.shape, dtype=int), np.zeros(is_open.shape, dtype=int)
    is_covered = np.ones(is_open.shape, dtype=bool)
    for look in LOOKS:
        seen = logs[:, :look]
        mean = seen.mean(axis=1, dtype=np.float64)
        error = seen.std(axis=1, ddof=1, dtype=np.float64) / np.sqrt(look)
        means, errors = np.where(is_open, mean, means), np.where(is_open, error, errors)
        degrees, count = np.where(is_open, look - 1.0, degrees), np.where(is_open, look, count)
        level = holm_level(p_values(means, errors, degrees), FALSE_SHARE / len(LOOKS))[:, None]
        halves = half_widths(errors, degrees, np.broadcast_to(level, errors.shape))
        now = half_widths(error, look - 1.0, np.broadcast_to(level, error.shape))
        is_covered &= np.abs(mean - world.log_ratio) <= now
        is_far = np.abs(means) > np.maximum(halves, beyond)
        is_near = np.abs(means) + halves <= beyond
        sign = np.where(is_open & is_far, np.sign(means).astype(int), np.where(is_open & is_near, 2, sign))
        is_open &= ~(is_far | is_near)
    tally.num_runs += num_runs
    tally.num_cells += num_runs * num_cells
    tally.alarms += int((np.abs(sign) == 1).any(axis=1).sum())
    tally.slower += int((sign == 1).sum())
    tally.equal += int((sign == 2).sum())  # noqa: PLR2004 - see above
    tally.covered += int(is_covered.sum())
    tally.processes += int(count[sign == 1].sum())


def simulate(world: World, num_runs: int, seed: int = 39) -> Tally:
    """Simulate `num_runs` sessions in a world, and count their verdicts."""
    draws, tally = np.random.default_rng(seed), Tally()
    watch(world, numbers(world, num_runs, noise_pool(world, draws), draws), tally)
    return tally


def rows(worlds: dict[str, World], number: int, num_runs: int = 500) -> list[Row]:
    """Simulate `num_runs` sessions in each world with the seed `number`; return a row of counts for each world."""
    return [{"world": name, **vars(simulate(world, num_runs, seed=number))} for name, world in worlds.items()]


def _total(found: Sequence[Row]) -> dict[str, Tally]:
    """Add up the counts in the rows of each world."""
    totals: dict[str, Tally] = {}
    for row in found:
        tally = totals.setdefault(row["world"], Tally())
        for name in vars(tally):
            setattr(tally, name, getattr(tally, name) + row[name])
    return totals


def judge_alarms(found: Sequence[Row]) -> tuple[str, bool]:
    """Judge V2: in every world, the upper limit of the share of sessions with a false verdict must be small enough."""
    totals = _total(found)
    limits = {name: upper_limit(each.alarms, each.num_runs) for name, each in totals.items()}
    worst = max(limits, key=lambda name: limits[name])
    words = f"the worst of {len(limits)} worlds ({worst}): {totals[worst].alarms} of {totals[worst].num_runs}"
    return f"{words}, 99 % limit {limits[worst]:.2%}", limits[worst] <= LARGEST_FALSE


def judge_coverage(found: Sequence[Row]) -> tuple[str, bool]:
    """Judge V3: the coverage must be within COVERAGE in each world; the text names the smallest and the largest."""
    shares = {name: each.covered / each.num_cells for name, each in _total(found).items()}
    ends = [end(shares, key=lambda name: shares[name]) for end in (min, max)]
    low, high = COVERAGE
    words = " to ".join(f"{shares[name]:.1%} ({name})" for name in ends)
    return words, all(low <= share <= high for share in shares.values())


def judge_power(found: Sequence[Row]) -> tuple[str, bool]:
    """Judge the slowdowns of V2: in each world, the share found must reach POWER; few overall may be called equal."""
    totals = _total(found)
    words = [
        f"{name}: {each.slower / each.num_cells:.1%} after {each.processes / max(1, each.slower):.1f} processes"
        for name, each in totals.items()
    ]
    equal, number = sum(each.equal for each in totals.values()), sum(each.num_cells for each in totals.values())
    most = upper_limit(equal, number)
    is_fine = most <= LARGEST_EQUAL and all(each.slower >= POWER * each.num_cells for each in totals.values())
    return f"{'; '.join(words)}; called equal: {equal} of {number}, 99 % limit {most:.2%}", is_fine
