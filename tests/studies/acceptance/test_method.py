"""The simulation of verdicts, small: it agrees with the package, and a planted fault shows."""

import numpy as np
import pytest

from attnbench.statistics.verdict import LOOKS, effect, judge
from attnbench.storage.records import Verdict
from studies.acceptance import method
from studies.acceptance.method import Tally, World, numbers, watch
from studies.acceptance.outcome import upper_limit


def test_the_upper_limit_of_a_share_by_value() -> None:
    assert upper_limit(0, 60, 0.95) == pytest.approx(1 - 0.05 ** (1 / 60))
    assert upper_limit(5, 5) == 1.0
    assert upper_limit(40, 1000) == pytest.approx(0.0566, abs=0.001)


def test_many_sessions_at_once_are_judged_as_one_is() -> None:
    """Each comparison stops at the look that decides it, within its whole session."""
    world = World(bias=0.01, num_cells=3, log_ratio=0.03)
    draws = np.random.default_rng(1)
    made = numbers(world, 20, method.noise_pool(world, draws), draws)
    counted = dict.fromkeys(Verdict, 0)
    for session in made.astype(np.float64):
        taken = dict.fromkeys(range(3), LOOKS[0])
        for look in LOOKS:
            judged = judge({cell: effect(session[: taken[cell], cell]) for cell in taken})
            if look < LOOKS[-1]:
                following = LOOKS[LOOKS.index(look) + 1]
                taken = {
                    cell: following if judged[cell].verdict is Verdict.undecided else number
                    for cell, number in taken.items()
                }
        for each in judged.values():
            counted[each.verdict] += 1
    tally = Tally()
    watch(world, made, tally)
    assert (tally.slower, tally.equal) == (counted[Verdict.slower], counted[Verdict.equivalent])
    assert tally.num_cells == 60


def test_a_test_without_any_correction_misses_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = {"a world": World(bias=0.01, num_cells=8)}
    fine = method.rows(worlds, 0, 1000)
    assert method.judge_alarms(fine)[1]
    monkeypatch.setattr(method, "FALSE_SHARE", 5.0)
    monkeypatch.setattr(method, "SMALLEST_EFFECT", 1e-6)
    broken = method.rows(worlds, 0, 1000)
    assert not method.judge_alarms(broken)[1]
    assert not method.judge_coverage(broken)[1]


def test_slowdowns_that_are_missed_or_called_equal_miss_the_limit() -> None:
    row = {"world": "a world", **vars(Tally(num_runs=1000, num_cells=1000, slower=950, processes=8000))}
    assert method.judge_power([row])[1]
    assert not method.judge_power([row | {"slower": 800}])[1]
    assert not method.judge_power([row | {"equal": 40}])[1]
