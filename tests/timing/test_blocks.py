"""The timing engine on a virtual clock: complete blocks, fresh orders, calibrated samples, steady ratios."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

from attnbench.devices import waiting
from attnbench.storage.records import PROBE, Arm, Flag, Sample
from attnbench.timing import blocks
from studies.simulated.machine import VirtualClock


def timed(name: str, call: Callable[[], object]) -> blocks.TimedCall:
    return blocks.TimedCall(arm=Arm(implementation=name), call=call)


def calls_of(clock: VirtualClock, **costs: float) -> list[blocks.TimedCall]:
    return [timed(name, lambda cost=cost: clock.spend(cost)) for name, cost in costs.items()]


def counting(clock: VirtualClock, calls: Counter[str], name: str, cost: float) -> blocks.TimedCall:
    def call() -> None:
        calls[name] += 1
        clock.spend(cost)

    return timed(name, call)


def visit(calls: list[blocks.TimedCall], *rest) -> dict[str, tuple[Sample, ...]]:
    """Return the samples by the implementation's name."""
    return {arm.implementation: taken for arm, taken in blocks.visit(calls, *rest).items()}


def at(number: int = 0, num_blocks: int = 8) -> blocks.Visit:
    return blocks.Visit(epoch=0, number=number, num_blocks=num_blocks, seed=number)


def chosen(calls: list[blocks.TimedCall], clock: VirtualClock) -> int:
    """Return the calibrated number of calls in a sample."""
    least_s = max(clock.sample_s, blocks.MIN_SAMPLE_TICKS * clock.resolution_s)
    return blocks.choose(blocks.calibrate(calls, clock, least_s), least_s).num_calls


@pytest.mark.parametrize(
    ("step_s", "flags"),
    [(None, 0), (0.0, Flag.waits_read), (2e-5, Flag.waits_read), (1e-3, Flag.waits_read | Flag.waited)],
)
def test_a_sample_keeps_its_faults_its_load_and_whether_its_threads_waited(step_s, flags):
    clock, readings, counted = VirtualClock(), itertools.count(), Counter()
    crowd = lambda waited_s: dict.fromkeys("abcdef", waited_s)  # noqa: E731 - threads that wait at the same time
    waits = lambda: {} if step_s is None else crowd(step_s * next(readings))  # noqa: E731 - short
    reported = blocks.Conditions(count_faults=lambda: 5 * counted["a"], read_load=lambda: 1.5, read_waits=waits)
    taken = visit([counting(clock, counted, "a", 1e-3), *calls_of(clock, b=1e-3)], clock, at(), reported)
    assert {sample.flags for own in taken.values() for sample in own} == {flags}
    assert {(sample.num_faults, sample.load) for sample in taken["a"]} == {(5, 1.5)}
    assert {sample.num_faults for sample in taken["b"]} == {0}


@pytest.mark.parametrize(("cost", "calls"), [(1e-5, 128), (1e-3, 1), (0.9e-3, 2), (0.5, 1)])
def test_a_sample_lasts_at_least_a_millisecond_and_a_thousand_ticks(cost, calls):
    clock = VirtualClock()
    it = calls_of(clock, a=cost)
    assert chosen(it, clock) == calls
    clock.resolution_s = 1e-3
    assert chosen(it, clock) * cost >= 1.0


def test_a_short_call_that_once_had_to_wait_is_not_taken_for_a_long_one():
    draws = iter([3.5e-3, 0.0, 0.0, 0.0, 3.5e-3])
    clock = VirtualClock(lambda seconds, _: seconds + next(draws, 0.0))
    assert chosen(calls_of(clock, a=2e-5), clock) == 64


def test_a_call_that_was_short_once_and_is_long_now_ends_the_calibration():
    draws = iter([1e-6])
    clock = VirtualClock(lambda seconds, _: next(draws, seconds))
    assert chosen(calls_of(clock, a=0.5), clock) == 1
    assert clock.now() <= 4 * 0.5


def test_long_calls_are_calibrated_by_one_call_each():
    clock = VirtualClock()
    assert chosen(calls_of(clock, a=0.5, b=2.0), clock) == 1
    assert clock.now() == pytest.approx(2.5)


@pytest.mark.parametrize("slowdown", [3.0, 30.0, 3000.0])
@pytest.mark.parametrize("lasts_s", [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, math.inf])
def test_identical_code_has_identical_settings_despite_stalls(lasts_s, slowdown):
    """In the first visit, which calibrates, and in the next, which uses its samples."""
    for begins_s in [0.0, *(10 ** (exponent / 6) for exponent in range(-33, -5))]:

        def disturb(seconds: float, now: float, begins_s: float = begins_s) -> float:
            return seconds * (slowdown if begins_s <= now < begins_s + lasts_s else 1.0)

        check_equal(VirtualClock(disturb))


