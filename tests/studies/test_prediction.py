"""The study of predictions, on a simulated machine whose times follow a law: each unseen cell has its time and peak."""

from pathlib import Path

import msgspec

from attnbench.processes.calibrating import COUNTED
from attnbench.storage.events import Plan
from attnbench.workloads.counts import every_pair
from attnbench.workloads.workload import Workload
from studies import prediction
from studies.simulated import virtual
from studies.simulated.worlds import WORLDS


def seconds(workload: Workload, _name: str) -> float:
    return 2e-5 + 1e-9 * workload.num_heads * every_pair(workload)


def halves(plan: Plan, num_rounds: int) -> Plan:
    """A plan of bfloat16 alone, the kind with the fewest implementations."""
    workloads = tuple(each for each in plan.workloads if each.dtype == "bfloat16")
    return msgspec.structs.replace(plan, workloads=workloads, num_rounds=num_rounds)


def test_every_unseen_cell_is_compared_in_time_and_memory(tmp_path: Path) -> None:
    known, found = (
        virtual.execute(halves(plan, 1), tmp_path / name, virtual.SimulatedClient(WORLDS["calm"], seconds))
        for name, plan in {
            "calibration": msgspec.structs.replace(prediction.calibrating(), budget_s=10.0),
            "unseen": prediction.held_out(1),
        }.items()
    )
    made = prediction.judged(known, found)
    assert len({row["workload"] for row in made}) > COUNTED
    assert all(row["measured_bytes"] is not None for row in made)
    seen = prediction.summary(made)
    assert seen["cells"] == len(made)
    assert seen["memory_within"] == 1.0
    assert seen["time_median"] < prediction.LIMITS["time_median"]
