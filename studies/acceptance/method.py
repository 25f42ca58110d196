"""`python -m studies.acceptance.method`: false alarms, coverage and power of the verdicts, in simulated worlds.

The verdicts are those of statistics/verdict.py, at every look, for thousands of sessions at once. In a world, each arm
has a bias in each process, and all comparisons of a workload share the baseline's. Blocks add noise: normal, with
spikes, or with a drift of each arm that persists between processes. Exit code 1 if a limit is missed. Results:
results/gallery/acceptance/method.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from attnbench.statistics.verdict import LOOKS, half_widths, holm_level, p_values, yekutieli_level
from attnbench.storage.records import FALSE_SHARE
from attnbench.units import markdown_table
from attnbench.workloads.sweep import SMALLEST_EFFECT
from studies.acceptance.outcome import upper_limit

Floats = NDArray[np.float32]
TO = Path("results/gallery/acceptance/method.md")
NUM_RUNS = 10_000
CHUNK = 500
NUM_BLOCKS, NOISE = 4, 0.01
NUM_ARMS = 4
"""Comparisons of one workload, which share its baseline."""
POOL = 2**20
LARGEST_FALSE, COVERAGE = 0.06, (0.93, 0.98)
SLOWDOWN = 0.03
OLD = {
    "normal noise": "11.6 processes",
    "bias of 0.67 %": "13 processes",
    "spikes": "70 % after 32 processes",
}
"""Power of the earlier method (e-values on signs, one number per process), published by its audit."""


@dataclass(frozen=True, kw_only=True)
class World:
    """A simulated world."""

    bias: float = 0.0  # standard deviation of an arm's bias in a process
    num_cells: int = 1
    noise: float = NOISE  # standard deviation of one sample on the log scale
    spikes: float = 0.0  # share of disturbed samples
    drift: float = 0.0  # standard deviation of the part of an arm's noise that persists between processes
    log_ratio: float = 0.0

    @property
    def words(self) -> str:
        """Describe the noise of the world."""
        parts = ["spikes"] * bool(self.spikes) + ["autocorrelated"] * bool(self.drift)
        return " and ".join(parts) or "normal"


SPIKE = 0.3
"""Mean size of a spike, on the log scale."""
KEPT = 0.5
"""Correlation of an arm's drift between one process and the next."""


