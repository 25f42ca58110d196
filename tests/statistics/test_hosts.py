"""One comparison on several hosts: what is put together, what is left out, and intervals that hold for other hosts."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from attnbench.statistics import hosts
from attnbench.statistics.hosts import OfKind, Seen, by_kind, failing, pooled, untested
from attnbench.statistics.intervals import Estimate, Pairs, paired_ratio
from attnbench.statistics.verdicts import judge, paired_effect
from attnbench.storage.records import Verdict

NUM_BLOCKS = 4


def pairs(log: float, draws: np.random.Generator, num_visits: int = 8, noise: float = 0.01) -> Pairs:
    """The blocks of one host on which the log ratio is `log`."""
    logs = draws.normal(log, noise, num_visits * NUM_BLOCKS)
    return Pairs(logs=logs, visits=tuple((0, place // NUM_BLOCKS) for place in range(len(logs))))


def seen(host: str, log: float, draws: np.random.Generator, kind: str = "one", num_visits: int = 8) -> Seen:
    """What a host sees that measures `log`, and whose A/A control is as it should be."""
    effect = paired_effect(pairs(log, draws, num_visits), None)
    assert effect is not None
    return Seen(host=host, kind=kind, effect=effect, control=paired_ratio(pairs(0.0, draws, num_visits)))


def several(logs: Sequence[float], seed: int = 0, kind: str = "one") -> list[Seen]:
    """Hosts of one kind, one for each log ratio."""
    draws = np.random.default_rng(seed)
    return [seen(f"{kind}{number}", log, draws, kind) for number, log in enumerate(logs)]


def verdict(of_kind: OfKind) -> Verdict:
    """Judged alone."""
    return judge([of_kind.effect])[0].verdict


@pytest.mark.parametrize("num_hosts", [3, 5, 12])
@pytest.mark.parametrize("between", [0.0, 0.003, 0.02])
def test_intervals_hold_for_hosts_that_were_not_measured(num_hosts: int, between: float) -> None:
    """The truth is the mean of all hosts of the kind, of which a few are measured, with visits as noisy as they are."""
    draws, covered, num_tries = np.random.default_rng(1), 0, 2000
    for _ in range(num_tries):
        sizes = draws.integers(3, 13, num_hosts)
        noises = 0.01 * np.exp(draws.normal(0.0, 0.5, num_hosts))
        logs = draws.normal(0.0, between, num_hosts) + draws.normal(0.0, 1.0, num_hosts) * noises / np.sqrt(sizes)
        errors = noises * np.sqrt(draws.chisquare(sizes - 1) / (sizes - 1) / sizes)
        ratio, _ = pooled(
            [
                Estimate(point=math.exp(log), standard_error=error, num_clusters=int(size), num_samples=int(4 * size))
                for log, error, size in zip(logs.tolist(), errors.tolist(), sizes, strict=True)
            ]
        )
        assert ratio.low is not None
        assert ratio.high is not None
        covered += ratio.low <= 1.0 <= ratio.high
    assert 0.93 <= covered / num_tries <= 0.985  # noisy hosts among calm ones make it a little wide


@pytest.mark.parametrize("num_hosts", [6, 10])
def test_intervals_hold_where_each_host_has_a_noise_of_its_own(num_hosts: int) -> None:
    """Half of the hosts are calm, others are up to thirteen times as noisy, as hosts are that throttle or are shared.

    A noisy host that seems calm by chance must not decide. The mean in which each host counts the same has none of
    that, and shows what such hosts allow: intervals have to be as true as its own, and narrower.
    """
    draws, num_tries = np.random.default_rng(9), 2000
    noises = draws.choice([0.006, 0.006, 0.006, 0.015, 0.03, 0.08], (num_tries, num_hosts, 1))
    layouts = draws.normal(0.0, 0.0024, (num_tries, num_hosts, 1))  # of its process: its visits do not show them
    logs = draws.normal(0.0, 0.005, layouts.shape) + layouts + noises * draws.normal(0.0, 1.0, (*layouts.shape[:2], 12))
    means, errors = logs.mean(axis=2), logs.std(axis=2, ddof=1) / math.sqrt(logs.shape[2])
    found = [
        pooled(
            [
                Estimate(point=math.exp(log), standard_error=error, num_clusters=12, num_samples=48)
                for log, error in zip(*own, strict=True)
            ]
        )[0]
        for own in zip(means.tolist(), errors.tolist(), strict=True)
    ]
    halves = np.array([each.half_width for each in found])
    covered = np.mean(np.abs(np.log([each.point for each in found])) <= halves)
    equal = found[0].quantile(0.975) * means.std(axis=1, ddof=1) / math.sqrt(num_hosts)
    assert 0.94 <= covered <= 0.975
    assert np.median(halves) < 0.9 * np.median(equal)


def test_the_spread_between_hosts_is_what_was_planted_beyond_the_noise_of_visits() -> None:
    draws = np.random.default_rng(2)
    found = [pooled([each.effect.ratio for each in several(draws.normal(0.0, 0.02, 12), seed)])[1] for seed in range(9)]
    assert np.median(np.array(found, dtype=float)) == pytest.approx(0.02, rel=0.2)
    alike = [pooled([each.effect.ratio for each in several([0.1] * 12, seed)])[1] for seed in range(9)]
    assert np.median(np.array(alike, dtype=float)) < 0.002


def test_an_interval_widens_with_the_hosts_not_with_the_visits() -> None:
    """Five hosts that lie apart: more visits on each say no more of the sixth."""
    logs, widths = [0.06, 0.1, 0.12, 0.08, 0.14], []
    for num_visits in (8, 80):
        draws = np.random.default_rng(0)
        ratio, _ = pooled([seen(str(log), log, draws, num_visits=num_visits).effect.ratio for log in logs])
        assert ratio.half_width is not None
        widths.append(ratio.half_width)
    assert widths[1] == pytest.approx(widths[0], rel=0.3)
    assert widths[1] > 0.02


def test_kinds_are_never_put_together_though_their_winners_are_opposed() -> None:
    """On one kind the candidate takes 20 % less, on the other 20 % more: a mean of both would call them equal."""
    both = [*several([-0.2, -0.21, -0.19], kind="one"), *several([0.2, 0.21, 0.19], kind="two")]
    found = by_kind(both, {})
    assert {kind: verdict(each) for kind, each in found.items()} == {"one": Verdict.faster, "two": Verdict.slower}
    assert all(set(each.ratios) == {f"{kind}{number}" for number in range(3)} for kind, each in found.items())
    assert found["one"].effect.ratio.point == pytest.approx(math.exp(-0.2), rel=0.02)


def test_the_evidence_is_the_mean_of_all_hosts_and_what_is_left_out_makes_none() -> None:
    given = zip(several([0.1] * 4), (1, 2, 4, 500), strict=True)
    four = [replace(each, effect=replace(each.effect, e_same=e_same)) for each, e_same in given]
    assert by_kind(four, {})["one"].effect.e_same == pytest.approx(507 / 4)
    without = by_kind(four, {"one3": "failed"})["one"]
    assert without.effect.e_same == pytest.approx(7 / 4)  # and not 7 / 3
    assert without.left_out == {"one3": "failed"}
    assert set(without.ratios) == {"one0", "one1", "one2"}


def test_the_mean_over_hosts_is_an_e_value() -> None:
    """Over all signs of the same differences on three hosts that share all of their noise, its mean is 1."""
    sizes, total = np.array([0.02, 0.01, 0.03, 0.015]), 0.0
    for signs in range(2**4):
        logs = sizes * [1 if signs >> place & 1 else -1 for place in range(4)]
        effect = paired_effect(Pairs(logs=logs, visits=tuple((0, place) for place in range(4))), None)
        assert effect is not None
        hosts_seen = [Seen(host=str(number), kind="one", effect=effect) for number in range(3)]
        total += by_kind(hosts_seen, {})["one"].effect.e_same
    assert total / 2**4 == pytest.approx(1.0)


def test_fewer_than_three_hosts_speak_for_themselves_alone() -> None:
    lone, two, three = (by_kind(several([0.2, 0.21, 0.19][:number]), {})["one"] for number in (1, 2, 3))
    assert [each.is_general for each in (lone, two, three)] == [False, False, True]
    assert lone.effect.ratio.half_width == pytest.approx(several([0.2])[0].effect.ratio.half_width)
    assert {verdict(each) for each in (lone, two, three)} == {Verdict.slower}


def test_a_host_with_few_visits_does_not_count_unless_all_have_few() -> None:
    draws = np.random.default_rng(0)
    short = seen("short", 0.5, draws, num_visits=2)
    found = by_kind([*several([0.1, 0.1, 0.1]), short], {})["one"]
    assert found.left_out == {"short": "fewer than 3 visits"}
    assert found.effect.ratio.point == pytest.approx(math.exp(0.1), rel=0.01)
    alone = by_kind([short], {})["one"]
    assert (alone.effect.ratio.low, verdict(alone), alone.spread) == (None, Verdict.undecided, None)


def test_a_host_whose_identical_code_differs_is_left_out_and_says_why() -> None:
    draws = np.random.default_rng(3)
    controls = {f"good{number}": [pairs(0.0, draws) for _ in range(6)] for number in range(20)}
    controls["bad"] = [pairs(0.0, draws), pairs(0.08, draws), pairs(-0.15, draws)]
    found = failing(controls)
    assert list(found) == ["bad"]
    assert found["bad"].startswith("its A/A test fails: identical code differs by 8.")
    assert by_kind([seen("bad", 0.3, draws)], found) == {}


def test_a_host_too_short_for_an_a_a_test_does_not_count_where_enough_others_do() -> None:
    """It was lost in its first process, on which an unlucky layout of memory shows as little as noise."""
    controls = {f"one{number}": [pairs(0.0, np.random.default_rng(number)) for _ in range(6)] for number in range(4)}
    controls["bad"] = [pairs(bias, np.random.default_rng(9)) for bias in (0.09, 0.014, -0.013)]
    short = untested(controls)
    assert (failing(controls), short) == ({}, {"bad"})
    bad = seen("bad", 0.3, np.random.default_rng(9))
    three = [*several([0.0, 0.001, -0.001]), bad]
    without = by_kind(three, {}, short=short)["one"]
    assert without.left_out == {"bad": hosts.UNTESTED}
    assert verdict(without) is Verdict.equivalent
    assert verdict(by_kind(three, {})["one"]) is not Verdict.equivalent
    assert without.effect.e_same == pytest.approx(sum(each.effect.e_same for each in three[:3]) / 4)
    two = by_kind([*several([0.0, 0.001]), bad], {}, short=short)["one"]
    assert set(two.ratios) == {"one0", "one1", "bad"}  # with fewer than three others it counts


def test_most_of_the_hosts_are_never_left_out_for_being_too_short() -> None:
    """Of seven, three have an A/A test of their own."""
    seven = several([0.1] * 7)
    short = {f"one{number}" for number in range(3, 7)}
    assert len(by_kind(seven, {}, short=short)["one"].ratios) == 7
    assert len(by_kind(seven[:6], {}, short=short)["one"].ratios) == 3


def test_the_fewest_differences_find_95_of_100_unlucky_hosts() -> None:
    """Where two arms each shift by 5 %, a standard deviation, as in the study of a hundred hosts."""
    shifts = np.random.default_rng(0).normal(0.0, 0.05 * math.sqrt(2), (20000, hosts.FEWEST_TESTS))
    sizes = np.abs(shifts)
    found, fewer = (np.mean(np.median(each, axis=1) > math.log1p(0.02)) for each in (sizes, sizes[:, 1:]))
    assert fewer < 0.95 <= found


def test_biases_of_processes_that_cancel_fail_a_host() -> None:
    """Each process has another bias: their mean is none, and an interval that counts processes would hide it."""
    draws = np.random.default_rng(7)
    logs = np.concatenate([draws.normal(bias, 0.01, 32) for bias in (0.06, -0.07, 0.05, -0.04)])
    visits = tuple((place // 32, place // NUM_BLOCKS) for place in range(len(logs)))
    assert list(failing({"bad": [Pairs(logs=logs, visits=visits)], "good": [pairs(0.0, draws)]})) == ["bad"]


def test_one_unlucky_process_of_many_fails_no_host() -> None:
    draws = np.random.default_rng(8)
    assert failing({"good": [pairs(0.05 if number == 3 else 0.0, draws) for number in range(10)]}) == {}


def test_noise_fails_no_host() -> None:
    """Of 200 hosts, some of them ten times as noisy as others, none fails by chance."""
    draws = np.random.default_rng(4)
    noises = np.where(np.arange(200) % 4, 0.01, 0.1)
    assert failing({str(n): [pairs(0.0, draws, noise=noise)] for n, noise in enumerate(noises)}) == {}


def test_a_small_bias_of_a_process_fails_no_host_either() -> None:
    """Where memory lies makes 0.5 %, which is below the smallest effect that matters."""
    draws = np.random.default_rng(5)
    assert failing({str(n): [pairs(0.005, draws, num_visits=50)] for n in range(10)}) == {}
    assert len(failing({str(n): [pairs(0.005, draws, num_visits=50)] for n in range(10)}, smallest=0.001)) == 10


def test_a_host_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="one0 has seen one comparison twice"):
        by_kind([*several([0.1]), *several([0.2])], {})


def test_hosts_that_agree_exactly_have_no_spread() -> None:
    exact = Estimate(point=2.0, standard_error=0.0, num_clusters=4, num_samples=16)
    ratio, spread = pooled([exact] * hosts.FEWEST_HOSTS)
    assert (ratio.point, ratio.half_width, spread) == (pytest.approx(2.0), 0.0, 0.0)


def test_one_noisy_host_of_many_widens_the_interval_little() -> None:
    factors = []
    for seed in range(15):
        draws = np.random.default_rng(seed)
        calm = [paired_ratio(pairs(0.0, draws)) for _ in range(9)]
        noisy = paired_ratio(pairs(0.0, draws, noise=0.1))
        widths = [pooled([each for each in own if each is not None])[0].half_width for own in (calm, [*calm, noisy])]
        assert widths[0] is not None
        assert widths[1] is not None
        factors.append(widths[1] / widths[0])
    assert np.median(factors) < 1.6
