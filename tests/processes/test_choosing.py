"""The stages that search for the fastest, on a simulated machine: exclusions, visits and resumption."""

import itertools
import math
import random
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.recommendation import recommend
from attnbench.analysis.results import Results
from attnbench.processes import execution
from attnbench.processes.messages import Failed, SampleBlocks
from attnbench.processes.planning import build_plan, plan_to_choose, plan_to_search
from attnbench.reports.recommended import crossings
from attnbench.statistics.choice import CHOOSING_PROCESSES
from attnbench.statistics.crossover import Point
from attnbench.storage.events import Plan
from attnbench.storage.journal import JOURNAL, events, write
from attnbench.storage.records import PROBE, Status
from attnbench.timing.schedule import ANSWERED, SPENT
from attnbench.workloads.workload import Workload
from studies.simulated import virtual
from studies.simulated.worlds import WORLDS

NAMES = ("sdpa", "fused", "bmm", "einsum", "sdpa_math")
SPEEDS = {"sdpa": 1.0, "fused": 0.7, "bmm": 0.72, "einsum": 1.3, "sdpa_math": 4.0}
LENGTH = 256


def chosen(*settings: str, names: tuple[str, ...] = NAMES, budget_s: float = 40.0) -> Plan:
    settings = (f"seq_len={LENGTH}", "mask=causal", *settings)
    selection = build_plan(sweep="fastest", settings=settings, is_exact=True, implementations=names, seed=3)
    return msgspec.structs.replace(plan_to_choose(selection), budget_s=budget_s)


def seconds(workload: Workload, name: str) -> float:
    """Return times in which the textbook forms are the fastest up to a length of 512."""
    own = {"fused": (0.7e-3, 1.5), "bmm": (0.72e-3, 1.5)}.get(name, (SPEEDS[name] * 1e-3, 1.0))
    return own[0] * (workload.longest / LENGTH) ** own[1]


def run(plan: Plan, folder: Path, world: str = "calm") -> tuple[Results, virtual.SimulatedClient]:
    client = virtual.SimulatedClient(WORLDS[world], seconds)
    return virtual.execute(plan, folder / "run", client), client


@pytest.mark.parametrize("world", ["calm", "drift", "spikes", "throttling"])
def test_the_fastest_is_recommended_with_its_lead(world: str, tmp_path: Path) -> None:
    results, _ = run(chosen(), tmp_path, world)
    (found,) = recommend(results)
    assert found.choice == "fused"
    lead = found.lead("einsum")
    assert lead is not None
    assert lead.ratio == pytest.approx(1.3 / 0.7, rel=0.03)
    assert found.is_clear
    assert list(found.seconds) == ["fused", "bmm", "sdpa", "einsum", "sdpa_math"]
    assert not found.excluded


@pytest.mark.parametrize(
    ("names", "budget_s", "reason"), [(("sdpa", "fused"), 40.0, ANSWERED), (("sdpa", "fused", "bmm"), 0.0, SPENT)]
)
def test_choosing_ends_with_a_clear_answer_or_its_budget(
    tmp_path: Path, names: tuple[str, ...], budget_s: float, reason: str
) -> None:
    plan = chosen(names=names, budget_s=budget_s)
    results = virtual.execute(plan, tmp_path / "run", virtual.SimulatedClient(WORLDS["calm"], seconds, layout=0.003))
    assert results.reason == reason
    assert set(results.num_visits.values()) == {CHOOSING_PROCESSES}


PAIR = ("fused", "sdpa")
LOW, HIGH = 16, 4096


def planted(number: int, seed: int) -> tuple[float, virtual.Seconds]:
    """Draw a random crossover: its length, and two power laws of the length that cross there."""
    draws = random.Random(f"{seed}/{number}")
    at = math.exp(draws.uniform(math.log(2 * LOW), math.log(HIGH / 2)))
    steep = draws.uniform(0.15, 1.0)
    one = draws.uniform(0.8, 1.6)
    exponents = (one, one - steep) if draws.random() < 0.5 else (one - steep, one)
    crossing_s = math.exp(draws.uniform(math.log(50e-6), math.log(2e-3)))
    return at, lambda workload, name: float(crossing_s * (workload.longest / at) ** exponents[PAIR.index(name)])


