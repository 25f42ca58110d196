"""Effects between two separate runs, and how they are judged: by value, by law, and by simulation."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats as reference

from attnbench.statistics.intervals import Estimate
from attnbench.statistics.verdicts import (
    FALSE_SHARE,
    Effect,
    Policy,
    Reason,
    Relative,
    effect_between_runs,
    judge,
    mean_between_runs,
    p_value,
)
from attnbench.storage.records import Verdict

POLICY = Policy(is_paired=False, fewest_processes=3, detectable=1.0)
STRICT = replace(POLICY, detectable=None)


def estimate(log: float, error: float, degrees: float = 8.0) -> Estimate:
    return Estimate(
        point=math.exp(log), standard_error=error, num_clusters=int(degrees) + 1, num_samples=40, degrees=degrees
    )


def relative(log: float, error: float = 0.01) -> Relative:
    return Relative(ratio=estimate(log, error), floor=estimate(0.0, 0.002), num_epochs=3)


def effects(*logs: float, error: float = 0.01, **more) -> list[Effect]:
    """Effects of known error, with no noise floor."""
    found = []
    for log in logs:
        ratio = estimate(log, error, 1e6)
        p = p_value(ratio)
        found.append(Effect(ratio=ratio, margin=0.0, smallest=0.0, e_same=1 / p, num_processes=3, **more))
    return found


def verdicts(given: list[Effect], policy: Policy = STRICT) -> list[Verdict]:
    return [judged.verdict for judged in judge(given, policy)]


def test_errors_add_in_squares_and_what_runs_differ_by_counts_twice():
    found = effect_between_runs(relative(0.3, 0.01), relative(0.4, 0.02), between_runs=0.03)
    assert found.ratio.point == pytest.approx(math.exp(0.1))
    assert found.ratio.standard_error == pytest.approx(math.sqrt(0.01**2 + 0.02**2 + 2 * 0.03**2))
    bare = effect_between_runs(relative(0.3, 0.01), relative(0.4, 0.02), between_runs=0.0)
    welch = (0.01**2 + 0.02**2) ** 2 / (0.01**4 / 8 + 0.02**4 / 8)
    assert bare.ratio.degrees == pytest.approx(welch)


def test_swapping_the_runs_turns_the_effect_upside_down():
    one, other = relative(0.3), relative(0.35)
    there, back = (effect_between_runs(*pair, 0.02) for pair in ((one, other), (other, one)))
    assert there.ratio.point == pytest.approx(1 / back.ratio.point)
    assert p_value(there.ratio) == pytest.approx(p_value(back.ratio))
    assert there.margin == back.margin


def test_the_p_value_is_that_of_student():
    assert p_value(estimate(0.03, 0.01, 5.0)) == pytest.approx(2 * reference.t.sf(3.0, 5))
    assert p_value(estimate(0.0, 0.0)) == 1.0
    assert p_value(estimate(0.01, 0.0)) == 0.0
    assert effect_between_runs(relative(0.0, 0.0), relative(0.1, 0.0), 0.0).e_same == math.inf


def test_many_cells_ask_for_more_of_each():
    assert verdicts(effects(0.025)) == [Verdict.slower]
    assert verdicts(effects(0.025, *[0.0] * 15)) == [Verdict.undecided] * 16
    assert verdicts(effects(*[0.04] * 16)) == [Verdict.slower] * 16
    assert verdicts([]) == []


def test_the_family_is_corrected_as_scipy_corrects_it():
    draws = np.random.default_rng(5)
    for _ in range(200):
        given = effects(*draws.normal(0.0, 0.03, draws.integers(1, 20)))
        adjusted = reference.false_discovery_control([p_value(each.ratio) for each in given], method="by")
        rejected = [verdict is not Verdict.undecided for verdict in verdicts(given)]
        assert rejected == (adjusted <= FALSE_SHARE).tolist()


def test_the_smallest_effect_is_found_four_times_in_five():
    """Effects of that very size, drawn anew: the share that is called slower."""
    least = judge(effects(*[0.0] * 8, allowed=0.02), POLICY)[0].detectable
    assert least is not None
    draws = np.random.default_rng(3).normal(math.log1p(least), 0.01, 400)
    called = sum(verdicts(effects(float(log), *[0.0] * 7, allowed=0.02), POLICY)[0] is Verdict.slower for log in draws)
    assert 0.75 < called / 400 < 0.85


def test_the_suite_is_the_geometric_mean_and_takes_cells_of_a_workload_as_one():
    workloads = [[estimate(0.1, 0.01, 1e6), estimate(0.2, 0.01, 1e6)], [estimate(0.05, 0.01, 1e6)]]
    found = mean_between_runs(workloads, 0.0).ratio
    assert found.point == pytest.approx(math.exp((0.15 + 0.05) / 2))
    assert found.high / found.point == pytest.approx(math.exp(1.96 * 0.01 / math.sqrt(2)), rel=1e-3)
    shifted = mean_between_runs(workloads, 0.02).ratio
    assert shifted.high / shifted.point == pytest.approx(
        math.exp(1.96 * math.hypot(0.01, 0.04) / math.sqrt(2)), rel=1e-3
    )
    (judged,) = judge([replace(mean_between_runs(workloads, 0.0), allowed=0.02)], replace(POLICY, fewest_processes=0))
    assert judged.verdict is Verdict.slower


@pytest.mark.parametrize(
    ("changes", "policy", "verdict", "reason"),
    [
        ({}, POLICY, Verdict.equivalent, None),  # a slowdown would have shown
        ({}, STRICT, Verdict.undecided, Reason.imprecise),
        ({"allowed": 0.03}, STRICT, Verdict.equivalent, None),  # whatever it is, it is allowed
        ({"allowed": 0.01}, STRICT, Verdict.undecided, Reason.imprecise),
        ({"allowed": 0.01, "lowest": 0.02}, POLICY, Verdict.undecided, Reason.noise_floor),
        ({"allowed": 0.01, "smallest": 0.02}, POLICY, Verdict.undecided, Reason.smallest_effect),
        ({"num_processes": 2}, POLICY, Verdict.undecided, Reason.few_processes),
        ({"num_processes": 2, "allowed": math.inf}, POLICY, Verdict.equivalent, None),
    ],
)
def test_without_a_difference_there_is_a_verdict_or_the_reason_why_not(changes, policy, verdict, reason):
    (given,) = effects(0.005)
    (judged,) = judge([replace(given, **changes)], policy)
    assert (judged.verdict, judged.reason) == (verdict, reason)


@pytest.mark.parametrize("allowed", [None, 0.0, 0.3, math.inf])
def test_what_is_plainly_faster_is_so_whatever_is_allowed(allowed):
    assert verdicts(effects(-0.2, allowed=allowed)) == [Verdict.faster]


def test_too_few_processes_find_nothing_however_plain_it_is():
    (given,) = effects(0.2)
    (judged,) = judge([replace(given, num_processes=2)], POLICY)
    assert (judged.verdict, judged.reason) == (Verdict.undecided, Reason.few_processes)
