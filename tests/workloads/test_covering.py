"""A pairwise design holds every possible pair; the check's probes meet every value."""

import itertools

import pytest

from attnbench.checking.probes import PROBES
from attnbench.processes.execution import MOST_SPARED, SPARED
from attnbench.workloads import sweep
from attnbench.workloads.covering import cover, dispensable

AXES = {"a": [1, 2, 3], "b": [1, 2, 3, 4], "c": [1, 2], "d": [1]}


def pairs(combinations, axes):
    return {
        ((one, combination[one]), (other, combination[other]))
        for combination in combinations
        for one, other in itertools.combinations(sorted(axes), 2)
    }


def products(axes):
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


@pytest.mark.parametrize("is_possible", [lambda _: True, lambda row: row.get("a") != row.get("b")], ids=["all", "some"])
def test_every_possible_pair_is_in_some_combination_and_they_are_few(is_possible):
    chosen = cover(AXES, is_possible)
    possible = [row for row in products(AXES) if is_possible(row)]
    assert all(row in possible for row in chosen)
    assert pairs(chosen, AXES) == pairs(possible, AXES)
    assert len(chosen) < len(possible)
    assert chosen == cover(AXES, is_possible)


def meetings(rows, names, left_out):
    return {
        (name, *item)
        for row, without in zip(rows, left_out, strict=True)
        for name in set(names) - set(without)
        for item in row.items()
    }


def test_each_probe_of_the_check_meets_each_value_of_each_axis():
    assert set(SPARED) < set(PROBES)
    rows = [workload.axes() for workload in sweep.workloads(sweep.load("check"), {}, ("cpu",))]
    left_out = dispensable(rows, SPARED, MOST_SPARED)
    assert meetings(rows, SPARED, left_out) == meetings(rows, SPARED, [()] * len(rows))
    assert sum(map(len, left_out)) > len(rows)  # more than one each


def test_each_name_still_meets_each_value():
    rows = products(AXES)
    left_out = dispensable(rows, "xyz", 2)
    assert meetings(rows, "xyz", left_out) == meetings(rows, "xyz", [()] * len(rows))
    assert len(left_out[0]) == max(map(len, left_out)) == 2
    assert dispensable(rows[:1], "xyz", 2) == [()]
