"""Plans that exceed the budget: as many cells as fit are checked, spread evenly; and the dry run's warning."""

import json
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from attnbench.cli import app
from attnbench.commands.dry_run import predicted, sentence
from attnbench.processes.execution import Predicted
from attnbench.processes.messages import Failed, Prepared
from attnbench.processes.stages import CHECKS_FACTOR, LEAST_CHECKS_S, MANY, check_limit_s, spread
from attnbench.reports.story import troubles
from attnbench.storage.records import Arm, Status
from studies.simulated import virtual
from studies.simulated.worlds import World

SDPA = Arm(implementation="sdpa")


@given(st.integers(0, 300))
def test_any_first_few_are_spread_evenly_over_all(number):
    found = spread(range(number))
    assert sorted(found) == list(range(number))
    half = sorted(found[: max(1, number // 2)])
    assert all(later - earlier <= 4 for earlier, later in pairwise(half))


def run_of(number, tmp_path, budget_s):
    client = virtual.SimulatedClient(World(name="calm"), lambda *_: 1e-3)
    plan = msgspec.structs.replace(virtual.plan(number, ["sdpa"], budget_s=budget_s))
    return plan, virtual.execute(plan, tmp_path, client)


def test_what_does_not_fit_is_left_out_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("attnbench.processes.stages.MANY", 20)
    monkeypatch.setattr(virtual, "CHECK_S", 3.0)
    plan, found = run_of(40, tmp_path, budget_s=5.0)
    assert check_limit_s(plan) == LEAST_CHECKS_S == 20.0
    number = len(found.records)
    assert 7 <= number <= 8  # three seconds each
    assert f"{40 - number} of 40 cells were left out: no more fit into the budget" in found.reason
    lengths = sorted(record.workload.seq_len for record in found.records)
    assert lengths[0] == 8
    assert max(later - earlier for earlier, later in pairwise(lengths)) <= 64
    (trouble,) = [line for line in troubles(found) if "left out" in line]
    assert trouble.startswith(f"{40 - number} of 40 cells were left out: no more fit into the budget of 5 s")
    assert all(record.status is Status.ok and record.samples("latency") for record in found.records)


def test_few_cells_are_all_checked_whatever_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(virtual, "CHECK_S", 30.0)
    plan, found = run_of(5, tmp_path, budget_s=1.0)
    assert len(plan.workloads) <= MANY
    assert len(found.records) == 5
    assert "left out" not in found.reason


def test_more_time_means_more_checks():
    plan = virtual.plan(MANY + 1, ["sdpa"], budget_s=100.0)
    assert check_limit_s(plan) == CHECKS_FACTOR * 100.0


def test_a_dry_run_of_many_cells_says_how_many_would_be_checked():
    plan = virtual.plan(2 * MANY, ["sdpa"], budget_s=5.0)
    seen = [
        Predicted(workload, SDPA, Prepared(has_dropout=False, executed_flops=None, call_s=0.1))
        for workload in plan.workloads[:3]
    ]
    seen.append(Predicted(plan.workloads[3], SDPA, Failed(status=Status.unsupported, message="no causal mask")))
    found = predicted(plan, seen)
    assert (found["cells"], found["looked_at"], found["tried"]) == (2000, 4, 3)
    assert found["checks_s"] == pytest.approx(2000 * 3 / 4 * 0.85)
    assert found["checked"] == int(2000 * 20 / found["checks_s"])
    assert found["left_out"][0]["reason"] == "no causal mask"
    said = sentence(found)
    assert "2,000 cells, of which 3 of 4 looked at would be tried." in said
    assert f"About {found['checked']:,} cells would be checked, spread evenly" in said


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
