"""E-values: fair bets by exact enumeration, what leaves them alone, e-BH against its definition, and power."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attnbench.statistics import evidence
from attnbench.statistics.evidence import STAKES, WIDTHS, WINDOW, discoveries, e_values, scores, usual

SIZES = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=9)
DIFFERENCES = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 100), st.floats(-100, -1e-6)), min_size=1, max_size=40)


def all_signs(length: int) -> np.ndarray:
    return np.array(list(itertools.product([-1.0, 1.0], repeat=length))).T


@settings(deadline=None, max_examples=40)
@given(SIZES)
def test_the_mean_over_all_patterns_of_signs_is_one_after_each_difference(sizes):
    for upwards_only in (False, True):
        found = e_values(all_signs(len(sizes)) * np.array(sizes)[:, None], upwards_only=upwards_only)
        assert found.mean(axis=1) == pytest.approx(1.0, rel=1e-10)


@settings(deadline=None, max_examples=40)
@given(SIZES, st.floats(0.0, 1e3))
@example([0.0, 0.0, 0.0, 0.0, 12.0], 2.3e-308)  # in units of this, 12 is beyond all numbers
def test_upwards_nothing_is_won_on_average_where_the_truth_lies_below(sizes, shift):
    found = e_values(all_signs(len(sizes)) * np.array(sizes)[:, None] - shift, upwards_only=True)
    assert (np.diff(found.mean(axis=1), prepend=1.0) <= 1e-10).all()


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(*[st.floats(-100, 100)] * 3), min_size=1, max_size=4))
def test_with_a_control_the_mean_over_all_orders_of_three_times_is_one(blocks):
    orders = itertools.product(itertools.permutations(range(3)), repeat=len(blocks))
    times = np.array(
        [[np.array(block)[list(order)] for block, order in zip(blocks, each, strict=True)] for each in orders]
    )
    arm, baseline, other = times.transpose(2, 1, 0)  # each (blocks, orders)
    found = e_values(arm - baseline, arm - other)
    assert found.mean(axis=1) == pytest.approx(1.0, rel=1e-10)


def test_a_block_without_its_control_is_bet_on_as_if_there_were_none():
    draws = np.random.default_rng(6).normal(0.1, 1, 50)
    assert np.array_equal(e_values(draws, np.full(50, np.nan)), e_values(draws))


def test_a_control_makes_a_shift_seen_sooner():
    draws = np.random.default_rng(7)
    arm, baseline, other = draws.normal(0, 1, (3, 400, 300))
    alone, both = (
        found.argmax(axis=0)
        for found in (e_values(arm + 0.5 - baseline) >= 20, e_values(arm + 0.5 - baseline, arm + 0.5 - other) >= 20)
    )
    assert both.mean() < 0.8 * alone.mean()


@settings(deadline=None, max_examples=40)
@given(DIFFERENCES, st.integers(-8, 8))
def test_another_unit_changes_nothing(differences, power):
    found = e_values(np.array(differences))
    assert e_values(np.array(differences) * 2.0**power) == pytest.approx(found, rel=1e-12)


@settings(deadline=None, max_examples=40)
@given(DIFFERENCES)
def test_swapping_the_arms_changes_nothing(differences):
    assert e_values(-np.array(differences)) == pytest.approx(e_values(np.array(differences)), rel=1e-12)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(*[st.floats(-100, 100)] * 3), min_size=1, max_size=40), st.floats(1e-3, 1e3))
def test_with_a_control_neither_another_unit_nor_the_mirror_image_changes_anything(blocks, unit):
    """The two arms cannot change places there: one of them has a control. But what is slower may as well be faster."""
    arm, baseline, other = np.round(np.array(blocks), 3).T  # what is 0 in one unit is so in each
    found = e_values(arm - baseline, arm - other)
    assert e_values(baseline - arm, other - arm) == pytest.approx(found, rel=1e-12)
    assert e_values((arm - baseline) * unit, (arm - other) * unit) == pytest.approx(found, rel=1e-9)


@settings(deadline=None, max_examples=40)
@given(DIFFERENCES, st.integers(1, 40))
def test_what_comes_later_does_not_change_what_was_said(differences, length):
    whole = e_values(np.array(differences))[:length]
    assert np.array_equal(e_values(np.array(differences[:length])), whole)


def test_many_paths_are_many_single_ones():
    draws = np.random.default_rng(1).normal(size=(300, 5))
    together = e_values(draws)
    for path in range(5):
        assert together[:, path] == pytest.approx(e_values(draws[:, path]), rel=1e-12)


def bets(differences: list[float], width: float) -> list[float]:
    given = np.array(differences)
    return scores(given, usual(given), width).tolist()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_size_of_a_bet_is_known_before_its_difference(width):
    """The score of the last one is its own multiple of a size that only earlier ones set, up to 1."""
    before = np.random.default_rng(2).normal(size=300).tolist()
    whole = width * np.median(np.abs(before[-WINDOW:]))
    for last in (-1e9, -0.5, -0.1, 0.0, 0.1, 0.5, 1e9):
        share = last / whole if width else np.sign(last)
        assert bets([*before, last], width)[-1] == pytest.approx(np.clip(share, -1, 1), rel=1e-12)


def test_the_first_few_bet_half_on_the_sign_and_one_player_all_of_it():
    for width in WIDTHS:
        whole = 0.5 if width else 1.0
        assert bets([5.0, -1e-9, 0.0, 7.0, 0.5], width)[:4] == [whole, -whole, 0.0, whole]
        assert bets([0.0] * 9, width) == [0.0] * 9


def test_e_values_by_hand():
    both = np.concatenate([STAKES, -STAKES])
    by_size, by_sign = np.mean((1 + both / 2) * (1 - both / 2)), np.mean((1 + both) * (1 - both))
    assert e_values(np.array([0.3, -0.2])) == pytest.approx([1.0, (2 * by_size + by_sign) / 3])
    assert e_values(np.array([1.0]), upwards_only=True) == pytest.approx([1 + (0.5 + 0.5 + 1) / 3 * STAKES.mean()])
    assert evidence.NUM_PLAYERS == 30


def test_what_bets_make_of_normal_differences_is_what_is_said_without_them():
    draws = np.random.default_rng(8).normal(size=(2000, 40))
    for shift in (0.3, 1.0, 3.0):
        slower = np.log(e_values(draws[:1000] + shift, upwards_only=True)[[199, 399]]).mean(axis=1)
        assert np.diff(slower)[0] / 200 == pytest.approx(evidence.growth(shift), rel=0.1)
        assert evidence.shift_for(evidence.growth(shift)) == pytest.approx(shift, rel=1e-2)
    assert evidence.growth(0.0) == 0.0


@pytest.mark.parametrize("number", [0, 3, 4, 5, 10, 40])
@pytest.mark.parametrize("size", [-2e-3, 0.5])
def test_differences_that_are_all_alike_are_worth_what_is_said_without_them(number, size):
    assert evidence.last(e_values(np.full(number, size))) == pytest.approx(evidence.when_alike(number))


def test_an_empty_path_says_nothing_and_a_long_one_stays_finite():
    assert evidence.last(e_values(np.array([]))) == 1.0
    assert evidence.against_beyond(np.array([]), 0.02) == 1.0
    assert np.isfinite(e_values(np.ones(5000))).all()


def test_a_shift_is_found_and_its_absence_is_not():
    draws = np.random.default_rng(3)
    found = [(e_values(draws.normal(shift, 1, (150, 300))) >= 20).any(axis=0).mean() for shift in (0.0, 0.5)]
    assert found[0] <= 0.06
    assert found[1] >= 0.95


def test_few_differences_that_scatter_about_as_much_as_they_differ_are_enough():
    """As two sides in processes of their own give: of sets of 20, 88 % are found, and 78 % by signs alone."""
    draws = np.random.default_rng(9).normal(1.3, 1, (20, 2000))
    found = (e_values(draws) >= 40).any(axis=0).mean()
    stakes = np.concatenate([STAKES, -STAKES])
    players = [np.exp(np.cumsum(np.log1p(stake * np.sign(draws)), axis=0)) for stake in stakes]
    by_signs = (np.mean(players, axis=0) >= 40).any(axis=0).mean()
    assert found >= 0.88
    assert found - by_signs >= 0.08


def test_outliers_do_not_hide_a_shift():
    draws = np.random.default_rng(4)
    noise = draws.normal(0.02, 0.01, (120, 200)) + (draws.random((120, 200)) < 0.1) * draws.normal(0, 2, (120, 200))
    assert (e_values(noise)[-1] >= 20).mean() >= 0.98


def test_apart_is_refuted_inside_the_margin_and_not_at_its_edge():
    draws = np.random.default_rng(5).normal(0, 0.01, 60)
    assert evidence.against_beyond(draws, 0.03) > 1000
    assert evidence.against_beyond(draws + 0.03, 0.03) < 20
    assert evidence.against_beyond(draws - 0.03, 0.03) < 20


def by_definition(values: list[float], share: float) -> set[int]:
    """The largest set of k hypotheses that all have n / (k * share) or more."""
    number = len(values)
    for size in range(number, 0, -1):
        reached = {place for place, value in enumerate(values) if value * size * share >= number}
        if len(reached) >= size:
            return set(sorted(reached, key=lambda place: -values[place])[:size])
    return set()


E_VALUES = st.lists(st.floats(0, 1e4), min_size=1, max_size=8, unique=True)


@settings(deadline=None)
@given(E_VALUES, st.sampled_from([0.05, 0.1, 0.5]))
def test_discoveries_are_those_of_the_definition(values, share):
    assert set(np.flatnonzero(discoveries(np.array(values), share)).tolist()) == by_definition(values, share)


@settings(deadline=None)
@given(E_VALUES, st.integers(0, 7), st.floats(1.0, 1e4))
def test_more_evidence_for_one_takes_no_discovery_from_another(values, place, factor):
    more = np.array(values)
    before = discoveries(more, 0.05)
    more[place % len(values)] *= factor
    assert (discoveries(more, 0.05) >= before).all()


def test_what_the_next_needs_is_what_it_is_given_for():
    values = np.array([1e6, 1e6, 0.0, 0.0])
    threshold = evidence.needed(4, 2, 0.05)
    values[2] = threshold * (1 + 1e-9)
    assert discoveries(values, 0.05).tolist() == [True, True, True, False]
    values[2] = threshold * (1 - 1e-9)
    assert discoveries(values, 0.05).tolist() == [True, True, False, False]
    assert discoveries(np.array([]), 0.05).tolist() == []


@pytest.mark.parametrize("upwards_only", [False, True])
def test_where_spreads_are_known_nothing_is_won_on_average_whatever_their_sizes(upwards_only):
    rng = np.random.default_rng(5)
    spreads = np.array([0.02, 0.03, 0.05, 0.025])
    found = [evidence.e_normal(rng.normal(0.0, spreads), spreads, upwards_only=upwards_only) for _ in range(20_000)]
    assert np.mean(found) < 1.03  # clipping takes a little of it
    assert np.mean(np.array(found) >= 20) <= 0.05


def test_where_spreads_are_known_few_differences_decide_and_one_alone_never_does():
    assert evidence.e_normal(np.full(4, 0.055), np.full(4, 0.025)) > 100
    assert evidence.e_values(np.full(4, 0.055))[-1] < 10  # where they are not known
    assert evidence.e_normal(np.array([10.0]), np.array([0.025])) < 20
    assert evidence.normal_against_beyond(np.zeros(8), np.full(8, 0.025), np.log1p(0.05)) > 100
    assert evidence.normal_against_beyond(np.full(8, 0.05), np.full(8, 0.025), np.log1p(0.05)) < 2
    assert evidence.normal_against_beyond(np.full(8, -0.05), np.full(8, 0.025), np.log1p(0.05)) < 2


@pytest.mark.parametrize("number", [0, 3, 4, 5, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_the_usual_size_of_one_path_is_that_of_many(number):
    one = np.random.default_rng(number).normal(size=number).round(1)  # some are equal
    assert usual(one).tolist() == usual(np.stack([one, one], axis=1))[:, 1].tolist()
    one[::5] = np.nan
    assert usual(one).tolist() == usual(one[:, None])[:, 0].tolist()


def test_the_place_among_three_shows_what_is_plain_after_seven_blocks():
    plain = np.full(7, 0.3)
    assert e_values(plain, plain)[-1] > 30
    assert e_values(plain)[-1] < 10
    between = e_values(plain, -plain)  # slower than the one and faster than the other, as one of three may be
    assert between[-1] < 1.1


def test_close_differences_that_scatter_normally_are_seen_after_a_few():
    draws = np.random.default_rng(8)
    close = np.median([evidence.e_student(draws.normal(3.0, 1.0, 6)) for _ in range(200)])
    assert close > 100 > evidence.last(e_values(np.full(6, 3.0), upwards_only=True))
    assert evidence.e_student(np.full(6, -1.0) + draws.normal(0.0, 0.1, 6)) < 0.1
    assert evidence.e_student(np.zeros(5)) == evidence.e_student(np.array([])) == 1.0


@pytest.mark.parametrize("number", [1, 2, 5, 9])
def test_of_normal_differences_about_zero_few_ever_seem_above_it_in_any_unit(number):
    draws = np.random.default_rng(9)
    samples = draws.normal(0.0, 1.0, (4000, number))
    values = np.array([evidence.e_student(each) for each in samples])
    assert values.mean() < 1.1
    assert (values >= 20).mean() <= 0.02
    assert [evidence.e_student(1e-3 * each) for each in samples[:20]] == pytest.approx(values[:20])
