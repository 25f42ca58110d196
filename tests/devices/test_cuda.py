"""Facts that only a CUDA device can show. Skipped with a reason without one."""

from pathlib import Path

import pytest
import torch

from attnbench import plugins
from attnbench.analysis.results import read
from attnbench.case import reason_against
from attnbench.checking.agreement import References, check
from attnbench.contract.loading import implementation
from attnbench.devices import device
from attnbench.processes import execution
from attnbench.processes.worker.attempts import describe
from attnbench.storage.records import Record, Status
from attnbench.workloads.workload import Workload
from tests import journals
from tests.pairwise import pairwise

INSIDE_TORCH = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
"""Inductor imports parts of torch that torch itself calls deprecated."""
pytestmark = [
    INSIDE_TORCH,
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
    # torch warns of these in the first call of a process; none says anything of the code under test
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor"),
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle"),
]


@pairwise(name=plugins.stems(plugins.PACKAGE), dtype=["float32", "bfloat16"], scope=["attention", "module"])
def test_every_implementation_agrees_on_the_device(name, dtype, scope):
    workload = Workload(
        seq_len=70, num_heads=2, mask="causal", device="cuda", dtype=dtype, scope=scope, direction="forward_backward"
    )
    found = implementation(name)
    if reason := reason_against(found, workload):
        pytest.skip(reason)
    # flex compiles for each shape and layout, for 16 s each in float32: all rules took it 311 s on an H100
    agreed = check(References(workload, 0, is_brief=name == "flex"), found)
    assert agreed.agrees, agreed.diagnosis


def test_peak_memory_leaves_out_the_inputs_and_counts_scratch():
    inputs = torch.zeros(2**20, device="cuda")
    assert device("cuda").record(lambda: inputs + 1).footprint().peak_bytes == 4 * 2**20
    found = device("cuda").record(lambda: (inputs + 1) + 1).footprint([inputs])
    assert found.peak_bytes == 2 * 4 * 2**20
    assert found.kept_bytes == found.result_bytes == 4 * 2**20


def test_running_out_of_memory_is_distinguished_from_other_errors():
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(2**50, device="cuda")
    assert describe(raised.value)[0] is Status.out_of_memory


def run(folder: Path, *more: str, seq_len: int = 64, direction: str = "inference", **asked) -> dict[str, Record]:
    workload = Workload(seq_len=seq_len, num_heads=2, device="cuda", dtype="bfloat16", direction=direction)
    metrics = ("latency", "peak_memory", "outside_memory")
    plan = journals.planned((workload,), ("fused", "sdpa_flash", *more), metrics=metrics, call_limit_s=1.0, **asked)
    execution.execute(plan, folder, lambda _: None)
    return {record.implementation: record for record in read(folder).records}


HARD = {"seq_len": 2048, "cache": "cold", "pace": "sustained"}


@pytest.mark.parametrize("conditions", [{}, HARD, HARD | {"launch": "graph"}])
def test_a_run_goes_its_whole_way(conditions, tmp_path):
    found = run(tmp_path / "run", **conditions)
    assert {record.status for record in found.values()} == {Status.ok}, [each.message for each in found.values()]
    assert all(record.measurement("latency") for record in found.values())


@pytest.mark.parametrize("direction", ["inference", "forward", "backward", "forward_backward"])
def test_a_run_on_graphs_goes_its_whole_way_and_what_waits_costs_its_own_cell(direction, tmp_path):
    (tmp_path / "waits.py").write_text(
        "def f(query, key, value, *, mask=None):\n"
        "    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5\n"
        "    assert scores.max().item() < 1e9\n"
        "    return scores.softmax(-1) @ value\n"
    )
    found = run(tmp_path / "run", f"{tmp_path}/waits.py:f", direction=direction, launch="graph")
    waits = direction != "backward"  # its forward pass, which waits, is before the timed call
    assert {name: record.status for name, record in found.items()} == {
        "fused": Status.ok,
        "sdpa_flash": Status.ok,
        "f": Status.unsupported if waits else Status.ok,
    }, [each.message for each in found.values()]
    assert not waits or "cannot be recorded as a CUDA graph" in found["f"].message


def test_the_state_of_the_device_is_read_where_its_library_is_there():
    pytest.importorskip("pynvml")
    seen = device("cuda").state()
    assert seen.clock_mhz > 0
    assert 0 < seen.temperature_c < 120


def test_memory_that_is_not_torchs_is_counted_and_torchs_is_not():
    inputs = torch.zeros(2**26, device="cuda")
    before = device("cuda").outside_bytes()
    more = torch.zeros(2**28, device="cuda")
    assert before > 0
    assert abs(device("cuda").outside_bytes() - before) < 2**26
    del inputs, more
