"""Verdicts: the rules by value, what they need at the same time, and what they leave open."""

import math

import numpy as np
import pytest

from attnbench.statistics.intervals import Estimate, Pairs
from attnbench.statistics.verdicts import ALONE as JUDGED_ALONE
from attnbench.statistics.verdicts import (
    Effect,
    Judgement,
    Needed,
    detectable,
    judge,
    margin,
    needed,
    paired_effect,
    visits_to_go,
    within,
)
from attnbench.storage.records import LARGEST_EQUIVALENCE, Verdict
from attnbench.workloads.sweep import SMALLEST_EFFECT

ERROR = 0.005
HALF = 2.2621572 * ERROR  # ten visits
ALONE, AMONG = (Needed(differ=value, agree=value) for value in (20.0, 1280.0))
"""One comparison, and one among 64."""


def said(log: float, *, e_same: float = 1e9, e_apart: float = 0.0, limit: float = 0.02) -> Effect:
    ratio = Estimate(point=math.exp(log), standard_error=ERROR, num_clusters=10, num_samples=40)
    return Effect(ratio=ratio, margin=limit, e_same=e_same, e_apart=e_apart, spread=0.01)


def verdicts(effects: list[Effect]) -> list[Verdict]:
    return [judgement.verdict for judgement in judge(effects)]


def is_settled(effect: Effect, verdict: Verdict) -> bool:
    return Judgement(effect=effect, verdict=verdict, reason=None, needed=ALONE, policy=JUDGED_ALONE).is_settled


