"""Verdicts: the rules by value, looks, Holm's level, and consistency with their intervals."""

import itertools
import math

import numpy as np
import pytest

from attnbench.statistics.verdict import (
    FEWEST_PROCESSES,
    LAYOUT_SPREAD,
    Effect,
    Reason,
    between_runs,
    doubted,
    effect,
    half_widths,
    holm_level,
    judge,
    p_values,
    yekutieli_level,
)
from attnbench.storage.records import FALSE_SHARE, Verdict

T_3, T_15 = 5.8409, 2.9467
"""Quantiles at 99.5 % of Student's t with 3 and 15 degrees of freedom, from a printed table."""
STEP = 0.01 / math.sqrt(4 / 3)
"""Four numbers, two this far below a mean and two above, have a standard deviation of 0.01."""


def four(mean: float, spread: float = 0.01) -> list[float]:
    step = STEP * spread / 0.01
    return [mean - step, mean + step, mean + step, mean - step]


def verdict_of(numbers: list[float], margin: float = 0.02) -> Verdict:
    return judge({"it": effect(numbers)}, margin)["it"].verdict


def test_effect_and_interval_by_value() -> None:
    """An interval of a single comparison has a fifth of the error."""
    found = effect(four(0.05))
    assert found.log == pytest.approx(0.05)
    assert found.error == pytest.approx(0.005)
    assert (found.degrees, found.num_processes, found.num_measured) == (3, 4, 4)
    judged = judge({"it": found})["it"]
    assert judged.level == pytest.approx(FALSE_SHARE / 5)
    assert judged.low == pytest.approx(math.exp(0.05 - T_3 * 0.005), rel=1e-4)
    assert judged.high == pytest.approx(math.exp(0.05 + T_3 * 0.005), rel=1e-4)


@pytest.mark.parametrize(
    ("numbers", "margin", "verdict"),
    [
        (four(0.06), 0.02, Verdict.slower),
        (four(-0.06), 0.02, Verdict.faster),
        (four(0.015), 0.02, Verdict.undecided),  # the interval holds 1, and reaches beyond the margin
        (four(0.0, 0.001), 0.02, Verdict.equivalent),
        (four(0.01, 0.001), 0.02, Verdict.equivalent),  # certainly different, but too little to matter
        (four(0.03, 0.001), 0.05, Verdict.equivalent),
        (four(0.06, 0.1), 0.02, Verdict.undecided),  # noise
        (four(0.0, 0.1), 0.02, Verdict.undecided),  # noise makes no arms equal
        (four(0.019, 0.002), 0.02, Verdict.undecided),  # beyond 1, and not beyond the margin
        ([0.5, 0.5, 0.5], 0.02, Verdict.undecided),
        ([0.0] * 4, 0.02, Verdict.equivalent),
        ([0.1] * 4, 0.02, Verdict.slower),
    ],
)
def test_verdict_by_value(numbers: list[float], margin: float, verdict: Verdict) -> None:
    assert verdict_of(numbers, margin) is verdict


def test_between_looks_nothing_changes() -> None:
    draws = np.random.default_rng(2)
    numbers = [*draws.normal(0.02, 0.01, 15)]
    judged = [judge({"it": effect(numbers[:number])})["it"] for number in range(8, 16)]
    assert len({each.verdict for each in judged}) == 1
    for each in judged:
        assert (each.low, each.high) == pytest.approx((judged[0].low, judged[0].high))
    assert [each.effect.num_measured for each in judged] == [*range(8, 16)]
    assert {each.effect.num_processes for each in judged} == {8}


def test_too_few_processes_have_no_interval() -> None:
    (judged,) = judge({"it": effect([0.5] * (FEWEST_PROCESSES - 1))}).values()
    assert judged.reason is Reason.few_processes
    assert judged.low is judged.high is judged.detectable is judged.half_width is None
    assert judged.ratio == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize(
    ("numbers", "needed"),
    [
        ([0.5, 0.5], 4),  # an unknown spread
        (four(0.06, 0.04), 8),
        (four(0.06, 0.1), 32),
        (four(0.06, 0.4), None),  # not even 64 would
        (four(0.5), None),  # it is decided
    ],
)
def test_the_processes_that_would_decide_are_those_of_a_look(numbers, needed) -> None:
    (judged,) = judge({0: effect(numbers)}, 0.02).values()
    assert judged.num_needed == needed
    (doubtful,) = doubted({0: judged}).values()
    assert doubtful.num_needed == needed


