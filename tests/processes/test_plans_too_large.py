"""Plans that exceed the budget: as many cells as fit are checked, spread evenly; and the dry run's warning."""

import json
from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from attnbench.cli import app
from attnbench.processes.stages import CHECKS_FACTOR, LEAST_CHECKS_S, MANY, check_limit_s, spread
from attnbench.reports.story import troubles
from attnbench.storage.records import Status
from studies.simulated import virtual
from studies.simulated.worlds import World


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


def test_a_dry_run_lists_every_cell_and_measures_and_stores_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["run", "sdpa", "fused", "--dry-run", "--set", "seq_len=32,64", "--json"])
    assert done.exit_code == 0, done.output
    cells = json.loads(done.stdout)["cells"]
    assert {each["implementation"] for each in cells} == {"sdpa", "fused"}
    assert len({each["workload"] for each in cells}) * 2 == len(cells) > 2
    table = CliRunner().invoke(app, ["run", "sdpa", "fused", "--dry-run", "--set", "seq_len=32,64"]).stdout
    assert f"{len(cells)} cells on {len(cells) // 2} shapes" in table
    assert list(tmp_path.iterdir()) == []
    both = CliRunner().invoke(app, ["run", "--dry-run", "--resume", "x"])
    assert "give one of them" in str(both.exception)