def check_equal(clock: VirtualClock) -> None:
    """All arms but a slow one are the same code; all have the same calls before and in a sample."""
    costs = {"base": 1e-4, "same": 1e-4, "slow": 5e-4}
    counted: Counter[str] = Counter()
    calls = [counting(clock, counted, name, cost) for name, cost in costs.items()]
    calls.append(blocks.TimedCall(arm=PROBE, call=lambda: clock.spend(8e-5)))
    samples: dict[Arm, tuple[Sample, ...]] = {}
    for number in range(2):
        counted.clear()
        drawn = blocks.Visit(epoch=0, number=number, num_blocks=4, seed=number, known=blocks.known(samples))
        samples = blocks.visit(calls, clock, drawn)
        first, *others = [[sample.num_calls for sample in own] for arm, own in samples.items() if arm != PROBE]
        assert len(set(first)) == 1
        assert all(own == first for own in others)
        if number:  # a first visit has a first call of each; one arm may warm up one round longer
            assert abs(counted["same"] - counted["slow"]) <= first[0]


def test_settings_follow_from_all_arms_in_any_order():
    """Next to a far slower arm, all have fewer calls, and fewer untimed ones."""
    seconds = {Arm(implementation=name): call_s for name, call_s in {"a": 1e-4, "b": 3e-4, "c": 20e-3}.items()}
    whole = blocks.choose(seconds, 1e-3)
    assert whole == blocks.Settings(num_calls=1, num_touches=1, is_warmed=True)
    assert blocks.choose({arm: min(call_s, 2e-3) for arm, call_s in seconds.items()}, 1e-3).num_calls == 4
    assert whole == blocks.choose(dict(reversed(seconds.items())), 1e-3)
    assert whole == blocks.choose({**seconds, PROBE: 1e-9}, 1e-3)
    assert blocks.choose(seconds, 1e-3, is_cold=True).num_touches == 0
    assert blocks.choose({Arm(implementation="a"): 1e-5}, 1e-3, is_cold=True).num_calls == blocks.MOST_COLD_CALLS
    short = [blocks.choose({Arm(implementation="a"): call_s}, 1e-3).num_touches for call_s in (1e-5, 0.6e-3, 2e-3)]
    assert short == [1, 1, 1]


def test_every_block_holds_every_arm_once_in_an_order_that_the_seed_draws_anew():
    clock = VirtualClock()
    arms = calls_of(clock, a=1e-3, b=2e-3, c=4e-3)
    samples = visit(arms, clock, at(num_blocks=60))
    places = {(s.block, s.slot): name for name, taken in samples.items() for s in taken}
    orders = Counter(tuple(places[block, slot] for slot in range(3)) for block in range(60))
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(orders) == math.factorial(3)
    assert [s.start_s for s in samples["a"]] == sorted(s.start_s for s in samples["a"])
    slots = [[s.slot for s in visit(arms, clock, at(number, num_blocks=60))["a"]] for number in (0, 0, 1)]
    assert [s.slot for s in samples["a"]] == slots[0] == slots[1] != slots[2]


@pytest.mark.parametrize(("short_s", "touches"), [(9e-3, 1), (11e-3, 0)])
def test_each_arm_has_an_untimed_call_before_its_samples_where_one_arm_is_short(short_s, touches):
    clock, calls = VirtualClock(), Counter()
    contenders = [counting(clock, calls, "short", short_s), counting(clock, calls, "long", 0.2)]
    known = tuple((each.arm, cost) for each, cost in zip(contenders, (short_s, 0.2), strict=True))
    visit(contenders, clock, at(num_blocks=1))
    calls.clear()
    visit(contenders, clock, blocks.Visit(epoch=0, number=1, num_blocks=5, seed=0, known=known))
    assert calls["long"] - 5 * (1 + touches) in {0, 1}  # the warm-up ends in its turn
    assert 1 <= calls["short"] - 5 * (1 + touches) <= 3


@pytest.mark.parametrize("call_s", [1e-5, 3e-4, 15e-3, 0.1])
def test_a_process_computes_without_a_pause_before_its_first_sample(call_s):
    clock = VirtualClock()
    contenders = calls_of(clock, a=call_s, b=call_s)
    visit(contenders, clock, at(num_blocks=1))
    known = tuple((each.arm, call_s) for each in contenders)
    clock.spend(5.0)  # it slept
    start_s = clock.now()
    taken = visit(contenders, clock, blocks.Visit(epoch=0, number=1, num_blocks=2, seed=0, known=known))
    first_s = min(own[0].start_s for own in taken.values()) - start_s
    assert blocks.WARM_S <= first_s <= blocks.WARM_S + 2 * max(call_s, 2e-3)


