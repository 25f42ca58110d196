"""Cells left out by a prediction: none counts as a loss."""

import dataclasses

import msgspec

from attnbench.analysis.sides import losses, untried
from attnbench.storage.records import BASE, CANDIDATE, Status
from studies.simulated import virtual
from studies.simulated.worlds import World

WHY = "predicted 5 s for one call, over the limit of 2 s; --call-limit 5 includes it"


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