def test_one_process_decides_nothing_below_its_layout() -> None:
    bias = math.log1p(LAYOUT_SPREAD)
    near, slower, faster = (judge({"it": effect(four(log, 0.0001), bias=bias)})["it"] for log in (0.02, 0.06, -0.06))
    assert (near.verdict, near.reason) == (Verdict.undecided, Reason.one_process)
    assert (slower.verdict, faster.verdict) == (Verdict.slower, Verdict.faster)
    assert slower.low is not None
    assert slower.low < math.exp(0.06 - bias)


@pytest.mark.parametrize("power", [1, 4, 9])
def test_levels_reject_what_their_procedures_reject(power: int) -> None:
    draws = np.random.default_rng(5)
    harmonic = sum(1 / rank for rank in range(1, 8))
    for _ in range(200):
        values = draws.random(7) ** power
        ordered = sorted(values)
        last = max((rank for rank in range(1, 8) if ordered[rank - 1] <= 0.05 * rank / 7 / harmonic), default=0)
        assert sum(values <= float(yekutieli_level(values, 0.05))) == last
        first_kept = next((rank for rank in range(7) if ordered[rank] > 0.05 / (7 - rank)), 7)
        assert sum(values <= float(holm_level(values, 0.05))) == first_kept


def test_among_many_differences_a_table_names_more_than_a_gate() -> None:
    effects = {number: effect(four(0.15, spread=0.026)) for number in range(40)}
    of_gate, of_table = judge(effects, 0.02), judge(effects, 0.02, expects_differences=True)
    assert {each.verdict for each in of_gate.values()} == {Verdict.undecided}
    assert {each.verdict for each in of_table.values()} == {Verdict.slower}


def test_p_value_and_interval_agree() -> None:
    found = effect(four(0.02))
    assert found.p_value == pytest.approx(0.0280, abs=1e-4)  # t = 4 with 3 degrees of freedom
    half = found.half_width(found.p_value)
    assert half == pytest.approx(0.02)
    assert float(p_values(0.0, 0.0, 3.0)) == 1.0
    assert float(p_values(0.1, 0.0, 3.0)) == 0.0
    assert float(half_widths(0.01, 15.0, 0.01)) == pytest.approx(T_15 * 0.01, rel=1e-4)


@pytest.mark.parametrize("seed", range(40))
def test_no_interval_contradicts_its_verdict(seed: int) -> None:
    """Over margins, noise, numbers of processes and comparisons, bias, true ratios, and runs apart."""
    draws = np.random.default_rng(seed)
    margin = float(draws.choice([0.001, 0.02, 0.1]))
    spread = 10 ** draws.uniform(-4, 0)
    number = int(draws.integers(1, 70))
    effects: dict[int, Effect] = {}
    for place in range(int(draws.integers(1, 30))):
        truth = float(draws.choice([0.0, margin, -2 * margin, 0.5]))
        bias = float(draws.choice([0.0, 0.03]))
        effects[place] = effect(draws.normal(truth, spread, number), bias=bias)
    for one, other in itertools.pairwise(list(effects.values())[:4]):
        effects[len(effects)] = between_runs(one, other, 0.02)
    for judged in judge(effects, margin).values():
        low, high, log = judged.low, judged.high, math.log(judged.ratio)
        if low is None or high is None:
            assert judged.verdict is Verdict.undecided
            continue
        assert low <= judged.ratio <= high
        is_inside = low * (1 + margin) >= 1 and high <= 1 + margin
        expected = Verdict.equivalent if is_inside else Verdict.undecided
        if (low > 1 or high < 1) and abs(log) > math.log1p(margin):
            expected = Verdict.slower if low > 1 else Verdict.faster
        assert judged.verdict is expected
        assert (judged.reason is None) is (judged.verdict is not Verdict.undecided)


def test_detectable_is_found_in_about_four_of_five_repetitions() -> None:
    draws = np.random.default_rng(5)
    spread, look = 0.01, 16
    limits = [judge({0: effect(draws.normal(0, spread, look))})[0].detectable for _ in range(300)]
    typical = float(np.median([limit for limit in limits if limit is not None]))
    found = [verdict_of([*draws.normal(math.log1p(typical), spread, look)]) for _ in range(300)]
    assert 0.6 < found.count(Verdict.slower) / 300 < 0.95


def test_between_runs_by_value() -> None:
    base, candidate = effect(four(0.1, 0.006), bias=0.01), effect(four(0.3, 0.008), bias=0.02)
    found = between_runs(base, candidate, 0.02)
    assert found.bias == pytest.approx(0.03)
    assert found.log == pytest.approx(0.2)
    assert found.error == pytest.approx(math.sqrt(0.003**2 + 0.004**2 + 2 * 0.02**2))
    assert between_runs(base, candidate, 0.0).degrees == pytest.approx(5.57, abs=0.01)  # Welch and Satterthwaite
    assert found.num_looks == 1
    assert between_runs(effect([0.1]), candidate, 0.02).error is None
