"""Learning a policy: a planted crossover is found, noise makes no rule, and nothing slower than sdpa is chosen."""

import itertools

import msgspec
import numpy as np
import pytest

from attnbench.analysis.policy import Limits, Measured, learn, learn_rules, simplified, table, threshold
from attnbench.workloads.policy import Condition, Policy, values_of
from attnbench.workloads.workload import Workload
from tests import journals

LENGTHS = (16, 64, 128, 256, 512, 1024, 2048)
POINTS = tuple(
    Workload(seq_len=length, mask=mask, num_heads=heads)
    for length, mask, heads in itertools.product(LENGTHS, ("none", "causal"), (4, 16))
)


def measured(*, noise=0.01, seed=0, points=POINTS, **planted):
    """A table of log ratios to sdpa as planted, by candidate, with noise; None: unsupported, NaN: lost."""
    draws = np.random.default_rng(seed)
    given = [[log(point) for log in planted.values()] for point in points]
    is_refused = np.array([[log is None for log in row] for row in given])
    logs = np.array([[np.nan if log is None else log for log in row] for row in given], dtype=float)
    return Measured(
        values=tuple(values_of(point, 2) for point in points),
        names=tuple(planted),
        logs=logs + draws.normal(0, noise, logs.shape),
        errors=np.full(logs.shape, noise),
        is_refused=is_refused,
    )


def choices(rules, points=POINTS):
    found = []
    for point in points:
        values = values_of(point, 2)
        holding = [rule.use for rule in rules if all(Condition.parse(text).holds(values) for text in rule.when)]
        found.append(holding[0] if holding else "sdpa")
    return found


def test_a_crossover_in_length_becomes_one_rule_between_the_lengths():
    found = learn_rules(measured(bmm=lambda point: -0.4 if point.seq_len <= 256 else 0.5, fused=lambda _: 0.2))
    (rule,) = found.rules
    axis, sign, value = rule.when[0].split()
    assert (len(rule.when), axis, sign, rule.use) == (1, "seq_len", "<=", "bmm")
    assert 256 <= int(value) < 512
    assert rule.ratio == pytest.approx(np.exp(-0.4), rel=0.02)
    assert found.regrets.max() < 0.01
    assert found.sdpa_regrets.max() > 0.35


def test_conditions_that_only_matter_together_are_found():
    is_good = [(point.seq_len > 256) == (point.mask == "causal") for point in POINTS]
    by_point = dict(zip(POINTS, is_good, strict=True))
    found = learn_rules(measured(bmm=lambda point: -0.4 if by_point[point] else 0.3))
    assert choices(found.rules) == ["bmm" if good else "sdpa" for good in is_good]


def test_noise_makes_no_rule():
    for seed in range(8):
        same = {name: lambda _: 0.0 for name in ("bmm", "fused", "einsum", "chunked", "module_list")}
        assert learn_rules(measured(noise=0.05, seed=seed, **same)).rules == ()


def test_what_is_faster_by_less_than_the_smallest_effect_stays_with_sdpa():
    table = measured(noise=0.0005, bmm=lambda _: -0.01)
    assert learn_rules(table).rules == ()
    assert learn_rules(table, Limits(smallest_effect=0.005)).rules


def test_a_candidate_that_is_slower_at_one_workload_is_not_chosen_there():
    slow = POINTS[5]
    found = learn_rules(measured(bmm=lambda point: 0.2 if point == slow else -0.3))
    chosen = dict(zip(POINTS, choices(found.rules), strict=True))
    assert chosen[slow] == "sdpa"
    assert "bmm" in chosen.values()


def test_a_candidate_that_is_slower_everywhere_is_never_chosen():
    assert learn_rules(measured(bmm=lambda _: 0.3, fused=lambda _: 0.1)).rules == ()


@pytest.mark.parametrize("missing", [None, np.nan])
def test_where_a_candidate_did_not_run_it_is_not_chosen(missing):
    found = learn_rules(measured(bmm=lambda point: missing if point.mask == "causal" else -0.3))
    assert choices(found.rules) == ["sdpa" if point.mask == "causal" else "bmm" for point in POINTS]


def test_what_is_small_stays_small():
    draws = np.random.default_rng(3)
    planted = {point: draws.choice([-0.5, 0.5]) for point in POINTS}
    found = learn_rules(measured(bmm=planted.get, fused=lambda point: -planted[point]), Limits(most_leaves=4))
    assert len(found.rules) <= 4
    assert all(rule.num_workloads >= Limits().fewest_workloads for rule in found.rules)


def test_a_threshold_is_between_and_has_two_digits_where_it_can():
    for low, high in itertools.combinations((1, 2, 3, 7, 8, 127, 128, 129, 1024, 10**9), 2):
        assert low <= threshold(low, high) < high
    assert threshold(256, 512) == 360


def test_conditions_that_follow_from_others_are_left_out():
    given = ["seq_len <= 512", "mask is not none", "seq_len <= 64", "seq_len > 4", "mask is causal"]
    kept = list(map(str, simplified([Condition.parse(text) for text in given])))
    assert kept == ["seq_len <= 64", "seq_len > 4", "mask is causal"]


def test_a_policy_is_learned_from_a_run_and_survives_its_file(tmp_path):
    points = journals.workloads(mask=("none", "causal"), seq_len=(64, 128, 256, 512, 1024))
    results = journals.write(tmp_path, points)
    policy = learn([results])
    assert policy.machine == journals.ENVIRONMENT.machine_fingerprint
    assert policy.evidence.num_workloads == len(table([results]).values) == 10
    assert set(policy.evidence.candidates) <= set(journals.SPEEDS) - {journals.EVIL, "sdpa"}
    policy.save(tmp_path / "policy.json")
    again = Policy.load(tmp_path / "policy.json")
    assert msgspec.to_builtins(again) == msgspec.to_builtins(policy)
    assert [again.choose(point) for point in points] == [policy.choose(point) for point in points]


def test_runs_of_two_machines_are_refused(tmp_path):
    other = msgspec.structs.replace(journals.ENVIRONMENT, cpu="Another CPU")
    points = journals.workloads(seq_len=(64, 128))
    one = journals.write(tmp_path / "one", points)
    two = journals.write(tmp_path / "two", points, environment=other)
    with pytest.raises(ValueError, match="a policy holds for one machine"):
        learn([one, two])
