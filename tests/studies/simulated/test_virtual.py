"""The simulated machine: worlds have their stated noise, and whole runs find planted differences and conditions."""

import math
import re
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.results import read
from attnbench.processes import execution
from attnbench.reports import summary
from attnbench.reports.summary import facts, troubles
from attnbench.statistics.intervals import median
from attnbench.statistics.verdict import LOOKS, Reason
from attnbench.storage.events import SUSTAINED_S, VisitFinished
from attnbench.storage.journal import JOURNAL
from attnbench.storage.records import DeviceState, Verdict
from attnbench.timing import blocks
from attnbench.timing.functions import FunctionComparison
from studies.simulated import virtual
from studies.simulated.machine import Machine, VirtualClock
from studies.simulated.virtual import PROBE_S, SimulatedClient, plan, workloads
from studies.simulated.worlds import WORLDS
from tests import tables
from tests.analysis.gate.scripts import rewrite

pytestmark = pytest.mark.usefixtures("many_visits")

NAMES = ("baseline", "same", "slow", "fast")
RATIO = {"baseline": 1.0, "same": 1.0, "slow": 1.3, "fast": 0.6}
TOLD = {"same": Verdict.equivalent, "slow": Verdict.slower, "fast": Verdict.faster}
TIMED = plan(3, NAMES, budget_s=600.0)
SHORT = plan(2, ("baseline", "same"), budget_s=20.0)


def cost_s(workload, name):
    return 1e-4 * workload.seq_len * RATIO[name]


def client_in(world: str) -> SimulatedClient:
    return SimulatedClient(WORLDS[world], cost_s, seed=1, layout=0.002)


def clock_in(world: str, seed: int) -> VirtualClock:
    machine = Machine(WORLDS[world], seed)
    return VirtualClock(machine, machine.turn)


def samples(results, name="same"):
    records = [record for record in results.records if record.implementation == name]
    return [sample for record in records for sample in record.measurement("latency").samples]


def run_in(world, folder, asked=SHORT, **settings):
    return virtual.execute(asked, folder, SimulatedClient(WORLDS[world], lambda *_: 0.3e-3, **settings))


def test_worlds_have_the_sizes_that_they_claim():
    logs = {}
    for world in WORLDS:
        clock = clock_in(world, 3)
        logs[world] = np.log([clock.elapsed(lambda clock=clock: clock.spend(4e-3), 1) / 4e-3 for _ in range(12000)])
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
    rows = comparisons(results)
    verdicts = {(row.workload.id, row.implementation): row.verdict for row in rows}
    assert verdicts == {(w.id, name): reported for w in workloads(3) for name, reported in TOLD.items()}
    assert sum(row.low / 1.005 <= RATIO[row.implementation] <= row.high * 1.005 for row in rows) >= len(rows) - 1


def test_looking_at_what_runs_leaves_every_time_as_it_was(tmp_path):
    taken = []
    for stages in (execution.STAGES, [stage for stage in execution.STAGES if stage != "operators"]):
        client, folder = client_in("busy"), tmp_path / str(len(stages))
        execution.execute(
            TIMED, folder, lambda _: None, stages, client=client, clock=client.clock.now, read_counters=lambda: None
        )
        results = read(folder)
        assert any(record.operators for record in results.records) is ("operators" in stages)
        taken.append({name: samples(results, name) for name in NAMES})
    assert taken[0] == taken[1]


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


def compared(clock: VirtualClock, ratios: dict[str, float], limit_s: float) -> FunctionComparison:
    """Compare functions of 2 ms with each other in one process."""
    calls = {name: (lambda s=2e-3 * ratio: clock.spend(s)) for name, ratio in ratios.items()}
    settings = {"clock": clock, "gauge_work": lambda: clock.spend(PROBE_S), "conditions": blocks.SIMULATED}
    found = FunctionComparison(calls, next(iter(calls)), smallest_effect=0.01, **settings)
    found.run(limit_s)
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("world", WORLDS)
def test_a_comparison_of_functions_finds_what_was_planted(world):
    found = compared(clock_in(world, 5), RATIO, 300.0)
    one_process = TOLD | {"same": Verdict.undecided}
    assert {name: judged.verdict for name, judged in found.judgements.items()} == one_process
    assert found.judgements["same"].reason is Reason.one_process
    assert found.spent_s < 300


