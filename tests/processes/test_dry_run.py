"""Dry runs of large plans: cells are examined evenly spread, and nothing is stored."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from attnbench.cli import app
from attnbench.commands.dry_run import predicted, sentence
from attnbench.processes.execution import Predicted, spread
from attnbench.processes.messages import Failed, Prepared
from attnbench.storage.records import Arm, Status
from studies.simulated import virtual

SDPA = Arm(implementation="sdpa")


@given(st.integers(0, 300))
def test_any_first_few_are_spread_evenly_over_all(number):
    found = spread(range(number))
    assert sorted(found) == list(range(number))
    half = sorted(found[: max(1, number // 2)])
    assert all(later - earlier <= 4 for earlier, later in pairwise(half))


def test_a_dry_run_of_many_cells_extrapolates_from_those_examined():
    plan = virtual.plan(2000, ["sdpa"], budget_s=5.0)
    seen = [
        Predicted(workload, SDPA, Prepared(has_dropout=False, executed_flops=None, call_s=0.1))
        for workload in plan.workloads[:3]
    ]
    seen.append(Predicted(plan.workloads[3], SDPA, Failed(status=Status.unsupported, message="no causal mask")))
    found = predicted(plan, seen)
    assert (found["cells"], found["looked_at"], found["tried"]) == (2000, 4, 3)
    assert found["checks_s"] == pytest.approx(2000 * 3 / 4 * 0.85)
    assert found["left_out"][0]["reason"] == "no causal mask"
    said = sentence(found)
    assert "2,000 cells, of which 3 of 4 looked at would be tried." in said


@pytest.mark.usefixtures("forked_workers")
def test_the_command_measures_nothing_and_stores_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def mine(query, key, value, mask):\n    return value\n")
    axes = ["--set", "seq_len=32,64", "--set", "num_heads=2", "--set", "head_dim=8", "--set", "mask=causal"]
    chosen = ["-i", "mine.py:mine", "-i", "flex", "--set", "direction=forward_backward", "--set", "dtype=float32"]
    done = CliRunner().invoke(app, ["run", "--dry-run", *axes, "--set", "scope=attention", *chosen, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {row["implementation"] for row in found["predicted"]} == {"mine", "sdpa"}  # wrong answers do not matter yet
    assert {row["implementation"] for row in found["left_out"]} == {"flex"}
    assert all(row["call_s"] > 0 for row in found["predicted"])
    assert "no gradients on the CPU" in found["left_out"][0]["reason"]
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.py", "__pycache__"}
    both = CliRunner().invoke(app, ["run", "--dry-run", "--resume", "x"])
    assert "give one of them" in str(both.exception)
