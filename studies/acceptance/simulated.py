"""The acceptance tests whose truth is known because the machine is simulated: T3, T4, T9, T12 and T13.

Limits are those of the table in docs/method.md. Each test has a short form with fewer repetitions; `num_*` set them.
"""

import gc
import math
from collections.abc import Callable, Sequence

import numpy as np

from attnbench.analysis import comparisons as compare
from attnbench.statistics import evidence
from attnbench.statistics.intervals import Pairs, paired_ratio, pairs
from attnbench.statistics.verdicts import Effect, detectable, judge, paired_effect
from attnbench.storage.events import Plan
from attnbench.storage.records import FALSE_SHARE, Arm, Comparison, Verdict
from attnbench.timing.schedule import Race, State, visit_seed
from attnbench.workloads.workload import Workload
from studies.acceptance.outcome import LABELS, Outcome
from studies.acceptance.races import Uniform, Witness, whole_run
from studies.simulated.virtual import SimulatedClient, plan, session
from studies.simulated.worlds import WORLDS, Array, World

Row = dict[str, float | str]

LAYOUT = 0.002
"""What the memory layout of a process does to an arm, as a standard deviation of the log."""
BASELINE, RIVAL = "baseline", "rival"
RIVAL_ARM, REFERENCE = Arm(implementation=RIVAL), Arm(implementation=BASELINE)
BASE_S = 2e-3
CONFIDENCE = 0.99
T3_LIMIT, T3_RUNS, T3_BLOCKS = 0.055, 10_000, 2000
T4_LIMIT, T4_RUNS = 0.09, 100
COLLECTED_EVERY = 64
T9_ERRORS, T9_SHARE, T9_RUNS = 0.2, 1e-3, 1000
T9_RATIOS = (0.5, 0.8, 0.95, 0.99, 1.01, 1.05, 1.25, 2.0)
T12_TIME, T12_EQUAL, T12_LOST, T12_RUNS = 0.6, 0.99, 0.01, 16
T12_RATIOS = (0.5, 0.7, 0.85, 0.93, 1.0, 1.0, 1.0, 1.07, 1.2, 1.5, 2.0)
T13_LOW, T13_HIGH, T13_RUNS = 0.7, 0.9, 200

CHUNK = 250
SIZES = np.array([0.3, 0.3, 0.3, 1.0, 0.1])
"""What each arm of a block leaves behind for the next, as a share of the most; the first three are the same code."""
CARRY_OF_LONG_CALLS = 0.1
"""Of a world's carry, so much of a call of 10 ms: it has no touch before it."""


def null_differences(world: World, draws: np.random.Generator, num_blocks: int, num_paths: int) -> tuple[Array, Array]:
    """Log ratios (blocks, paths) of an arm, the baseline and a copy, all the same code, among five in random slots."""
    num_slots = len(SIZES)
    places = draws.random((num_blocks, num_slots, num_paths)).argsort(axis=1)  # of each arm
    before = np.roll(SIZES[places.argsort(axis=1)].reshape(-1, num_paths), 1, axis=0)
    logs = (world.drift(draws, num_blocks * num_slots, num_paths) + world.noise(draws, before.shape)).reshape(
        places.shape
    )
    logs = logs + CARRY_OF_LONG_CALLS * world.carry * before.reshape(places.shape)
    logs = logs + world.slot * np.arange(num_slots)[:, None]
    arm, baseline, other = (np.take_along_axis(logs, places[:, [arm]], axis=1)[:, 0] for arm in range(3))
    return arm - baseline, arm - other


def most_likely(num_found: int, num_tried: int) -> float:
    """The upper 99 % limit of a share, after Clopper and Pearson."""
    from scipy.stats import beta  # here, because it takes longer to import than --help may take

    return 1.0 if num_found == num_tried else float(beta.ppf(CONFIDENCE, num_found + 1, num_tried - num_found))


