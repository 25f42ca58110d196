"""A run keeps its budget whatever takes the time, and its progress never runs backwards; on a virtual clock."""

from itertools import pairwise

import msgspec
import pytest

from attnbench.analysis.results import read
from attnbench.processes import execution
from attnbench.reports import summary
from studies.simulated import virtual
from studies.simulated.worlds import WORLDS

BUDGET_S = 90.0
NAMES = ("baseline", "x", "y")


class Loaded(virtual.SimulatedClient):
    """A machine on which each step takes the given seconds more."""

    def __init__(self, *, check_s=0.0, observe_s=0.0, visit_s=0.0):
        super().__init__(WORLDS["calm"], lambda *_: 1e-3, seed=1)
        self.extra = {"check": check_s, "profile": observe_s, "observe": observe_s, "sample_blocks": visit_s}

    def ask(self, function, result, /, **arguments):
        self.clock.spend(self.extra.get(function, 0.0))
        return super().ask(function, result, **arguments)


def run(folder, client, cells=8, **fields):
    """Run a plan; return its results, and the shown progress with the time at which it was shown."""
    plan, seen = virtual.plan(cells, NAMES, budget_s=BUDGET_S), []
    plan = msgspec.structs.replace(plan, metrics=("latency", "peak_memory"), **fields)

    def watch(progress):
        seen.append((client.clock.now(), progress))

    execution.execute(plan, folder, watch, client=client, clock=client.clock.now, read_counters=lambda: None)
    return read(folder), seen


@pytest.mark.parametrize(
    "slow",
    [{"check_s": 20.0}, {"check_s": 4.0}, {"observe_s": 20.0}, {"visit_s": 10.0}, {"check_s": 2.0, "visit_s": 3.0}],
)
def test_the_budget_is_kept_and_something_is_timed(tmp_path, slow):
    results, _ = run(tmp_path, Loaded(**slow))
    first_shape_s = len(NAMES) * slow.get("check_s", 0.0)  # it is checked in any case, so that there is a comparison
    longest_step_s = 10.0 + max(slow.values())
    num_shapes_s = 8 * slow.get("visit_s", 0.0)  # each shape that was checked has one visit
    assert results.elapsed_s <= max(BUDGET_S, first_shape_s, num_shapes_s) + longest_step_s
    assert sum(results.num_visits.values()) > 0
    troubles = [text for text in summary.troubles(results) if "budget" in text]
    assert bool(troubles) is (slow != {"observe_s": 20.0})
    assert all("--budget" in text for text in troubles)


def test_a_budget_that_suffices_leaves_nothing_out(tmp_path):
    results, _ = run(tmp_path, Loaded(), cells=2)
    assert not any("budget" in text for text in summary.troubles(results))
    assert results.num_left_out == 0


@pytest.mark.parametrize("slow", [{}, {"check_s": 1.0}, {"observe_s": 1.0}, {"visit_s": 0.5}])
def test_progress_never_runs_backwards_and_the_estimate_is_that_of_the_budget(tmp_path, slow):
    results, seen = run(tmp_path, Loaded(**slow))
    for (_, before), (_, after) in pairwise(seen):
        assert after.stage != before.stage or after.done / after.total >= before.done / before.total
        assert after.left_s is None or before.left_s is None or after.left_s <= before.left_s
    assert all(now_s + (each.left_s or 0.0) <= max(BUDGET_S, results.elapsed_s) + 1e-6 for now_s, each in seen)


def test_without_a_budget_the_estimate_is_right_within_a_third_after_a_tenth(tmp_path):
    client = Loaded(check_s=1.0)
    plan, seen = msgspec.structs.replace(virtual.plan(20, NAMES, budget_s=0.0), metrics=()), []
    execution.execute(
        plan,
        tmp_path,
        lambda progress: seen.append((client.clock.now(), progress)),
        ("check",),
        client=client,
        clock=client.clock.now,
        read_counters=lambda: None,
    )
    end_s = client.clock.now()
    late = [(now_s, each) for now_s, each in seen if each.done >= each.total / 10]
    assert len(late) > 20
    assert all(each.left_s == pytest.approx(end_s - now_s, rel=1 / 3) for now_s, each in late if now_s < end_s - 2)
    assert all(each.left_s is None for now_s, each in seen if (now_s, each) not in late)
