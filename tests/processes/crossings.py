"""Crossovers planted on simulated machines, each a pair of power laws of the length, and the search for them."""

import math
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from attnbench.analysis.recommendation import changes_along
from attnbench.processes.planning import build_plan, plan_to_search
from attnbench.storage.events import Plan
from attnbench.workloads.workload import Workload
from studies.simulated import virtual
from studies.simulated.worlds import WORLDS

NAMES = ("fused", "sdpa")
LOW, HIGH = 16, 4096
BUDGET_S = 60.0
LAYOUT = 0.002
"""The effect of each process on each arm, a standard deviation: half of the search's smallest difference."""


@dataclass(frozen=True, kw_only=True)
class Planted:
    """Two power laws that cross once: seconds = (length / at) ** exponent * seconds at the crossing."""

    at: float
    crossing_s: float
    exponents: tuple[float, float]

    def seconds(self, workload: Workload, name: str) -> float:
        """Return the true time of a call."""
        return float(self.crossing_s * (workload.longest / self.at) ** self.exponents[NAMES.index(name)])


def planted(number: int, seed: int) -> Planted:
    """Draw a random crossover: its length, its time there, and both exponents."""
    draws = random.Random(f"{seed}/{number}")
    at = math.exp(draws.uniform(math.log(2 * LOW), math.log(HIGH / 2)))
    steep = draws.uniform(0.15, 1.0)
    one = draws.uniform(0.8, 1.6)
    exponents = (one, one - steep) if draws.random() < 0.5 else (one - steep, one)
    return Planted(at=at, crossing_s=math.exp(draws.uniform(math.log(50e-6), math.log(2e-3))), exponents=exponents)


def planned(seed: int) -> Plan:
    """Plan a search over all lengths."""
    selection = build_plan(
        sweep="fastest", settings=("mask=causal",), is_exact=True, implementations=NAMES, baseline=NAMES[1], seed=seed
    )
    return msgspec.structs.replace(plan_to_search(selection, NAMES, low=LOW, high=HIGH), budget_s=BUDGET_S)


def search(number: int, world: str, seed: int) -> tuple[float, tuple[int, int] | None]:
    """Run one whole search; return the true length, and the interval that was found."""
    truth, plan = planted(number, seed), planned(seed + number)
    client = virtual.SimulatedClient(WORLDS[world], truth.seconds, seed=seed + number, layout=LAYOUT)
    with tempfile.TemporaryDirectory() as folder:
        results = virtual.execute(plan, Path(folder) / "run", client)
    found = changes_along(results, plan.ladders[0], NAMES)
    return truth.at, (found[0].low, found[0].high) if len(found) == 1 else None
