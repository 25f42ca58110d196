"""The simulated machine: worlds have their stated noise, and whole runs find planted differences."""

import math
import random

import numpy as np
import pytest

from attnbench.analysis.comparisons import comparisons, samples_of
from attnbench.analysis.results import read
from attnbench.processes import execution
from attnbench.statistics.effects import control_numbers
from attnbench.statistics.verdict import LOOKS, Reason
from attnbench.storage.journal import JOURNAL
from attnbench.storage.records import Arm, Verdict
from attnbench.timing import blocks
from attnbench.timing.functions import FunctionComparison
from studies.simulated import virtual
from studies.simulated.machine import Machine, VirtualClock
from studies.simulated.virtual import PROBE_S, SimulatedClient, plan, workloads
from studies.simulated.worlds import WORLDS

pytestmark = pytest.mark.usefixtures("many_visits")

NAMES = ("baseline", "same", "slow", "fast")
RATIO = {"baseline": 1.0, "same": 1.0, "slow": 1.3, "fast": 0.6}
TOLD = {"same": Verdict.equivalent, "slow": Verdict.slower, "fast": Verdict.faster}
TIMED = plan(3, NAMES, budget_s=600.0)


def cost_s(workload, name):
    return 1e-4 * workload.seq_len * RATIO[name]


def client_in(world: str, seed: int = 1) -> SimulatedClient:
    return SimulatedClient(WORLDS[world], cost_s, seed=seed, layout=0.002)


def verdicts(results):
    return {(row.workload.id, row.implementation): row.verdict for row in comparisons(results)}


def clock_in(world: str, seed: int) -> VirtualClock:
    machine = Machine(WORLDS[world], seed)
    return VirtualClock(machine, machine.turn)


def spent(world: str, seed: int, number: int = 2000) -> np.ndarray:
    clock = clock_in(world, seed)
    return np.array([clock.elapsed(lambda: clock.spend(4e-3), 1) for _ in range(number)])


def test_worlds_have_the_sizes_that_they_claim():
    logs = {world: np.log(spent(world, 3, 12000) / 4e-3) for world in WORLDS}
    ends = {world: np.ptp(np.median(each.reshape(40, -1), axis=1)) for world, each in logs.items()}
    assert np.std(logs["calm"]) == pytest.approx(0.01, rel=0.1)
    assert ends["calm"] < 0.005
    assert ends["drift"] > 0.2
    assert 0.05 < ends["random_walk"] <= 0.62
    assert np.mean(logs["spikes"] > math.log(1.15)) == pytest.approx(0.05, abs=0.01)
    assert np.mean(logs["bimodal"] > 0.04) == pytest.approx(0.3, abs=0.03)
    assert 0.2 < np.mean(logs["throttling"] > 0.25) < 0.4
    assert 0.15 < np.mean(logs["busy"] > 0.25) < 0.5


@pytest.mark.one_in(3)
@pytest.mark.parametrize("world", WORLDS)
def test_a_whole_run_finds_what_was_planted(world, tmp_path):
    results = virtual.execute(TIMED, tmp_path / "run", client_in(world))
    assert results.reason.startswith("every comparison is decided")
    assert results.elapsed_s < 600
    assert verdicts(results) == {(w.id, name): reported for w in workloads(3) for name, reported in TOLD.items()}
    rows = comparisons(results)
    assert sum(row.low / 1.005 <= RATIO[row.implementation] <= row.high * 1.005 for row in rows) >= len(rows) - 1
    for taken in samples_of(results).values():
        visits = control_numbers(taken, Arm(implementation="baseline"))
        assert math.exp(np.mean([*visits.values()])) == pytest.approx(1.0, abs=0.04)


