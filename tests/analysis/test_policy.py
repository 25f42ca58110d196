"""Learning a policy: it records clear winners only, and its regret is that of the nearest other shape's choice."""

import math
from dataclasses import replace

import msgspec
import pytest

from attnbench.analysis.policy import Measured, learn, measure, regret
from attnbench.workloads.policy import Policy
from attnbench.workloads.workload import Workload
from tests import journals

LENGTHS = (64, 96, 128, 192)


def measured(length=128, winner="sdpa", **logs):
    workload = Workload(seq_len=length, direction="inference", num_threads=1)
    return Measured(workload=workload, logs=logs, winner=winner)


def test_the_regret_is_that_of_the_nearest_other_shape():
    same = regret([measured(length, "bmm", bmm=-0.3) for length in LENGTHS])
    assert (same.mean, same.worst) == pytest.approx((0, 0))
    assert (same.sdpa_mean, same.sdpa_worst) == pytest.approx((math.expm1(0.3),) * 2)
    others = [measured(length, "bmm", bmm=-0.3) for length in LENGTHS if length != 128]
    odd = regret([*others, measured(128, bmm=0.5)])
    assert odd.worst == pytest.approx(math.expm1(0.5))


@pytest.mark.parametrize(("logs", "cost"), [({"bmm": 0.0}, 0.0), ({}, 1.5)])
def test_an_unsupported_choice_costs_as_much_as_sdpa_and_a_failed_one_more(logs, cost):
    found = regret([measured(64, "bmm", bmm=-0.3), measured(96, **logs)])
    assert found.worst == pytest.approx(max(cost, math.expm1(0.3)))


def test_a_policy_is_learned_from_a_run_and_survives_its_file(tmp_path):
    points = journals.workloads(mask=("none", "causal"), seq_len=(64, 128, 256, 512, 1024))
    results = journals.write(tmp_path, points)
    policy = learn(results)
    assert policy.machine == journals.ENVIRONMENT.machine_fingerprint
    assert len(policy.rows) == len(measure(results)) == 10
    assert set(policy.evidence.candidates) <= set(journals.SPEEDS) - {journals.EVIL, "sdpa"}
    policy.save(tmp_path / "policy.json")
    again = Policy.load(tmp_path / "policy.json")
    assert msgspec.to_builtins(again) == msgspec.to_builtins(policy)
    assert [again.choose(point) for point in points] == [row.winner for row in policy.rows]


def test_the_winners_of_a_run_are_those_that_its_times_show(tmp_path):
    short, long = learn(journals.write(tmp_path, journals.workloads(seq_len=(2, 2048)))).rows
    assert short.winner in {"bmm", "fused", "einsum"}
    assert short.ratio < 0.8
    assert (long.winner, long.ratio) == ("sdpa", 1.0)


def test_runs_of_no_use_for_calls_are_refused(tmp_path):
    results = journals.write(tmp_path, journals.workloads(seq_len=(64, 128)))
    for changes, reason in (
        ({"launch": "graph"}, "--conditions graph"),
        ({"baseline": "fused"}, "no workload that a pol"),
    ):
        plan = msgspec.structs.replace(results.plan, **changes)
        other = replace(results, started=msgspec.structs.replace(results.started, plan=plan))
        with pytest.raises(ValueError, match=reason):
            learn(other)
    with pytest.raises(ValueError, match="a policy holds for one machine"):
        learn(replace(results, records=()))