def noise_pool(world: World, draws: np.random.Generator) -> Floats:
    """Draw the noise that the blocks of a process add to its number (POOL,): see `statistics.pairs.process_numbers`."""
    logs = world.noise * draws.standard_normal((3, POOL // 16, NUM_BLOCKS), dtype=np.float32)
    if world.spikes:
        logs += (draws.random(logs.shape) < world.spikes) * draws.exponential(SPIKE, logs.shape)
    arm, base, control = logs
    numbers = (np.median(arm - base, axis=1) + np.median(arm - control, axis=1)) / 2
    made: Floats = numbers[draws.integers(len(numbers), size=POOL)].astype(np.float32)
    return made


def numbers(world: World, num_runs: int, pool: Floats, draws: np.random.Generator) -> Floats:
    """Draw one number for each process and comparison (num_runs, LOOKS[-1], num_cells)."""
    shape = (num_runs, LOOKS[-1], world.num_cells)
    size = int(np.prod(shape))
    start = int(draws.integers(POOL))
    made = np.resize(np.roll(pool, start)[: min(size, POOL)], shape) + np.float32(world.log_ratio)
    made = draws.permuted(made, axis=1) if size > POOL else made
    if world.bias:
        made = made + np.float32(world.bias) * draws.standard_normal(shape, dtype=np.float32)
        num_bases = -(-world.num_cells // NUM_ARMS)
        shared = np.float32(world.bias) * draws.standard_normal((*shape[:2], num_bases), dtype=np.float32)
        made = made - np.repeat(shared, NUM_ARMS, axis=2)[:, :, : world.num_cells]
    if world.drift:
        state = world.drift * draws.standard_normal((num_runs, world.num_cells), dtype=np.float32)
        for process in range(shape[1]):
            made[:, process] += state
            fresh = draws.standard_normal(state.shape, dtype=np.float32)
            state = KEPT * state + world.drift * np.float32(np.sqrt(1 - KEPT**2)) * fresh
    return made


@dataclass(kw_only=True)
class Tally:
    """Counts over a world's sessions."""

    num_runs: int = 0
    num_cells: int = 0
    alarms: int = 0  # sessions with a false "faster" or "slower"
    slower: int = 0  # comparisons
    equal: int = 0
    covered: int = 0  # by the last interval
    always_covered: int = 0  # by the intervals of all looks
    processes: int = 0
    processes_slower: int = 0


def watch(world: World, made: Floats, tally: Tally) -> None:
    """Judge each session at each look; a comparison stops once it is decided."""
    num_runs, _, num_cells = made.shape
    beyond = np.log1p(SMALLEST_EFFECT)
    is_open = np.ones((num_runs, num_cells), dtype=bool)
    means, errors, degrees = np.zeros(is_open.shape), np.ones(is_open.shape), np.ones(is_open.shape)
    count, sign = np.zeros(is_open.shape, dtype=int), np.zeros(is_open.shape, dtype=int)
    halves, always = np.zeros(is_open.shape), np.ones(is_open.shape, dtype=bool)
    for look in LOOKS:
        seen = made[:, :look]
        mean = seen.mean(axis=1, dtype=np.float64)
        error = seen.std(axis=1, ddof=1, dtype=np.float64) / np.sqrt(look)
        means, errors = np.where(is_open, mean, means), np.where(is_open, error, errors)
        degrees, count = np.where(is_open, look - 1.0, degrees), np.where(is_open, look, count)
        level = holm_level(p_values(means, errors, degrees), FALSE_SHARE / len(LOOKS))[:, None]
        halves = half_widths(errors, degrees, np.broadcast_to(level, errors.shape))
        always &= np.abs(mean - world.log_ratio) <= half_widths(error, look - 1.0, np.broadcast_to(level, error.shape))
        is_far = np.abs(means) > np.maximum(halves, beyond)
        is_near = np.abs(means) + halves <= beyond
        sign = np.where(is_open & is_far, np.sign(means).astype(int), np.where(is_open & is_near, 2, sign))
        is_open &= ~(is_far | is_near)
    is_slower = sign == 1
    tally.num_runs += num_runs
    tally.num_cells += num_runs * num_cells
    tally.alarms += int((np.abs(sign) == 1).any(axis=1).sum())
    tally.slower += int(is_slower.sum())
    tally.equal += int((sign == 2).sum())  # noqa: PLR2004 - see above
    tally.covered += int((np.abs(means - world.log_ratio) <= halves).sum())
    tally.always_covered += int(always.sum())
    tally.processes += int(count.sum())
    tally.processes_slower += int(count[is_slower].sum())


def simulate(world: World, num_runs: int, seed: int = 39) -> Tally:
    """Simulate sessions in a world, one chunk at a time."""
    draws, tally = np.random.default_rng(seed), Tally()
    pool = noise_pool(world, draws)
    while tally.num_runs < num_runs:
        watch(world, numbers(world, min(CHUNK, num_runs - tally.num_runs), pool, draws), tally)
    return tally


Row = dict[str, str]


def nulls(num_runs: int) -> Iterator[tuple[Row, bool]]:
    """V2 and V3: simulate worlds without differences; a row each, and whether it keeps the limits."""
    rough = {"spikes": 0.05, "drift": 0.005}
    for num_cells in (1, 64):
        for bias in (0.005, 0.01, 0.015):
            for kind in ({}, rough):
                world = World(bias=bias, num_cells=num_cells, **kind)
                found = simulate(world, num_runs)
                most = upper_limit(found.alarms, found.num_runs)
                row = {
                    "comparisons": str(num_cells),
                    "process bias": f"{100 * bias:g} %",
                    "noise": world.words,
                    "sessions with a false verdict": f"{found.alarms} of {found.num_runs}: at most {100 * most:.2f} %",
                    "equal": f"{100 * found.equal / found.num_cells:.0f} %",
                    "processes": f"{found.processes / found.num_cells:.1f}",
                    **_coverage(found),
                }
                always = found.always_covered / found.num_cells
                is_covered = num_cells > 1 or COVERAGE[0] <= always <= COVERAGE[1]
                yield row, most <= LARGEST_FALSE and is_covered


def _coverage(found: Tally) -> Row:
    last, always = found.covered / found.num_cells, found.always_covered / found.num_cells
    return {"the last interval covers": f"{100 * last:.1f} %", "those of all looks cover": f"{100 * always:.1f} %"}


def powers(num_runs: int) -> Iterator[tuple[Row, bool]]:
    """Count the processes needed to find a slowdown of 3 %, next to the earlier method."""
    log = float(np.log1p(SLOWDOWN))
    worlds = {
        "normal noise": World(noise=0.02, log_ratio=log),
        "bias of 0.67 %": World(bias=0.0067, log_ratio=log),
        "spikes": World(noise=0.02, spikes=0.1, log_ratio=log),
    }
    for name, world in worlds.items():
        found = simulate(world, num_runs)
        share, equal = found.slower / found.num_cells, upper_limit(found.equal, found.num_cells)
        mean = found.processes_slower / max(1, found.slower)
        row = {
            "world": name,
            "slower": f"{100 * share:.1f} %",
            "processes": f"{mean:.1f}",
            "equal": f"{found.equal} of {found.num_cells}: at most {100 * equal:.2f} %",
            "earlier method": OLD[name],
            **_coverage(found),
        }
        yield row, share >= 0.9  # noqa: PLR2004 - nine in ten


MARGIN = 0.075
"""Margin of the quick sweep."""
SHARES = {"far": 0.5, "near": 0.15}
"""Comparisons of a table that differ by 1.2 to 6 times, and by 1.1 to 1.2 times; the others by 3 % at most."""


def tables(num_runs: int) -> Iterator[tuple[Row, bool]]:
    """V5: simulate tables of 120 comparisons that end after 8 or 16 processes, judged by both procedures."""
    draws = np.random.default_rng(5)
    for num_processes in (8, 16):
        for noise in (0.03, 0.06):
            tallies = {"Holm": np.zeros(5), "Benjamini-Yekutieli": np.zeros(5)}
            for _ in range(num_runs):
                logs = _table_logs(draws)
                spreads = noise * np.exp(0.5 * draws.standard_normal(len(logs)))  # cells are not equally noisy
                taken = logs[:, None] + spreads[:, None] * draws.standard_normal((len(logs), num_processes))
                for name, level_of in (("Holm", holm_level), ("Benjamini-Yekutieli", yekutieli_level)):
                    tallies[name] += _judged_table(logs, taken, level_of)
            for name, (far, near, equal, named, false) in tallies.items():
                of = {key: share * 120 * num_runs for key, share in SHARES.items()}
                rest = 120 * num_runs - sum(of.values())
                most = upper_limit(int(false), int(named))
                yield (
                    {
                        "processes": str(num_processes),
                        "spread between processes": f"{100 * noise:g} %",
                        "procedure": name,
                        "found beyond 1.2": f"{100 * far / of['far']:.1f} %",
                        "found of 1.1 to 1.2": f"{100 * near / of['near']:.0f} %",
                        "equal of those within 3 %": f"{100 * equal / rest:.0f} %",
                        "false among the named": f"{false:.0f} of {named:.0f}: at most {100 * most:.3f} %",
                    },
                    most <= FALSE_SHARE,
                )


def _table_logs(draws: np.random.Generator, number: int = 120) -> NDArray[np.float64]:
    far, near = (int(share * number) for share in SHARES.values())
    sizes = [draws.uniform(1.2, 6, far), draws.uniform(1.1, 1.2, near)]
    signs = draws.choice([-1, 1], far + near)
    return np.concatenate([signs * np.log(np.concatenate(sizes)), draws.uniform(-0.03, 0.03, number - far - near)])


def _judged_table(logs: NDArray[np.float64], taken: NDArray[np.float64], level_of: Any) -> NDArray[np.float64]:  # noqa: ANN401
    """Count detected differences, far and near; equal comparisons; and all and false detections."""
    number, beyond, sizes = taken.shape[1], np.log1p(MARGIN), np.abs(logs)
    means, errors = taken.mean(axis=1), taken.std(axis=1, ddof=1) / np.sqrt(number)
    level = level_of(p_values(means, errors, number - 1.0), FALSE_SHARE / len(LOOKS))
    halves = half_widths(errors, number - 1.0, level)
    is_named = np.abs(means) > np.maximum(halves, beyond)
    is_right = is_named & (np.sign(means) == np.sign(logs))
    is_equal = np.abs(means) + halves <= beyond
    far, near, close = sizes >= np.log(1.2), (sizes >= np.log(1.1)) & (sizes < np.log(1.2)), sizes <= np.log1p(0.03)
    found = [is_right & far, is_right & near, is_equal & close, is_named, is_named & (~is_right | close)]
    return np.array([int(each.sum()) for each in found], dtype=np.float64)


def report(num_runs: int) -> tuple[str, bool]:
    """Build the page with all tables, and decide whether every limit is kept."""
    null_rows, power_rows = list(nulls(num_runs)), list(powers(num_runs))
    table_rows = list(tables(max(1, num_runs // 20)))
    low, high = COVERAGE
    text = f"""# Verdicts in simulated worlds

Made by `python -m studies.acceptance.method`: {num_runs:,} sessions in each world, watched at every look
({", ".join(map(str, LOOKS))} processes), margin {100 * SMALLEST_EFFECT:g} %. Spikes disturb 5 % of all samples by 30 %;
where noise is autocorrelated, half of a drift of 0.5 % lasts from one process to the next. "At most" is the upper end
of a one-sided 99 % interval.

## Nothing differs (V2, V3)

Limit: at most {100 * LARGEST_FALSE:g} % of sessions with any false "faster" or "slower".

{markdown_table([row for row, _ in null_rows])}

The promise of 95 % is about all looks and all comparisons of a session at once. One comparison that is watched is
covered by the intervals of all looks in {100 * low:g} to {100 * high:g} % of sessions (the limit); the last interval
alone covers more, and so does a single interval among 64, which share the error.

## A slowdown of 3 %

{markdown_table([row for row, _ in power_rows])}

The figures of the earlier method are those of the audit in worlds of its own, with the same bias and spikes.

## Tables of many implementations

{max(1, num_runs // 20):,} tables of 120 comparisons, margin {100 * MARGIN:g} %: half of them differ by 1.2 to 6 times,
15 % by 1.1 to 1.2 times, and the others by 3 % at most. `run` judges its tables by Benjamini and Yekutieli's procedure,
`compare` and `gate` by Holm's. Limit: at most {100 * FALSE_SHARE:g} % of the named differences are false.

{markdown_table([row for row, _ in table_rows])}
"""
    return text, all(is_kept for _, is_kept in (*null_rows, *power_rows, *table_rows))


def main(
    *,
    runs: Annotated[int, typer.Option(help="Sessions in each world.")] = NUM_RUNS,
    to: Annotated[Path, typer.Option(help="The page that is written.")] = TO,
) -> None:
    """Simulate sessions, and write false alarms, coverage and power with their limits."""
    text, is_kept = report(runs)
    to.write_text(text, encoding="utf-8")
    typer.echo(text)
    raise typer.Exit(0 if is_kept else 1)


if __name__ == "__main__":
    typer.run(main)
