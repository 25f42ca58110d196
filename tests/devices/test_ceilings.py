"""Ceilings: computed from samples, measured on a simulated machine, and measured once in a run."""

from functools import partial

import pytest
import torch

from attnbench.analysis.table import table
from attnbench.devices import cpu, device
from attnbench.devices.loads import FEWEST_ROUNDS, MIN_SAMPLE_S, MOST_ROUNDS, SLOW_S, Load, measure_loads
from attnbench.processes.messages import Failed
from attnbench.storage import journal
from attnbench.storage.events import CeilingsMeasured
from attnbench.storage.records import COPY, MATMUL, Ceilings, CeilingSample, Status
from studies.simulated import virtual
from studies.simulated.machine import VirtualClock
from studies.simulated.virtual import COPY_RATE, MATMUL_RATE, SimulatedClient
from studies.simulated.worlds import WORLDS


def measured(*rates: tuple[str, int, float, int]) -> Ceilings:
    """Build samples from a kind, an amount, a rate and a round each."""
    samples = [
        CeilingSample(kind, "float32", 1, amount, amount / rate, 1, number) for kind, amount, rate, number in rates
    ]
    return Ceilings(device="cpu", dtype="float32", num_threads=0, samples=tuple(samples))


def test_a_ceiling_is_the_best_that_was_seen_and_its_spread_is_over_the_rounds():
    found = measured((MATMUL, 10, 5.0, 0), (MATMUL, 99, 8.0, 0), (MATMUL, 10, 4.0, 1), (MATMUL, 10, 6.0, 2)).matmul
    assert found.rate == pytest.approx(8.0)
    assert found.spread == pytest.approx(8.0 / 6.0)  # the best of each round: 8, 4 and 6


def test_a_copy_is_held_against_copies_that_touch_as_much():
    found = measured((COPY, 100, 50.0, 0), (COPY, 1000, 90.0, 0), (COPY, 10**6, 20.0, 0))
    rates = {size: found.copy(size).rate for size in (0, 100, 500, 1000, 2000, 10**7)}
    assert rates == pytest.approx({0: 90, 100: 90, 500: 90, 1000: 90, 2000: 20, 10**7: 20})
    assert found.copy(100, is_cold=True).rate == pytest.approx(20.0)
    assert found.matmul is None


def loads(clock: VirtualClock, **seconds: float) -> list[Load]:
    """Build loads named by their kind and amount, such as matmul_8, with these durations."""
    places = {name: name.split("_") for name in seconds}
    return [
        Load(kind=kind, dtype="float32", size=1, amount=int(amount), call=partial(clock.spend, seconds[name]))
        for name, (kind, amount) in places.items()
    ]


def test_rounds_hold_every_load_once_in_an_order_of_their_own():
    clock = VirtualClock()
    taken = measure_loads(loads(clock, matmul_8=1e-4, matmul_64=8e-4, copy_9=1e-3), clock, limit_s=10.0)
    rounds = [[s.amount for s in taken if s.round == number] for number in range(MOST_ROUNDS)]
    assert all(sorted(each) == [8, 9, 64] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1
    assert all(s.value * s.num_calls >= 0.9 * MIN_SAMPLE_S for s in taken)
    assert {s.amount: s.value for s in taken} == pytest.approx({8: 1e-4, 64: 8e-4, 9: 1e-3})


def test_a_spent_limit_leaves_the_fewest_rounds_and_skips_long_loads():
    clock = VirtualClock()
    quick, slow, copy = loads(clock, matmul_8=SLOW_S / 5, matmul_64=SLOW_S, copy_9=1e-3)
    taken = measure_loads([quick, slow, copy], clock, limit_s=0.0)
    assert slow.num_calls == 0
    assert {s.amount for s in taken} == {8, 9}
    assert len(taken) == 2 * FEWEST_ROUNDS


def test_half_precision_is_tried_in_float32_too_and_no_copy_fits_into_a_cache(monkeypatch):
    monkeypatch.setattr(cpu.Cpu, "cache_bytes", lambda _: 2**20)
    made = device("cpu").loads("float16")
    assert {load.dtype for load in made if load.kind == MATMUL} == {"float16", cpu.WIDER["float16"]}
    assert max(load.size for load in made if load.kind == COPY) == 2**21 <= cpu.LARGEST_COPY
    for kind in (MATMUL, COPY):
        amounts = [load.amount for load in made if load.kind == kind and load.dtype == "float32"]
        assert amounts == sorted(amounts)


def test_loads_compute_what_they_are_named_after(monkeypatch):
    monkeypatch.setattr(cpu.Cpu, "cache_bytes", lambda _: 2**14)
    for load in device("cpu").loads("float32"):
        result = load.call()
        if load.kind == MATMUL:
            left, right = load.call.args
            assert (result.shape, load.amount) == ((load.size, load.size), 2 * load.size**3)
            torch.testing.assert_close(result[0], left[0] @ right, atol=1e-3, rtol=1e-3)
            assert left.std() == pytest.approx(1.0, abs=0.1)  # zeros would need less power
        else:
            assert (result.nbytes, load.amount) == (load.size, 2 * load.size)
            assert bool((result == 1.0).all())


class Broken(SimulatedClient):
    """A worker that the loads kill."""

    def measure_ceilings(self, **_):
        self.stop()
        return Failed(status=Status.crashed, message="the process was killed by SIGKILL")


def taken_in(folder):
    return [event for event in journal.events(folder / journal.JOURNAL) if isinstance(event, CeilingsMeasured)]


def ran(folder, client_class=SimulatedClient):
    client = client_class(WORLDS["calm"], lambda _, name: 2e-3 if name == "a" else 3e-3)
    results = virtual.execute(virtual.plan(2, ("a", "b"), budget_s=20.0), folder, client)
    return results, taken_in(folder), client


def test_a_run_takes_them_once_for_each_place_and_a_resumed_one_not_again(tmp_path):
    results, (event,), client = ran(tmp_path / "run")
    found = event.ceilings
    assert found.key == results.plan.workloads[0].place
    assert found.matmul.rate == pytest.approx(MATMUL_RATE, rel=0.05)
    assert found.copy(0).rate == pytest.approx(COPY_RATE, rel=0.05)
    assert results.ceilings == {("", found.key): found}
    assert event.spent_s < 2.0
    virtual.execute(results.plan, tmp_path / "run", client)
    assert taken_in(tmp_path / "run") == [event]


def test_a_machine_that_gives_none_says_why_and_is_timed_all_the_same(tmp_path):
    results, (event,), _ = ran(tmp_path / "run", Broken)
    assert event.ceilings.message == "the process was killed by SIGKILL"
    assert event.ceilings.matmul is None
    assert all(record.measurement("latency") for record in results.records)
    assert table(results)["matmul_share"].isna().all()
