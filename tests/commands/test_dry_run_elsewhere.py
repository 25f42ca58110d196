"""A dry run for a device that is missing here says so, and lists what it would run there."""

import json

import pytest

from attnbench.commands.dry_run import print_plan
from attnbench.devices import device
from attnbench.processes.planning import build_plan
from attnbench.storage.events import Plan


@pytest.fixture
def gpu(monkeypatch) -> Plan:
    monkeypatch.setattr(type(device("cuda")), "missing", lambda _: "this machine has no device cuda")
    return build_plan(sweep="gpu")


def test_the_sweep_for_a_gpu_has_what_it_promises(gpu):
    values = {axis: {workload.axes()[axis] for workload in gpu.workloads} for axis in gpu.workloads[0].axes()}
    assert values["dtype"] == {"bfloat16"}
    assert values["head_dim"] == {64, 128}
    assert values["seq_len"] == {1024 * 2**power for power in range(6)}
    assert values["mask"] == {"none", "causal"}
    assert values["direction"] == {"inference", "backward"}
    assert (values["num_heads"], values["num_kv_heads"]) == ({64}, {8})


def test_cells_of_a_missing_device_are_left_out_and_no_worker_is_started(gpu, capsys):
    print_plan(gpu, as_json=True)
    found = json.loads(capsys.readouterr().out)
    cells = {(workload.id, str(arm)) for workload in gpu.workloads for arm in gpu.cells(workload)}
    assert {(row["workload"], row["implementation"]) for row in found["left_out"]} == cells
    assert all("no device cuda" in row["reason"] and "device=h200" in row["reason"] for row in found["left_out"])
    assert found["cells"] == 0


def test_what_is_here_is_predicted_as_before_next_to_it(gpu, capsys, monkeypatch):
    planned = build_plan(
        sweep="full", settings=["device=cpu,cuda", "seq_len=128", "dtype=float32"], implementations=["sdpa"]
    )
    monkeypatch.setattr("attnbench.commands.dry_run.predict", lambda here, watch, **_: seen.append(here) or [])
    seen: list[Plan] = []
    print_plan(planned, as_json=True)
    found = json.loads(capsys.readouterr().out)
    (here,) = seen
    assert {workload.device for workload in here.workloads} == {"cpu"}
    assert found["cells"] == here.num_cells == len(here.workloads)
    assert {row["workload"] for row in found["left_out"]} == {
        workload.id for workload in planned.workloads if workload.device == "cuda"
    }