def simulated_false_alarms(*, short: bool = False, num_runs: int = 0, num_blocks: int = 0, seed: int = 3) -> Outcome:
    """How often the same code is ever called different, with a look at each block."""
    num_runs = num_runs or (4000 if short else T3_RUNS)
    num_blocks = num_blocks or (500 if short else T3_BLOCKS)
    rows: list[Row] = []
    for number, world in enumerate(WORLDS.values()):
        draws = np.random.default_rng([seed, number])
        num_found = 0
        for start in range(0, num_runs, CHUNK):
            differences = null_differences(world, draws, num_blocks, min(CHUNK, num_runs - start))
            num_found += int((evidence.e_values(*differences) >= 1 / FALSE_SHARE).any(axis=0).sum())
        upper = most_likely(num_found, num_runs)
        rows.append({"world": world.name, "share": num_found / num_runs, "upper": upper, "num_runs": num_runs})
    worst = max(rows, key=lambda row: float(row["upper"]))
    return Outcome(
        id=LABELS["simulated_false_alarms"],
        title=f"Simulated A/A, watched at each of {num_blocks} blocks",
        limit=f"upper {CONFIDENCE:.0%} limit of the share of false alarms <= {T3_LIMIT} in each world",
        found=f"at most {worst['upper']:.4f}, in {worst['world']} ({worst['share']:.2%} of {num_runs} runs)",
        passes=all(float(row["upper"]) <= T3_LIMIT for row in rows),
        is_short=num_runs < T3_RUNS or num_blocks < T3_BLOCKS,
        rows=tuple(rows),
    )


def null_sessions(*, short: bool = False, num_runs: int = 0, num_workloads: int = 16, seed: int = 4) -> Outcome:
    """How many sessions call anything different where everything is the same code.

    Twice: verdicts where each process lays out memory otherwise, which the margin and intervals must bear; and e-values
    alone, which hold among all cells by e-BH where nothing but the order is drawn.
    """
    num_runs = num_runs or (4 if short else T4_RUNS)
    rows: list[Row] = []
    names = [BASELINE, "a", "b", "c", "d"]
    for number in range(num_runs):
        world = list(WORLDS.values())[number % len(WORLDS)]
        found = {}
        for what, layout in (("alarms", LAYOUT), ("rejected", 0.0)):
            client = SimulatedClient(world, _cost_of_null, seed=seed * 1000 + number, layout=layout)
            Witness.called, Witness.rejected = set(), set()
            results = whole_run(plan(num_workloads, names, budget_s=60.0, seed=seed * 1000 + number), client, Witness)
            verdicts = [row.verdict for row in compare.comparisons(results)]
            final = sum(verdict in {Verdict.faster, Verdict.slower} for verdict in verdicts)
            seen = max(final, len(Witness.called))
            found[what] = seen if layout else max(seen, len(Witness.rejected))
            found[f"equivalent, {what}"] = verdicts.count(Verdict.equivalent)
        rows.append({"world": world.name, **found})
    alarms, rejected = (sum(bool(row[what]) for row in rows) for what in ("alarms", "rejected"))
    return Outcome(
        id=LABELS["null_sessions"],
        title=f"All-null sessions of {num_workloads * (len(names) - 1)} cells, with any alarm at any time",
        limit="<= 9 of 100 sessions, of verdicts, and of e-values alone (e-BH), however small the difference",
        found=f"{alarms} of {num_runs} sessions by verdicts, {rejected} by e-values",
        passes=max(alarms, rejected) <= T4_LIMIT * num_runs,
        is_short=num_runs < T4_RUNS,
        rows=tuple(rows),
    )


def _cost_of_null(workload: Workload, _: str) -> float:
    return 1e-3 * (1 + workload.seq_len % 5)


