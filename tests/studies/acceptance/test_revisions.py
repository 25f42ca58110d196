"""Sessions of two revisions as an acceptance test: the repository that is made, and what is read from a session."""

import math
from difflib import ndiff

import pytest
import torch

from attnbench.commands import terminal
from attnbench.commands.compare import summary
from attnbench.processes.sides import is_self_contained
from attnbench.workloads import sweep
from studies.acceptance import plan, revisions, suite
from studies.simulated import virtual
from studies.simulated.worlds import WORLDS
from tests.repositories import git

REVISIONS = {
    "load": 0.5,
    "num_cells": 16.0,
    "num_equivalent": 0.0,
    "discarded_share": 0.0,
    "elapsed_s": 100.0,
    "found_s": 20.0,
}


def session_row(suite_verdict="undecided", num_slower=0.0, exit_code=0.0):
    return {**REVISIONS, "suite": suite_verdict, "num_slower": num_slower, "exit_code": exit_code}


class TestRevisions:
    @pytest.mark.parametrize("short", [True, False])
    def test_each_test_has_a_size_and_a_maker(self, short):
        assert {job.test for job in suite.jobs(suite.GATE, short=short)} == set(suite.GATE)
        assert all(plan.sizes(short=short)[test].compare_s == plan.GATE_S for test in suite.GATE)
        assert set(suite.GATE) <= set(suite.MAKERS)

    @pytest.mark.parametrize(("alarms", "passes"), [(1, True), (2, False)])
    def test_one_session_of_twenty_may_alarm_for_nothing(self, alarms, passes):
        rows = [session_row("slower", exit_code=1.0)] * alarms + [session_row()] * (20 - alarms)
        assert revisions.same_code(rows, short=False).passes is passes
        assert revisions.slowdown_apart(rows, short=False).passes is False

    def test_a_cell_or_the_whole_finds_it_and_an_invalid_session_finds_nothing(self):
        found = [session_row(num_slower=1.0, exit_code=1.0), session_row("slower", exit_code=1.0)]
        assert revisions.slowdown(found, short=False).passes
        disturbed = session_row("slower", 16.0, 4.0)
        assert revisions.slowdown([*found * 2, disturbed], short=False).passes
        assert not revisions.slowdown([*found, disturbed], short=False).passes  # a third says nothing
        assert not revisions.same_code([disturbed] * 20, short=False).passes
        assert not revisions.slowdown([*found, session_row(exit_code=1.0)], short=False).passes  # a loss is no slowdown

    def test_a_loss_where_nothing_has_changed_is_an_alarm(self):
        assert not revisions.same_code([session_row(exit_code=1.0)] * 2 + [session_row()] * 18, short=False).passes

    @pytest.mark.parametrize("is_apart", [True, False])
    def test_the_repository_has_two_revisions_that_differ_in_their_share_alone(self, tmp_path, is_apart):
        revisions.make_repository(tmp_path, share=0.05, is_apart=is_apart, budget_s=1.0)
        texts = [git(tmp_path, "show", f"{tag}:mine.py") for tag in ("base", "candidate")]
        differing = [line for line in ndiff(*(text.splitlines() for text in texts)) if line[0] in "+-"]
        assert differing == ["- SHARE = 0.0", "+ SHARE = 0.05", "+ ", "+ # The second revision."]
        assert is_self_contained(tmp_path / "mine.py", [tmp_path]) is not is_apart
        grid = sweep.load(str(tmp_path / "grid.toml"))
        assert len(sweep.workloads(grid, {}, ("cpu",))) == 16

    def test_the_planted_share_is_what_a_call_takes_longer(self):
        slower: dict = {}
        exec(revisions.CODE.format(share=1.0, imported=""), slower)  # noqa: S102 - our own template
        clock = iter([0.0, 3.0, 5.0, 6.1])
        slower["perf_counter"] = lambda: next(clock)
        slower["mine"](*torch.zeros(3, 1, 1, 2, 4))
        assert next(clock, None) is None  # it waited until 6, twice the 3 seconds that the work took

    @pytest.mark.parametrize(("slowdown", "finds"), [(0.1, True), (0.0, False)])
    def test_a_session_is_read_with_the_time_at_which_it_was_found(self, tmp_path, slowdown, finds):
        def cost_s(workload, name):
            return 2e-3 * (1.0 if name.endswith("(base)") else 1 + slowdown)

        asked = virtual.with_sides(virtual.plan(2, ("x",), budget_s=6.0))
        results = virtual.execute(asked, tmp_path / "run", virtual.SimulatedClient(WORLDS["calm"], cost_s))
        row = revisions.read(terminal.summary(results) | summary(results), tmp_path / "run", int(finds))
        assert row["num_cells"] == 2
        assert row["load"] >= 0
        assert revisions.is_slower(row) is finds
        assert (0 < row["found_s"] <= row["elapsed_s"]) is finds
        assert math.isinf(row["found_s"]) is not finds
