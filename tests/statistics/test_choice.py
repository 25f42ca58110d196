"""The fastest: chosen by some processes, and compared by the others."""

import math

import numpy as np

from attnbench.statistics import choice
from attnbench.statistics.choice import Standing
from attnbench.storage.records import Arm, Sample, Verdict
from studies.simulated.virtual import plan
from tests.statistics.test_stats import samples as one_visit_each

NUM_BLOCKS = 6


def samples(seconds: float, *, num_processes: int = 16, noise: float = 0.01, seed: int = 0) -> list[Sample]:
    """Build one visit of each process; the drift of a block is common to all drawn with the same seed."""
    drift = np.random.default_rng(99).normal(0.0, 0.1, (num_processes, NUM_BLOCKS))
    own = np.random.default_rng(seed).normal(0.0, noise, (num_processes, NUM_BLOCKS))
    own += np.random.default_rng(seed + 1).normal(0.0, noise / 2, (num_processes, 1))
    return one_visit_each((seconds * np.exp(drift + own)).tolist())


def standing(taken: dict[str, list[Sample]], baseline: str = "sdpa", candidates: set[str] | None = None) -> Standing:
    arms = {Arm(implementation=name): own for name, own in taken.items()}
    asked = plan(1, [baseline, *(name for name in taken if name != baseline)], budget_s=1.0)
    found = choice.standing(asked, arms, arms, candidates=candidates)
    assert found is not None
    return found


def test_the_fastest_leads_and_the_others_are_slower() -> None:
    times = {"sdpa": 1.0, "quick": 0.8, "slow": 1.5}
    found = standing({name: samples(each, seed=number) for number, (name, each) in enumerate(times.items())})
    assert found.leader == "quick"
    assert list(found.others) == ["sdpa", "slow"]
    assert {each.verdict for each in found.others.values()} == {Verdict.slower}
    assert {each.effect.num_measured for each in found.others.values()} == {8}
    assert abs(math.log(found.others["slow"].ratio / (1.5 / 0.8))) < 0.03
    assert found.open == []


def test_the_first_is_the_reference_without_a_baseline_which_wins_ties() -> None:
    only = standing({"quick": samples(1.0)})
    assert (only.leader, only.reference, only.others) == ("quick", "quick", {})
    same = samples(1.0)
    assert standing({"a": same, "sdpa": same}).leader == "sdpa"


def test_only_candidates_lead() -> None:
    taken = {"sdpa": samples(1.0), "quick": samples(0.5, seed=1), "fair": samples(0.9, seed=2)}
    for candidates, leader, others in (({"sdpa", "fair"}, "fair", ["sdpa"]), ({"quick"}, "quick", [])):
        found = standing(taken, candidates=candidates)
        assert (found.leader, list(found.others)) == (leader, others)
    assert choice.standing(plan(1, ["sdpa"], budget_s=1.0), {}, [], candidates=set()) is None


def test_the_winner_of_many_equals_owes_nothing_to_luck() -> None:
    """The apparent winner among twelve equal arms is lucky; in other processes it is equal."""
    leads, naive = [], []
    for seed in range(30):
        taken = {f"i{number}": samples(1.0, noise=0.05, seed=100 * seed + number) for number in range(12)}
        found = standing(taken, "i0")
        leads += [math.log(each.ratio) for each in found.others.values()]
        medians = {name: np.mean(np.log([each.value for each in own])) for name, own in taken.items()}
        naive += [medians[name] - min(medians.values()) for name in found.others]
    assert abs(np.mean(leads)) < 0.005
    assert np.mean(leads) < np.mean(naive) / 2


def test_a_well_known_difference_is_equal_only_within_the_margin() -> None:
    taken = {"sdpa": samples(1.0, noise=0.002), "near": samples(1.01, noise=0.002, seed=1)}
    found = standing(taken)
    assert found.others["near"].verdict is Verdict.equivalent
    assert found.open == []
    assert standing(taken | {"near": samples(1.05, noise=0.002, seed=1)}).others["near"].verdict is Verdict.slower


def test_seven_processes_decide_nothing() -> None:
    assert standing({name: samples(call_s, num_processes=7) for name, call_s in (("sdpa", 1.0), ("slow", 9.0))}).open
