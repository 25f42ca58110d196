"""Forecasts of the comparisons that more time would decide, compared with their outcomes."""

import re
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.results import Results, read
from attnbench.processes import execution
from attnbench.reports import story
from attnbench.statistics.intervals import median
from attnbench.storage.records import Comparison, Verdict
from studies.simulated import virtual
from studies.simulated.virtual import SimulatedClient, plan
from studies.simulated.worlds import WORLDS
from tests import tables

pytestmark = pytest.mark.usefixtures("many_visits")

SEEDS = range(2)
IN_WORLDS = ("calm", "bimodal", "busy")
NUM_WORKLOADS, NUM_BLOCKS = 8, 2
FIRST_S = 5.0
"""Duration of the rounds and a few visits of the race."""
BASE_S = 12e-3
"""Long enough that no untimed call precedes it; forecasts do not model untimed calls."""
SLOWDOWNS = (1.025, 1.03, 1.035)
FEWEST_FORECASTS = 12
LEAST_SHARE = 0.30
"""Least share of forecast decisions that must come true: a forecast takes its estimates for the truth."""


def cost_s(workload, name: str) -> float:
    slowdown = SLOWDOWNS[workload.seq_len // 8 % len(SLOWDOWNS)]
    return BASE_S * (1.0 if name == "baseline" else slowdown)


def executed(world: str, seed: int, budget_s: float, folder: Path) -> Results:
    """Run once; another budget gives the same run, shorter or longer."""
    asked = plan(NUM_WORKLOADS, ("baseline", "rival"), budget_s=budget_s, seed=seed)
    client = SimulatedClient(WORLDS[world], cost_s, seed=seed, layout=0.002)
    chosen = msgspec.structs.replace(asked, num_blocks=NUM_BLOCKS)
    execution.execute(
        chosen,
        folder,
        lambda _: None,
        ("check", "time"),
        client=client,
        clock=client.clock.now,
        read_counters=lambda: None,
    )
    return read(folder)


def by_workload(results: Results) -> dict[str, Comparison]:
    return {found.workload.id: found for found in comparisons(results)}


def decided_in_time(world: str, seed: int, folder: Path) -> list[bool]:
    """Return, for each comparison expected to be decided by half of the time, whether it is decided then."""
    before = executed(world, seed, FIRST_S, folder / "before")
    forecasts = {key: found.more_s for key, found in by_workload(before).items() if found.more_s is not None}
    if not forecasts:
        return []
    typical_s = median(forecasts.values())
    after = executed(world, seed, before.elapsed_s + 1.2 * typical_s, folder / "after")
    assert all(after.num_visits[key] >= number for key, number in before.num_visits.items())
    found = by_workload(after)
    return [found[key].verdict is not Verdict.undecided for key, more_s in forecasts.items() if more_s <= typical_s]


def test_a_fair_share_is_decided_in_the_time_that_was_forecast(tmp_path):
    reported = [
        decided
        for world in IN_WORLDS
        for seed in SEEDS
        for decided in decided_in_time(world, seed, tmp_path / f"{world}-{seed}")
    ]
    assert len(reported) >= FEWEST_FORECASTS
    assert sum(reported) / len(reported) >= LEAST_SHARE


def test_a_run_ends_by_saying_what_is_open_and_how_much_more_time_would_decide_it(tmp_path):
    truth = {"baseline": 1.0, "near": 1.025, "slow": 1.5}
    client = SimulatedClient(WORLDS["bimodal"], lambda _, name: 2e-3 * truth[name], seed=2, layout=0.03)
    results = virtual.execute(plan(1, tuple(truth), budget_s=1.0), tmp_path, client)
    assert story.decided(results) == "1 of 2 comparisons decided"
    cells = {row["implementation"]: row.texts["verdict"] for row in tables.every(results)}
    assert re.fullmatch(
        r"undecided \(\d+(\.\d+)? % would show; about \d+ s more needed\), same kernel", cells["near"]
    ), cells