def test_each_turn_is_announced_before_the_call():
    clock, heard = VirtualClock(), []

    def call(arm):
        assert heard[-1] == arm
        clock.spend(1e-3)

    arms = [Arm(implementation=name) for name in "ab"]
    contenders = [blocks.TimedCall(arm=arm, call=partial(call, arm)) for arm in arms]
    visit(contenders, clock, at(num_blocks=2), blocks.Conditions(on_turn=heard.append))


def test_a_cold_call_finds_its_caches_emptied_and_the_emptying_is_not_timed():
    clock, reported = VirtualClock(), []

    def call(cost, name):
        reported.append(name)
        clock.spend(cost)

    contenders = [timed(name, lambda name=name: call(3e-4, name)) for name in ("a", "b")]
    visit(contenders, clock, at(num_blocks=1))  # calibrates: four calls a sample
    reported.clear()
    cold = blocks.Conditions(flush=lambda: call(5e-3, "flush"))
    samples = visit(contenders, clock, at(num_blocks=3), cold)
    reported = reported[reported.index("flush") :]
    assert reported[::2] == ["flush"] * 24
    assert sorted(reported[1::2]) == ["a"] * 12 + ["b"] * 12
    assert [sample.value for sample in samples["a"]] == pytest.approx([3e-4] * 3)


@pytest.mark.parametrize(("spins_s", "waits_s"), [(0.0, 1e-3), (4.5e-3, 6e-3), (math.inf, 50e-3)])
def test_a_process_settles_when_its_threads_sleep_and_does_not_wait_for_ever(monkeypatch, spins_s, waits_s):
    slept = []
    time = SimpleNamespace(sleep=slept.append, process_time=lambda: min(sum(slept), spins_s))
    monkeypatch.setattr(waiting, "time", time)
    waiting.wait_for_idle_threads()
    assert sum(slept) == pytest.approx(waits_s)


@pytest.mark.parametrize(
    ("longest_s", "base", "short", "long"),
    [(0.0, 8, 8, 8), (4.0, 8, 8, 8), (1.01, 8, 8, 2), (0.75, 8, 8, 1), (0.51, 4, 4, 1), (0.1, 1, 1, 1)],
)
def test_long_calls_take_part_in_fewer_blocks_where_a_visit_would_last_too_long(longest_s, base, short, long):
    clock = VirtualClock()
    calls = calls_of(clock, base=40e-3, short=10.1e-3, long=300e-3)
    references = (calls[0].arm,)
    limited = blocks.Visit(epoch=0, number=0, num_blocks=8, seed=0, longest_s=longest_s, references=references)
    taken = blocks.visit(calls, clock, limited)
    assert {str(arm): len(samples) for arm, samples in taken.items()} == {"base": base, "short": short, "long": long}
    assert {sample.block for sample in taken[calls[2].arm]} == set(range(long))
    assert sorted(sample.slot for samples in taken.values() for sample in samples if sample.block == 0) == [0, 1, 2]


@pytest.mark.parametrize(
    ("frequency", "least_s", "most_s"),
    [
        (lambda now_s: 0.0, 3.0, 3.6),  # no sensor reports it
        (lambda now_s: max(1500.0, 2000.0 - 100.0 * now_s), 9.0, 10.5),  # it falls for 5 s: the second half is steady
        (lambda now_s: 1000.0 + 500.0 * (int(1e3 * now_s) % 2), 12.0, 12.6),  # it never settles
    ],
)
def test_sustained_samples_are_taken_when_the_clock_has_settled_or_at_a_limit(frequency, least_s, most_s):
    clock = VirtualClock()
    contenders = calls_of(clock, a=1e-3, b=2e-3)
    sustained = blocks.Visit(epoch=0, number=0, num_blocks=3, seed=0, sustained_s=3.0)
    conditions = blocks.Conditions(read_clock=lambda: frequency(clock.now()))
    samples = visit(contenders, clock, sustained, conditions)
    first_s = min(sample.start_s for taken in samples.values() for sample in taken)
    assert least_s <= first_s <= most_s
    assert all(each.value * each.num_calls >= blocks.SUSTAINED_SAMPLE_S for taken in samples.values() for each in taken)
    assert sum(each.called_s for each in contenders) == pytest.approx(clock.now())


def test_what_the_driver_says_is_read_around_each_block_and_never_inside_a_sample():
    clock, seen = VirtualClock(), []

    def read() -> None:
        seen.append("state")
        clock.spend(5e-3)

    contenders = [timed(name, lambda name=name: (seen.append(name), clock.spend(2e-3))) for name in ("a", "b")]
    samples = visit(contenders, clock, at(num_blocks=4), blocks.Conditions(on_block=read))
    seen = seen[seen.index("state") :]
    assert [place for place, each in enumerate(seen) if each == "state"] == [0, *range(5, 22, 5)]
    assert {round(each.value, 9) for taken in samples.values() for each in taken} == {2e-3}