def searching(seed: int, budget_s: float = 60.0) -> Plan:
    selection = build_plan(
        sweep="fastest", settings=("mask=causal",), is_exact=True, implementations=PAIR, baseline=PAIR[1], seed=seed
    )
    return msgspec.structs.replace(plan_to_search(selection, PAIR, low=LOW, high=HIGH), budget_s=budget_s)


def test_a_search_that_was_killed_anywhere_goes_on_to_the_same_answer(tmp_path: Path) -> None:
    plan, (at, truth) = searching(5), planted(5, 0)

    def client() -> virtual.SimulatedClient:
        return virtual.SimulatedClient(WORLDS["calm"], truth, seed=5)

    whole = virtual.execute(plan, tmp_path / "whole", client())
    lines = list(events(whole.folder / JOURNAL))
    for number, end in enumerate(range(2, len(lines), max(1, len(lines) // 5))):
        folder = tmp_path / f"cut{number}"
        folder.mkdir()
        write(folder / JOURNAL, lines[:end])
        again = virtual.execute(plan, folder, client())
        assert list(itertools.islice(events(folder / JOURNAL), end)) == lines[:end]
        ((low, high),) = [(each.low, each.high) for each in next(crossings(again)).changes]
        assert low <= at <= high


class Failing(virtual.SimulatedClient):
    """Fails every sample by its first arm."""

    def sample_blocks(self, visit: SampleBlocks) -> Failed:
        arm = next(arm for arm, _ in visit.arms if arm != PROBE)
        return Failed(status=Status.crashed, message="gone", arm=arm)


def test_a_search_whose_every_sample_fails_comes_to_its_end(tmp_path: Path) -> None:
    results = virtual.execute(searching(0), tmp_path / "run", Failing(WORLDS["calm"], seconds))
    assert results.reason == execution.SEARCHED


def test_a_search_whose_every_block_is_discarded_ends_with_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "point", lambda *_: Point(sign=0, log=0.0, num_processes=0))
    client = virtual.SimulatedClient(WORLDS["calm"], planted(0, 0)[1])
    results = virtual.execute(searching(0, budget_s=20.0), tmp_path / "run", client)
    assert results.reason == SPENT
    assert 20.0 <= client.clock.now() <= 32.0


def test_a_search_needs_two_and_an_axis_that_grows() -> None:
    with pytest.raises(ValueError, match="crossovers need two implementations, and only fused is named"):
        plan_to_search(build_plan(sweep="fastest", implementations=("fused",)), ("fused",))
    with pytest.raises(ValueError, match="axis dtype"):
        plan_to_search(build_plan(sweep="fastest", implementations=NAMES), NAMES, "dtype")
    with pytest.raises(ValueError, match="is no range"):
        plan_to_search(build_plan(sweep="fastest", implementations=NAMES), NAMES, "length", 512, 512)


@pytest.mark.parametrize("axis", ["kv_len", "num_heads", "batch_size", "head_dim"])
def test_a_ladder_varies_one_axis_and_what_follows_from_it(axis: str) -> None:
    settings = ("seq_len=1", "kv_len=64", "num_heads=8", "num_kv_heads=8", "mask=none")
    selection = build_plan(sweep="fastest", settings=settings, is_exact=True, implementations=("fused", "sdpa"))
    plan = plan_to_search(selection, ("fused", "sdpa"), axis)
    (ladder,) = plan.ladders
    workloads = {each.id: each for each in plan.workloads}
    assert [getattr(workloads[each], axis) for each in ladder.workloads] == list(ladder.values)
    if axis == "num_heads":
        assert {each.num_kv_heads == each.num_heads for each in plan.workloads} == {True}
