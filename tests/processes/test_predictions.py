"""Cells left out by a prediction: close ones are retried, named ones reported at once, and none counts as a loss."""

import dataclasses

import msgspec
import pytest
import typer

from attnbench.analysis.comparisons import losses, untried
from attnbench.commands import ExitCode, running
from attnbench.processes import execution, stages
from attnbench.processes.messages import Check, Failed
from attnbench.processes.worker.attempts import OutOfReachError, require_within
from attnbench.reports import endings
from attnbench.storage.records import BASE, CANDIDATE, Status
from attnbench.workloads.workload import Workload
from studies.simulated import virtual
from studies.simulated.worlds import World

WHY = "predicted 5 s for one call, over the limit of 2 s; --call-limit 5 includes it"


class Busy(virtual.SimulatedClient):
    """A machine that is too busy for `slow` during the first `num_calm` checks."""

    def __init__(self, num_calm, *, is_close=True):
        super().__init__(World(name="calm"), lambda *_: 1e-3)
        self.asked, self.num_calm, self.is_close = [], num_calm, is_close

    def ask(self, request):
        if isinstance(request, Check):
            self.asked.append(request.arm.implementation)
            if request.arm.implementation == "slow" and len(self.asked) <= self.num_calm:
                return Failed(status=Status.timeout, message=WHY, is_predicted=True, is_close=self.is_close)
        return super().ask(request)


def run_on(client, folder, named=()):
    plan = virtual.plan(1, ["sdpa", "slow", "fused"], budget_s=0.0)
    with running.watching(named) as watch:
        execution.execute(plan, folder, watch, client=client, clock=client.clock.now, read_counters=lambda: None)
    return {record.implementation: record for record in running.read(folder).records}


def test_what_was_close_is_predicted_again_after_all_checks(tmp_path):
    client = Busy(num_calm=3)
    assert run_on(client, tmp_path)["slow"].status is Status.ok
    assert client.asked == ["sdpa", "slow", "fused", "slow"]


@pytest.mark.parametrize(("is_close", "num_checks"), [(True, 4), (False, 3)])
def test_what_stays_out_of_reach_is_looked_at_twice_at_most(tmp_path, is_close, num_checks):
    client = Busy(num_calm=9, is_close=is_close)
    found = run_on(client, tmp_path)["slow"]
    assert (found.status, found.is_predicted, found.message) == (Status.timeout, True, WHY)
    assert len(client.asked) == num_checks


def test_what_is_close_keeps_its_reason_when_the_time_for_checks_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "check_limit_s", lambda _: 2.5)
    client, plan = Busy(num_calm=9), virtual.plan(2, ["sdpa", "slow", "fused"], budget_s=0.0)
    execution.execute(plan, tmp_path, lambda _: None, ("check",), client=client, clock=lambda: float(len(client.asked)))
    assert client.asked == ["sdpa", "slow", "fused"]
    found = running.read(tmp_path)
    assert {record.implementation: record.message for record in found.records if record.is_predicted} == {"slow": WHY}
    assert found.num_left_out == 3
    assert found.reason.startswith("3 of 6 cells")


def test_who_named_it_hears_at_once_that_it_is_left_out_and_how_to_include_it(tmp_path, capsys):
    run_on(Busy(num_calm=9), tmp_path / "named", {"slow"})
    said = " ".join(capsys.readouterr().err.split())
    assert "left out: slow on" in said
    assert said.index("--call-limit 5 includes it") < said.index("timing")
    run_on(Busy(num_calm=9), tmp_path / "all")
    assert "left out" not in capsys.readouterr().err


def test_a_prediction_is_close_below_a_few_times_the_limit():
    def attempt(seconds):
        return lambda step, _: (seconds * step.seq_len / 1024, None)

    for seconds, is_close in ((3.0, True), (9.0, False)):
        with pytest.raises(OutOfReachError, match=r"--call-limit \d+ includes it") as raised:
            require_within(2.0, 2**40, Workload(seq_len=1024), attempt(seconds))
        assert raised.value.is_close is is_close


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
