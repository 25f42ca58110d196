"""What an implementation's workloads say together, on machines whose truth is known."""

import pytest

from attnbench.analysis.comparisons import by_implementation
from attnbench.reports import story
from attnbench.storage.records import Verdict
from studies.simulated import virtual
from studies.simulated.virtual import SimulatedClient, plan
from studies.simulated.worlds import WORLDS

pytestmark = pytest.mark.usefixtures("many_visits")

TRUTH = {"baseline": 1.0, "same": 1.0, "slow": 1.1, "fast": 0.7}


def run_in(world, folder, truth, **changes):
    """Of four workloads each, for as long as the three processes of the rounds take and a little more."""
    client = SimulatedClient(WORLDS[world], lambda workload, name: 2e-3 * truth(workload, name), seed=4, layout=0.003)
    return virtual.execute(plan(4, tuple(TRUTH), budget_s=30.0, seed=4, **changes), folder, client)


@pytest.mark.parametrize("world", WORLDS)
def test_what_holds_for_every_workload_holds_on_the_whole(world, tmp_path):
    results = run_in(world, tmp_path, lambda _, name: TRUTH[name])
    found = by_implementation(results)
    assert {name: each.verdict for name, each in found.items()} == {
        "fast": Verdict.faster,
        "same": Verdict.equivalent,
        "slow": Verdict.slower,
    }
    assert list(found) == ["fast", "same", "slow"], "in the order of their ratios"
    for name, each in found.items():
        assert each.effect.num_cells == 4
        assert each.effect.ratio.low is not None
        assert each.effect.ratio.low / 1.005 <= TRUTH[name] <= each.effect.ratio.high * 1.005
    reported = story.means(results)
    assert reported[0].startswith("fast: 0.")
    assert reported[0].endswith(" over 4 workloads, faster on the whole")
    assert "equivalent on the whole within " in reported[1]


def test_what_is_faster_here_and_slower_there_is_neither_on_the_whole(tmp_path):
    """Every workload is decided, each the other way than the next."""

    def truth(workload, name):
        return {"slow": 1.5, "fast": 1 / 1.5}.get(name, 1.0) ** (1 if workload.seq_len % 16 else -1)

    found = by_implementation(run_in("calm", tmp_path, truth))
    assert {found[name].verdict for name in ("slow", "fast")} <= {Verdict.equivalent, Verdict.undecided}