def made(shift: float, *, num_visits: int = 12, seed: int = 1, noise: float = 0.01) -> Pairs:
    logs = np.random.default_rng(seed).normal(shift, noise, 4 * num_visits)
    return Pairs(logs=logs, visits=tuple((0, number // 4) for number in range(4 * num_visits)))


@pytest.mark.parametrize(
    ("judgement", "verdict"),
    [
        (said(0.05), Verdict.slower),
        (said(-0.05), Verdict.faster),
        (said(0.05, e_same=19.9), Verdict.undecided),  # no evidence
        (said(0.019), Verdict.undecided),  # nobody should choose by so little
        (said(0.05, limit=0.06), Verdict.undecided),  # the floor hides it
        (said(0.0, e_same=1.0, e_apart=1e9), Verdict.equivalent),
        (said(0.004, e_apart=1e9), Verdict.equivalent),  # surely different, and surely too little to matter
        (said(0.0, e_same=1.0, e_apart=19.9), Verdict.undecided),
        (said(0.012, e_apart=1e9), Verdict.undecided),  # the interval leaves the margin
    ],
)
def test_a_verdict_needs_evidence_an_interval_and_a_size(judgement, verdict):
    assert verdicts([judgement]) == [verdict]


def test_an_interval_that_holds_one_forbids_a_direction():
    wide = Estimate(point=math.exp(0.05), standard_error=0.05, num_clusters=10, num_samples=40)
    assert verdicts([Effect(ratio=wide, margin=0.02, e_same=1e9, e_apart=0.0, spread=0.01)]) == [Verdict.undecided]
    none = Estimate(point=math.exp(0.05), standard_error=None, num_clusters=2, num_samples=8)
    assert verdicts([Effect(ratio=none, margin=0.02, e_same=1e9, e_apart=1e9, spread=0.01)]) == [Verdict.undecided]


def test_among_many_cells_one_needs_more():
    one, others = said(0.05, e_same=1000.0), [said(0.0, e_same=1.0)] * 63
    assert verdicts([one]) == [Verdict.slower]
    assert set(verdicts([one, *others])) == {Verdict.undecided}
    assert verdicts([said(0.05, e_same=1280.0), *others])[0] is Verdict.slower
    assert verdicts([one] * 2 + others[1:])[:2] == [Verdict.slower] * 2


def test_what_is_found_and_not_reported_makes_nothing_else_easier():
    """Sixty plain differences that are too small to matter: a lucky one of 64 needs 1280 as before, and not 21."""
    tiny = [said(0.005, e_same=1e9)] * 60
    lucky = said(0.05, e_same=100.0)
    assert verdicts([lucky, *tiny, *[said(0.0, e_same=1.0)] * 3])[0] is Verdict.undecided
    agreed = [said(0.0, e_same=1.0, e_apart=1e9)] * 63
    assert verdicts([lucky, *agreed])[0] is Verdict.undecided
    assert verdicts([said(0.05, e_same=1280.0), *agreed])[0] is Verdict.slower


def test_the_next_verdict_needs_more_the_fewer_of_its_kind_there_are():
    session = [Verdict.equivalent] * 15 + [Verdict.undecided]
    assert needed(session) == Needed(differ=pytest.approx(320.0), agree=pytest.approx(20.0))
    session = [Verdict.slower] * 3 + [Verdict.faster] * 4 + [Verdict.undecided] * 9
    assert needed(session) == Needed(differ=pytest.approx(40.0), agree=pytest.approx(320.0))
    assert needed([]) == ALONE


def test_the_margin_is_two_percent_or_the_floor():
    floor = Estimate(point=1.01, standard_error=ERROR, num_clusters=10, num_samples=40)
    assert margin(None) == SMALLEST_EFFECT
    assert margin(Estimate(point=1.0, standard_error=None, num_clusters=1, num_samples=4)) == SMALLEST_EFFECT
    assert math.log1p(margin(floor)) == pytest.approx(math.log(1.01) + HALF)
    assert margin(floor, 0.5) == 0.5
    ratio = Estimate(point=1.0, standard_error=None, num_clusters=1, num_samples=4)
    assert Effect(ratio=ratio, margin=0.03, e_same=1.0).sameness == 0.03
    assert Effect(ratio=ratio, margin=5.0, e_same=1.0).sameness == LARGEST_EQUIVALENCE


@pytest.mark.parametrize(
    ("smallest", "verdict"), [(0.02, Verdict.equivalent), (0.005, Verdict.slower), (0.2, Verdict.equivalent)]
)
def test_what_matters_is_what_one_asks_for(smallest, verdict):
    judged = paired_effect(made(0.01, num_visits=60), None, smallest)
    assert judged is not None
    assert judged.margin == smallest
    assert not judged.is_floor
    assert verdicts([judged]) == [verdict]


def test_a_floor_above_what_matters_is_the_margin():
    floor = Estimate(point=1.01, standard_error=ERROR, num_clusters=10, num_samples=40)
    assert paired_effect(made(0.0), floor, 0.001).is_floor
    assert not paired_effect(made(0.0), floor, 0.5).is_floor


@pytest.mark.parametrize(("number", "limit"), [(11, 40.0), (15, 640.0)])
def test_the_fewest_pairs_that_can_be_enough_see_what_is_plain_and_no_absurdity(number, limit):
    """All must find the slowdown, which two to four standard deviations of the pairs are."""
    ratio = Estimate(point=1.0, standard_error=1e-4, num_clusters=number, num_samples=number)
    seen = detectable(Effect(ratio=ratio, margin=0.001, e_same=1.0, e_apart=1.0, spread=0.01), limit)
    assert seen is not None
    assert 0.015 < seen < 0.04


def test_equivalent_within_a_noise_floor_is_not_settled_for_the_floor_may_fall():
    floor = Estimate(point=1.01, standard_error=ERROR, num_clusters=10, num_samples=40)
    within_floor, within_effect = paired_effect(made(0.0), floor, 0.001), paired_effect(made(0.0), floor, 0.5)
    assert not is_settled(within_floor, Verdict.equivalent)
    assert is_settled(within_effect, Verdict.equivalent)
    assert is_settled(within_floor, Verdict.slower)
    assert not is_settled(within_effect, Verdict.undecided)


@pytest.mark.parametrize(("shift", "verdict"), [(0.05, Verdict.slower), (0.0, Verdict.equivalent)])
def test_pairs_of_a_shift_are_reported(shift, verdict):
    judged = paired_effect(made(shift), None)
    assert judged is not None
    assert verdicts([judged]) == [verdict]
    assert judged.spread == pytest.approx(0.01, rel=0.3)


def test_swapping_the_arms_mirrors_the_verdict():
    mirrored = {Verdict.slower: Verdict.faster, Verdict.faster: Verdict.slower}
    for seed in range(40):
        found = made(0.03 * (seed % 5 - 2), seed=seed, num_visits=4 + seed % 9)
        one = paired_effect(found, None)
        other = paired_effect(Pairs(logs=-found.logs, visits=found.visits), None)
        assert one is not None
        assert other is not None
        assert other.e_same == pytest.approx(one.e_same)
        assert other.e_apart == pytest.approx(one.e_apart)
        (verdict,) = verdicts([one])
        assert verdicts([other]) == [mirrored.get(verdict, verdict)]


def test_no_pairs_no_judgement():
    assert paired_effect(Pairs(logs=np.array([]), visits=()), None) is None


def test_what_is_decided_has_nothing_to_go():
    assert visits_to_go(said(0.2), ALONE) == 1.0
    assert visits_to_go(said(0.0, e_same=1.0, e_apart=1e9), ALONE) == 1.0
    few = Estimate(point=1.0, standard_error=None, num_clusters=1, num_samples=4)
    assert visits_to_go(Effect(ratio=few, margin=0.02, e_same=1.0, e_apart=1.0, spread=0.01), ALONE) == 2.0


def test_visits_to_go_grow_as_the_margin_comes_near():
    beyond = [visits_to_go(said(log, e_same=1.0), AMONG) for log in (0.1, 0.03, 0.021)]
    within = [visits_to_go(said(log, e_apart=1.0), AMONG) for log in (0.0, 0.01, 0.0195)]
    assert beyond[0] <= beyond[1] <= beyond[2]
    assert within[0] < within[1] < within[2]


def test_more_is_asked_where_more_is_compared():
    assert visits_to_go(said(0.03, e_same=1.0), AMONG) > visits_to_go(said(0.03, e_same=1.0), ALONE)


def null(num_visits: int) -> Effect:
    error = 0.02 / math.sqrt(num_visits)
    ratio = Estimate(point=1.0, standard_error=error, num_clusters=num_visits, num_samples=4 * num_visits)
    return Effect(ratio=ratio, margin=SMALLEST_EFFECT, e_same=1.0, e_apart=1.0, spread=0.04)


def test_a_detectable_effect_lies_above_the_margin_and_falls_with_more_visits():
    effects = [detectable(null(num_visits)) for num_visits in (4, 8, 16, 64, 1000)]
    assert effects == sorted(effects, reverse=True)
    assert SMALLEST_EFFECT < effects[-1] < 1.1 * SMALLEST_EFFECT


def test_a_detectable_effect_is_more_where_more_is_compared():
    assert detectable(null(8), AMONG.differ) > detectable(null(8))


def test_without_an_interval_nothing_is_said_to_be_detectable():
    few = paired_effect(made(0.0, num_visits=2), None)
    assert few is not None
    assert detectable(few) is None


def test_a_detectable_effect_is_found_four_times_of_five():
    found = []
    for seed in range(150):
        null = paired_effect(made(0.0, seed=seed), None)
        assert null is not None
        effect = detectable(null)
        assert effect is not None
        fresh = paired_effect(made(math.log1p(effect), seed=1000 + seed), None)
        assert fresh is not None
        found.append(verdicts([fresh]) == [Verdict.slower])
    assert 0.65 <= np.mean(found) <= 0.93


def in_processes(rng: np.random.Generator, shift: float, *, number: int, bias: float, noise: float = 0.03) -> Effect:
    """A session in which each process has a bias of its own, and 16 blocks."""
    logs = shift + np.repeat(rng.normal(0, bias, number), 16) + rng.normal(0, noise, 16 * number)
    within = Pairs(logs=logs, visits=tuple((epoch, 0) for epoch in range(number) for _ in range(16)))
    found = paired_effect(within.by_epoch(), None, within=within)
    assert found is not None
    return found


def test_where_processes_count_a_twentieth_is_seen_in_few_of_them_and_identical_code_is_left_alone():
    rng = np.random.default_rng(3)
    same = [in_processes(rng, 0.0, number=number, bias=0.0135) for _ in range(70) for number in range(3, 9)]
    found = [judge([each])[0].verdict for each in same]
    assert found.count(Verdict.slower) + found.count(Verdict.faster) <= 0.005 * len(found)
    slower = [judge([in_processes(rng, 0.055, number=6, bias=0.0135)])[0].verdict for _ in range(70)]
    assert slower.count(Verdict.slower) >= 0.95 * len(slower)


def test_processes_further_apart_than_is_known_of_any_need_more():
    rng = np.random.default_rng(3)
    usual, wide = ([in_processes(rng, 0.06, number=6, bias=bias) for _ in range(50)] for bias in (0.0135, 0.08))
    assert np.median([each.e_same for each in usual]) > 100
    assert np.median([each.e_same for each in wide]) < 20


def test_a_session_with_a_smaller_share_of_false_verdicts_asks_for_more_evidence():
    plain = said(math.log(1.2), e_same=100.0)
    verdicts = [judge([plain], within(JUDGED_ALONE, share))[0].verdict for share in (0.05, 0.001)]
    assert verdicts == [Verdict.slower, Verdict.undecided]
