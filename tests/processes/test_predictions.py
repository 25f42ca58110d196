"""Cells left out by a prediction: named ones reported at once, and none counts as a loss."""

import dataclasses

import msgspec
import pytest
import typer

from attnbench.analysis.sides import losses, untried
from attnbench.commands import ExitCode, running
from attnbench.processes import execution
from attnbench.processes.messages import Check, Failed
from attnbench.reports import endings
from attnbench.storage.records import BASE, CANDIDATE, Status
from studies.simulated import virtual
from studies.simulated.worlds import World

WHY = "predicted 5 s for one call, over the limit of 2 s; --call-limit 5 includes it"


class Busy(virtual.SimulatedClient):
    """A machine that is too busy for `slow` during the first `num_calm` checks."""

    def __init__(self, num_calm):
        super().__init__(World(name="calm"), lambda *_: 1e-3)
        self.asked, self.num_calm = [], num_calm

    def ask(self, request):
        if isinstance(request, Check):
            self.asked.append(request.arm.implementation)
            if request.arm.implementation == "slow" and len(self.asked) <= self.num_calm:
                return Failed(status=Status.timeout, message=WHY, is_predicted=True)
        return super().ask(request)


def run_on(client, folder, named=()):
    plan = virtual.plan(1, ["sdpa", "slow", "fused"], budget_s=0.0)
    with running.watching(named) as watch:
        execution.execute(plan, folder, watch, client=client, clock=client.clock.now, read_counters=lambda: None)
    return {record.implementation: record for record in running.read(folder).records}


def test_who_named_it_hears_at_once_that_it_is_left_out_and_how_to_include_it(tmp_path, capsys):
    run_on(Busy(num_calm=9), tmp_path / "named", {"slow"})
    said = " ".join(capsys.readouterr().err.split())
    assert "left out: slow on" in said
    assert said.index("--call-limit 5 includes it") < said.index("timing")
    run_on(Busy(num_calm=9), tmp_path / "all")
    assert "left out" not in capsys.readouterr().err


def test_a_cell_of_one_side_that_is_only_predicted_is_no_loss_and_leaves_the_rest_open(tmp_path):
    plan = virtual.with_sides(virtual.plan(2, ["x"], budget_s=0.0))
    client = virtual.SimulatedClient(World(name="calm"), lambda *_: 1e-3)
    results = virtual.execute(plan, tmp_path, client)
    assert untried(results) == []
    for side in (BASE, CANDIDATE):
        changed = [
            msgspec.structs.replace(record, status=Status.timeout, message=WHY, is_predicted=True)
            if record.side == side and record.workload == plan.workloads[0]
            else record
            for record in results.records
        ]
        found = dataclasses.replace(results, records=tuple(changed))
        assert losses(found) == []
        (line,) = untried(found)
        assert "includes it" in line


def test_nothing_compared_is_inconclusive(tmp_path):
    client = Busy(num_calm=99)
    plan = virtual.plan(1, ["sdpa", "slow"], budget_s=0.0)
    results = virtual.execute(plan, tmp_path, client)
    with pytest.raises(typer.Exit) as ends:
        running.finish(endings.of_run(results), is_silent=True)
    assert ends.value.exit_code == ExitCode.inconclusive