def test_functions_are_not_told_apart_below_the_spread_between_processes():
    """A difference of 2 % is beyond the margin and known to a tenth of that; another process may not have it."""
    found = compared(VirtualClock(), {"a": 1.0, "b": 1.02}, 60.0)
    judged = found.judgements["b"]
    assert (judged.verdict, judged.reason) == (Verdict.undecided, Reason.one_process)
    assert judged.ratio == pytest.approx(1.02, rel=1e-3)
    assert judged.low < 1 < judged.high
    assert found.state.num_visits["here"] == LOOKS[-1]  # more would not show more


def test_cold_caches_cost_each_call_what_the_world_says(tmp_path):
    """The time excludes emptying them, and short calls have a bounded number per sample."""
    warm = samples(run_in("slots", tmp_path / "warm"))
    cold = samples(run_in("slots", tmp_path / "cold", msgspec.structs.replace(SHORT, cache="cold")))
    ratio = median(each.value for each in cold) / median(each.value for each in warm)
    assert ratio == pytest.approx(1 + WORLDS["slots"].carry, rel=0.02)
    assert {each.num_calls for each in cold} == {4}


def test_a_sustained_visit_begins_hot_and_the_report_says_so(tmp_path):
    starts = {}
    for pace, ending in (("burst", "CUDA graphs"), ("sustained", "CUDA graphs, sustained")):
        client, seen = SimulatedClient(WORLDS["calm"], lambda *_: 3e-3), []
        client.sample_blocks = lambda visit, take=client.sample_blocks, seen=seen: seen.append(visit) or take(visit)
        asked = msgspec.structs.replace(SHORT, pace=pace, launch="graph", budget_s=0.0)
        results = virtual.execute(asked, tmp_path / pace, client)
        assert facts(results)["samples"].endswith(f"caches warm, {ending}")
        asked_for = {(each.launch, each.sustained_s) for each in seen}
        assert asked_for == {("graph", SUSTAINED_S if pace == "sustained" else 0.0)}
        starts[pace] = sorted({each.visit: each.start_s for each in reversed(samples(results))}.values())
    assert starts["sustained"][0] >= SUSTAINED_S > starts["burst"][0]
    assert min(later - earlier for earlier, later in pairwise(starts["sustained"])) >= SUSTAINED_S


@pytest.mark.parametrize(("slowed_by", "why"), [(0x4 | 0x1, "power cap"), (0x4 | 0x20, "power cap, thermal slowdown")])
def test_the_first_lines_say_what_throttled_the_device(slowed_by, why, tmp_path):
    results = run_in("calm", tmp_path)
    first = results.plan.workloads[0].id
    assert not any("throttled" in line for line in troubles(results))
    states = (
        DeviceState(clock_mhz=1980.0, temperature_c=50.0, power_w=640.0),
        DeviceState(clock_mhz=1700.0, temperature_c=61.0, power_w=700.0, slowed_by=slowed_by),
        DeviceState(clock_mhz=0.0, temperature_c=0.0, power_w=660.0, slowed_by=0x1),  # idle, and no more known
    )

    def stated(event):
        is_there = isinstance(event, VisitFinished) and event.workload == first
        return msgspec.structs.replace(event, states=states) if is_there else event

    found = rewrite(tmp_path, stated)
    notes = {row["workload"]: row.texts["notes"] for row in tables.every(found)}
    assert {workload for workload, text in notes.items() if "clock fell" in text} == {first}
    assert why in notes[first]
    if why == "power cap":  # a GPU under full load is at its power cap
        assert not any("throttled" in line for line in troubles(found))
        return
    assert any(f"{first} is doubtful: the driver throttled the device" in line for line in troubles(found))
    markdown = summary.markdown(found)
    assert markdown.index("throttled") < markdown.index("## Findings")


def test_page_faults_are_counted_call_by_call_and_reported(tmp_path):
    results = run_in("calm", tmp_path, faults=lambda _, name: 900 if name == "same" else 0)
    assert {each.num_faults / each.num_calls for each in samples(results)} == {900}
    assert {each.num_faults for each in samples(results, "baseline")} == {0}
    notes = {row["implementation"]: row.texts["notes"] for row in tables.every(results)}
    assert "900 page faults" in notes["same"]
    assert "page fault" not in notes["baseline"]


def test_the_same_seed_writes_the_same_journal(tmp_path):
    journals = []
    for name in ("one", "other"):
        run_in("busy", tmp_path / name, layout=0.01, process=0.01, seed=3)
        lines = (tmp_path / name / JOURNAL).read_text().splitlines()
        journals.append([re.sub(r'"(time|run|commit|digest)":"[^"]*"', "", line) for line in lines])
    assert len(journals[0]) > 10
    assert journals[0] == journals[1]