def test_looking_at_what_runs_leaves_every_time_as_it_was(tmp_path):
    found = []
    for name, stages in (("whole", execution.STAGES), ("without", [s for s in execution.STAGES if s != "operators"])):
        client = client_in("busy")
        folder = tmp_path / name
        execution.execute(
            TIMED, folder, lambda _: None, stages, client=client, clock=client.clock.now, read_counters=lambda: None
        )
        found.append(read(folder))
    whole, without = found

    def taken(results):
        return {(r.workload.id, r.implementation): r.measurement("latency").samples for r in results.records}

    other = taken(without)
    assert [cell for cell, samples in taken(whole).items() if samples != other[cell]] == []
    assert any(record.operators for record in whole.records)
    assert not any(record.operators for record in without.records)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.long), 3])
def test_a_run_that_was_killed_anywhere_goes_on_to_the_same_verdicts(seed, tmp_path):
    world = list(WORLDS)[2 * seed]
    client, folder = client_in(world, seed=seed), tmp_path / "run"
    whole = verdicts(virtual.execute(TIMED, folder, client))
    journal, draws = folder / JOURNAL, random.Random(seed)
    for _ in range(3):
        kept = journal.read_bytes()
        first = kept.index(b"\n") + 1
        kept = kept[: draws.randrange(first, len(kept))]
        journal.write_bytes(kept)
        again = virtual.execute(TIMED, folder, client)
        assert verdicts(again) == whole
        assert journal.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
        places = [(s.epoch, s.visit, s.block) for m in again.records[0].measurements[:1] for s in m.samples]
        assert len(places) == len(set(places))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("killed_s", [4.0, 8.0, 12.0])
def test_a_run_that_was_killed_takes_its_budget_and_no_more_all_in_all(tmp_path, killed_s):
    """Time between its calls counts, too; only the time after the last visit is lost with the kill."""
    client = SimulatedClient(WORLDS["drift"], lambda _, name: 2e-3 * {"baseline": 1.0, "near": 1.02}[name], layout=0.01)
    asked, folder = plan(30, ("baseline", "near"), budget_s=20.0), tmp_path / "run"

    def clock():
        client.clock.spend(2e-3)  # time that the harness itself takes, at each reading of the clock
        return client.clock.now()

    def kill(_):
        if clock() > killed_s:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execution.execute(asked, folder, kill, client=client, clock=clock, read_counters=lambda: None)
    start_s = client.clock.now()
    execution.execute(asked, folder, lambda _: None, client=client, clock=clock, read_counters=lambda: None)
    assert killed_s < read(folder).elapsed_s <= 21.0  # it ends when no pass that still fits can decide a comparison
    assert client.clock.now() - start_s <= 20.5 - killed_s


@pytest.mark.one_in(3)
@pytest.mark.parametrize("world", WORLDS)
def test_a_comparison_of_functions_finds_what_was_planted(world):
    clock = clock_in(world, 5)
    calls = {name: (lambda s=2e-3 * ratio: clock.spend(s)) for name, ratio in RATIO.items()}
    found = FunctionComparison(
        calls, "baseline", clock=clock, gauge_work=lambda: clock.spend(PROBE_S), conditions=blocks.SIMULATED
    )
    found.run(300.0)
    one_process = {name: Verdict.undecided if name == "same" else verdict for name, verdict in TOLD.items()}
    assert {name: judged.verdict for name, judged in found.judgements.items()} == one_process
    assert found.judgements["same"].reason is Reason.one_process
    assert found.spent_s < 300


def test_a_comparison_of_functions_decides_nothing_below_the_spread_between_processes():
    """A difference of 2 % is beyond the margin and known to a tenth of that; another process may not have it."""
    clock = VirtualClock()
    calls = {"a": lambda: clock.spend(2e-3), "b": lambda: clock.spend(2e-3 * 1.02)}
    found = FunctionComparison(
        calls,
        "a",
        clock=clock,
        smallest_effect=0.01,
        gauge_work=lambda: clock.spend(PROBE_S),
        conditions=blocks.SIMULATED,
    )
    found.run(60.0)
    judged = found.judgements["b"]
    assert (judged.verdict, judged.reason) == (Verdict.undecided, Reason.one_process)
    assert judged.ratio == pytest.approx(1.02, rel=1e-3)
    assert judged.low < 1 < judged.high
    assert len(found.visits) == LOOKS[-1]  # more would not show more
