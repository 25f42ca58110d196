"""Stated FLOPs of a call: exact, and so gated without statistics."""

from pathlib import Path

import pytest

from attnbench.analysis.gate.decision import judge
from attnbench.analysis.gate.rulings import EXECUTED_FLOPS, Kind, Outcome, Rule, Thresholds
from tests.analysis.gate.scripts import FIRST, POINTS, executes, run

FOUND = [(1000, set()), (2000, {Kind.grown}), (1001, {Kind.grown}), (999, set()), (None, {Kind.lost})]


@pytest.mark.parametrize(("flops", "expected"), FOUND)
def test_the_flops_of_a_call_may_not_grow_and_not_be_left_untold(tmp_path: Path, flops, expected) -> None:
    before = run(tmp_path / "before", executes(1000))
    found = judge(before, run(tmp_path / "after", executes(flops))).of(Outcome.finding)
    assert {ruling.kind for ruling in found} == expected
    assert {ruling.metric for ruling in found} <= {EXECUTED_FLOPS}


def test_flops_that_nobody_reported_before_are_not_judged(tmp_path: Path) -> None:
    decision = judge(run(tmp_path / "before", executes(None)), run(tmp_path / "after", executes(1000)))
    reported = {(each.workload, each.implementation) for each in decision.rulings if each.metric == EXECUTED_FLOPS}
    assert reported == {(FIRST, "bmm"), (POINTS[1].id, "bmm"), (POINTS[1].id, "fused")}
    assert decision.outcome is Outcome.passed


def test_fewer_flops_are_reported_as_better(tmp_path: Path) -> None:
    decision = judge(run(tmp_path / "before", executes(1000)), run(tmp_path / "after", executes(500)))
    (found,) = [ruling for ruling in decision.rulings if ruling.kind is Kind.shrunk]
    assert (found.metric, found.unit, found.effect) == (EXECUTED_FLOPS, "flops", 0.5)
    assert decision.outcome is Outcome.improved


def test_a_rule_may_allow_more_flops(tmp_path: Path) -> None:
    asked = Thresholds(rule=(Rule(metric=EXECUTED_FLOPS, allowed=1.0),))
    before, after = run(tmp_path / "before", executes(1000)), run(tmp_path / "after", executes(2000))
    assert judge(before, after, asked).outcome is Outcome.passed