def bias(*, short: bool = False, num_runs: int = 0, num_visits: int = 15, seed: int = 9) -> Outcome:
    """How far the estimated ratio lies from the true one on average."""
    num_runs = num_runs or (60 if short else T9_RUNS)
    rows = [_bias(world, ratio, num_runs, num_visits, seed=seed) for world in WORLDS.values() for ratio in T9_RATIOS]
    judged = rows if num_runs >= T9_RUNS else _pooled(rows)
    errors, share = (max(judged, key=lambda row: abs(float(row[by]))) for by in ("errors", "bias"))
    return Outcome(
        id=LABELS["bias"],
        title=f"Bias of a ratio on the virtual clock, {len(WORLDS)} worlds and {len(T9_RATIOS)} ratios",
        limit=f"<= {T9_ERRORS} standard errors and <= {T9_SHARE:.1%}",
        found=f"at most {abs(float(errors['errors'])):.3f} standard errors ({errors['world']}) and "
        f"{abs(float(share['bias'])):.4%} ({share['world']})" + ("" if judged is rows else ", all ratios together"),
        passes=abs(float(errors["errors"])) <= T9_ERRORS and abs(float(share["bias"])) <= T9_SHARE,
        is_short=num_runs < T9_RUNS,
        rows=tuple(rows),
    )


def _bias(world: World, ratio: float, num_runs: int, num_visits: int, *, seed: int) -> Row:
    """The mean error of the log ratio, and what one session says of its own."""
    draw = _seeds(seed, world.name, ratio)
    found = [paired_ratio(_pairs(_one_cell(world, ratio, num_visits, draw(run)), RIVAL_ARM)) for run in range(num_runs)]
    known = [each for each in found if each is not None]
    logs = np.array([math.log(each.point / ratio) for each in known])
    error = float(np.mean([each.standard_error or 0.0 for each in known]))
    bias = float(logs.mean())
    return {"world": world.name, "ratio": ratio, "bias": bias, "standard_error": error, "errors": bias / error}


def _pooled(rows: Sequence[Row]) -> list[Row]:
    """With few runs: the mean over a world's ratios, as it is and as seen from 1, for a bias that turns with it."""
    found: list[Row] = []
    for world in WORLDS:
        mine = [row for row in rows if row["world"] == world]
        for signs in (np.ones(len(mine)), np.sign([float(row["ratio"]) - 1 for row in mine])):
            bias, errors = (float(np.mean(signs * [float(row[key]) for row in mine])) for key in ("bias", "errors"))
            found.append({"world": world, "bias": bias, "errors": errors})
    return found


def racing(*, short: bool = False, num_runs: int = 0, num_workloads: int = 16, seed: int = 12) -> Outcome:
    """Virtual seconds until every verdict is found, by racing and in rounds over all arms, and whether they agree."""
    num_runs = num_runs or (3 if short else T12_RUNS)
    rows: list[Row] = []
    for number in range(num_runs):
        world = list(WORLDS.values())[number % len(WORLDS)]
        rows.append(_raced(world, plan(num_workloads, [BASELINE, "a", "b", "c"], budget_s=1800.0, seed=seed + number)))
    raced, uniform, equal, right, right_uniform, cells = (
        sum(float(row[key]) for row in rows)
        for key in ("raced_s", "uniform_s", "equal", "right", "right_uniform", "cells")
    )
    return Outcome(
        id=LABELS["racing"],
        title=f"Racing against rounds over all arms, {num_workloads} workloads and 4 implementations",
        limit=f"<= {T12_TIME:.0%} of the time at >= {T12_EQUAL:.0%} equal verdicts, "
        f"with at most {T12_LOST:.0%} fewer right ones",
        found=f"{raced / uniform:.0%} of the time, {equal / cells:.1%} of {cells:.0f} verdicts equal; "
        f"{right / cells:.1%} are right, and {right_uniform / cells:.1%} of those in rounds",
        passes=raced <= T12_TIME * uniform and equal >= T12_EQUAL * cells and right >= right_uniform - T12_LOST * cells,
        is_short=num_runs < T12_RUNS,
        rows=tuple(rows),
    )


