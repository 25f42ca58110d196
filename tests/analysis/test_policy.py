"""Learning a policy: a planted crossover is found, noise chooses nothing, and nothing slower than sdpa is chosen."""

import itertools
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from attnbench.analysis.policy import Measured, held_out, kinds, learn, likeliest, table
from attnbench.workloads.policy import Policy, values_of
from attnbench.workloads.sweep import SMALLEST_EFFECT
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
        is_refused=is_refused,
    )


def choices(found, points=POINTS, smallest_effect=0.02):
    """Who is chosen at each point, by kinds; sdpa where a kind is not known."""
    by_key = {each.key: each for each in kinds(found, smallest_effect)}
    values = [values_of(point, 2) for point in points]
    known = [by_key.get(tuple(each[axis] for axis in ("device", "dtype", "direction", "queries"))) for each in values]
    return [
        "sdpa" if kind is None else kind.choose(each, smallest_effect) for kind, each in zip(known, values, strict=True)
    ]


def test_a_crossover_in_length_is_found_between_the_measured_lengths():
    table = measured(bmm=lambda point: 0.4 * math.log(point.seq_len / 360), fused=lambda _: 0.2)
    between = tuple(Workload(seq_len=length) for length in (20, 100, 200, 300, 400, 700, 1500))
    assert choices(table, between) == ["bmm"] * 4 + ["sdpa"] * 3
    assert held_out(table).mean() < 0.02
    assert -table.best.min() > 1


def test_a_step_that_depends_on_the_mask_is_found():
    is_good = [(point.seq_len > 256) == (point.mask == "causal") for point in POINTS]
    by_point = dict(zip(POINTS, is_good, strict=True))
    found = measured(bmm=lambda point: -0.4 if by_point[point] else 0.3)
    assert choices(found) == ["bmm" if good else "sdpa" for good in is_good]


def test_noise_chooses_hardly_anything_and_costs_nothing():
    for seed in range(4):
        same = {name: lambda _: 0.0 for name in ("bmm", "fused", "einsum", "chunked", "module_list")}
        chosen = choices(measured(noise=0.02, seed=seed, **same))
        assert chosen.count("sdpa") >= 0.8 * len(POINTS)


def test_what_is_faster_by_less_than_the_smallest_effect_stays_with_sdpa():
    table = measured(noise=0.0005, bmm=lambda _: -0.01)
    assert set(choices(table)) == {"sdpa"}
    assert set(choices(table, smallest_effect=0.002)) == {"bmm"}


def test_a_candidate_that_is_slower_at_one_workload_is_not_chosen_there():
    slow = POINTS[5]
    chosen = dict(zip(POINTS, choices(measured(bmm=lambda point: 0.6 if point == slow else -0.3)), strict=True))
    assert chosen[slow] == "sdpa"
    assert "bmm" in chosen.values()


def test_a_candidate_that_is_much_slower_everywhere_is_not_in_the_policy():
    assert kinds(measured(bmm=lambda _: 0.3, fused=lambda _: 0.1)) == []
    (kind,) = kinds(measured(bmm=lambda _: 0.5, fused=lambda _: -0.1))
    assert kind.candidates == ("fused",)
    assert kind.chosen == {"fused": len(POINTS)}


def test_a_candidate_that_was_nearly_as_fast_is_tried_and_changes_nothing_else():
    between = Workload(seq_len=300)
    known = {"noise": 0.0, "fused": lambda point: -0.1 - 0.02 * math.log(point.seq_len)}
    (without,) = kinds(measured(**known))
    (kind,) = kinds(measured(**known, bmm=lambda _: 0.02))
    assert kind.candidates == ("fused", "bmm")
    assert kind.contenders(values_of(between, 2), SMALLEST_EFFECT) == ("sdpa", "fused", "bmm")
    assert without.contenders(values_of(between, 2), SMALLEST_EFFECT) == ("sdpa", "fused")
    assert (kind.scales, kind.signal, kind.noise) == (without.scales, without.signal, without.noise)


@pytest.mark.parametrize("missing", [None, np.nan])
def test_where_a_candidate_did_not_run_it_is_not_chosen(missing):
    found = measured(bmm=lambda point: missing if point.mask == "causal" else -0.3)
    assert choices(found) == ["sdpa" if point.mask == "causal" else "bmm" for point in POINTS]


def test_one_query_is_another_kind():
    points = (*POINTS, *(Workload(seq_len=1, kv_len=length, num_heads=4) for length in LENGTHS))
    found = measured(points=points, bmm=lambda point: -0.3 if point.seq_len == 1 else 0.3)
    assert choices(found, points) == ["sdpa"] * len(POINTS) + ["bmm"] * len(LENGTHS)


def test_an_axis_that_decides_has_the_shorter_scale():
    draws = np.random.default_rng(0)
    places = draws.uniform(0, 6, (60, 2))
    logs = np.stack([np.sin(2 * places[:, 0]), np.cos(2 * places[:, 0])], axis=1)
    scales, _, noise = likeliest(places, logs + draws.normal(0, 0.02, logs.shape))
    assert 3 * scales[0] < scales[1]
    assert noise < 0.02


def test_each_workload_is_judged_by_a_policy_that_was_learned_without_it():
    """One whose ratio nothing else tells of costs what sdpa does, though a policy that has seen it would know."""
    odd = POINTS[10]
    table = measured(noise=0.0, bmm=lambda point: -0.5 if point == odd else 0.1)
    assert held_out(table)[10] == pytest.approx(0.5)


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


def test_runs_of_graphs_are_refused(tmp_path):
    found = journals.write(tmp_path, journals.workloads(seq_len=(64, 128)))
    plan = msgspec.structs.replace(found.plan, launch="graph")
    graphs = replace(found, started=msgspec.structs.replace(found.started, plan=plan))
    with pytest.raises(ValueError, match=r"timed graphs that are replayed.*--launch eager"):
        learn([found, graphs])
