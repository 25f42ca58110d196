"""Times of two separate simulated runs with a known truth; tests/statistics covers the arithmetic."""

from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.gate import decision
from attnbench.analysis.gate.decision import judge
from attnbench.analysis.gate.rulings import Decision, Kind, Outcome, Rule, Thresholds
from studies.simulated import virtual
from studies.simulated.virtual import SimulatedClient, plan
from studies.simulated.worlds import WORLDS

pytestmark = pytest.mark.usefixtures("many_visits")

NAMES = ("reference", "one", "other")
RATIO = {"reference": 1.0, "one": 1.3, "other": 0.8}
KEEN = Thresholds(rule=(Rule(metric="latency", allowed=0.02),))


@pytest.fixture(autouse=True)
def without_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision, "BETWEEN_RUNS", 0.0)


def session(folder: Path, world: str, seed: int, slowdown: float, thresholds: Thresholds, *, budget_s=8.0) -> Decision:
    """Run twice, each on its own machine; in the second run, `one` is slower."""

    def run(name: str, number: int, ratio: float):
        def seconds(workload, implementation):
            return 2e-3 * RATIO[implementation] * (ratio if implementation == "one" else 1.0)

        client = SimulatedClient(WORLDS[world], seconds, seed=number, layout=0.003)
        asked = msgspec.structs.replace(plan(3, NAMES, budget_s=budget_s, seed=number), num_rounds=9)
        return virtual.execute(asked, folder / f"{name}{seed}", client)

    return judge(run("base", 2 * seed, 1.0), run("candidate", 2 * seed + 1, slowdown), thresholds)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("world", WORLDS)
def test_five_percent_are_found_or_said_to_be_out_of_sight(world, tmp_path):
    judged = session(tmp_path, world, 11, 1.05, KEEN, budget_s=60.0)
    timed = [ruling for ruling in judged.rulings if ruling.metric == "latency" and ruling.implementation == "one"]
    assert len(timed) == 3
    for ruling in timed:
        assert ruling.effect == pytest.approx(1.05, abs=0.04)
        assert ruling.kind is Kind.slower or ruling.smallest > 0.045
    others = [ruling for ruling in judged.rulings if ruling.implementation == "other"]
    assert not [ruling for ruling in others if ruling.outcome is Outcome.finding]