def _raced(world: World, asked: Plan) -> Row:
    truth = {
        (workload.id, name): _draw(asked.seed, workload.id, name)
        for workload in asked.workloads
        for name in asked.implementations
    }

    def cost_s(workload: Workload, name: str) -> float:
        length_s = 1e-3 * 2.0 ** (workload.seq_len // 8 % 6)  # 1 to 32 ms
        return length_s * (1.0 if name == BASELINE else truth[workload.id, name])

    race, rounds = (
        whole_run(asked, SimulatedClient(world, cost_s, seed=asked.seed, layout=LAYOUT), kind)
        for kind in (Race, Uniform)
    )
    raced, other = ({_key(row): row.verdict for row in compare.comparisons(found)} for found in (race, rounds))
    return {
        "world": world.name,
        "raced_s": race.elapsed_s or 0.0,
        "uniform_s": rounds.elapsed_s or 0.0,
        "cells": len(raced),
        "equal": sum(raced[key] == other[key] for key in raced),
        "right": sum(_is_right(raced[key], truth[key]) for key in raced),
        "right_uniform": sum(_is_right(other[key], truth[key]) for key in raced),
    }


def _draw(seed: int, workload: str, name: str) -> float:
    return T12_RATIOS[visit_seed(seed, f"{workload}/{name}", 0) % len(T12_RATIOS)]


def _key(row: Comparison) -> tuple[str, str]:
    return row.workload.id, row.implementation


def _is_right(verdict: Verdict, ratio: float) -> bool:
    return verdict is (Verdict.equivalent if ratio == 1.0 else Verdict.slower if ratio > 1.0 else Verdict.faster)


def detectable_effect(*, short: bool = False, num_runs: int = 0, num_visits: int = 16, seed: int = 13) -> Outcome:
    """Whether the slowdown that a session says it would find is found when it is there."""
    num_runs = num_runs or (25 if short else T13_RUNS)
    rows: list[Row] = []
    for world in WORLDS.values():
        draw, effects, num_found = _seeds(seed, world.name), [], 0
        for number in range(num_runs):
            effect = detectable(_effect(_one_cell(world, 1.0, num_visits, draw(2 * number))))
            assert effect is not None
            fresh = _effect(_one_cell(world, 1 + effect, num_visits, draw(2 * number + 1)))
            num_found += judge([fresh])[0].verdict is Verdict.slower
            effects.append(effect)
        rows.append({"world": world.name, "effect": float(np.median(effects)), "found": num_found / num_runs})
    shares = [float(row["found"]) for row in rows]
    judged = shares if num_runs >= T13_RUNS else [float(np.mean(shares))]  # few runs cannot tell worlds apart
    low, high = min(judged), max(judged)
    return Outcome(
        id=LABELS["detectable_effect"],
        title=f"The detectable effect that {num_visits} visits print, injected into fresh sessions",
        limit=f"found {T13_LOW:.0%} to {T13_HIGH:.0%}",
        found=f"{np.mean(shares):.0%}, by world {min(shares):.0%} to {max(shares):.0%}"
        + ("" if judged is shares else ", judged over all worlds"),
        passes=low >= T13_LOW and high <= T13_HIGH,
        is_short=num_runs < T13_RUNS,
        rows=tuple(rows),
    )


def _one_cell(world: World, ratio: float, num_visits: int, seed: int) -> State:
    if seed % COLLECTED_EVERY == 0:  # client and clock hold one another: 64 000 sessions need 20 GiB else
        gc.collect()
    cost_s = {BASELINE: BASE_S, RIVAL: BASE_S * ratio}
    with SimulatedClient(world, lambda _, name: cost_s[name], seed=seed, layout=LAYOUT) as client:
        return session(client, RIVAL, BASELINE, num_visits=num_visits)


def _pairs(state: State, arm: Arm) -> Pairs:
    ((workload, arms),) = state.samples.items()
    control = REFERENCE.as_control()
    controls = () if arm == control else arms[control]
    return pairs(arms[arm], arms[REFERENCE], state.gauge.discarded.get(workload, ()), controls)


def _effect(state: State) -> Effect:
    found = paired_effect(_pairs(state, RIVAL_ARM), paired_ratio(_pairs(state, REFERENCE.as_control())))
    assert found is not None
    return found


def _seeds(*parts: float | str) -> Callable[[int], int]:
    return lambda number: visit_seed(0, "/".join(map(str, parts)), number)
