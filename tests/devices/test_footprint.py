"""Counted memory of a call, compared with calls of known memory."""

import subprocess
import sys

import msgspec
import pytest
import torch

from attnbench.checking.case import Case, bind, build, draw_normal, place
from attnbench.contract.loading import from_value
from attnbench.devices import cpu, device
from attnbench.devices.accelerators import Accelerator
from attnbench.devices.recording import Footprint
from attnbench.plugins import plugs
from attnbench.processes.messages import Cell, Heartbeat, Limits
from attnbench.processes.worker.answers import Worker
from attnbench.storage.records import Arm
from attnbench.workloads.workload import Workload
from tests.checks import bundled

METRICS = plugs("attnbench.metrics", "METRIC")
MIB = 2**20


def floats(number: int = MIB // 4) -> torch.Tensor:
    return torch.zeros(number)


def case(direction: str, function=None) -> Case:
    workload = Workload(seq_len=64, num_heads=2, head_dim=8, direction=direction)
    made = from_value(function, "function") if function else bundled()["fused"]
    return build(workload, made, place(draw_normal(workload, 0), workload), bind(workload))


def test_a_recording_imports_no_compiler():
    source = (
        "import sys, torch; from attnbench.devices import device; device('cpu').record(lambda: torch.ones(9)); "
        "print('torch._inductor' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_each_part_of_a_footprint_is_what_the_call_took():
    def call():
        first = floats()
        second = floats(MIB // 2)
        del first
        return second

    found = device("cpu").record(call).footprint()
    assert found.peak_bytes == found.allocated_bytes == 3 * MIB
    assert found.kept_bytes == found.result_bytes == 2 * MIB
    assert found.num_allocations == 2
    assert found.reserved_bytes == 0


def test_a_call_that_takes_nothing_has_a_footprint_of_nothing():
    given = floats()
    found = device("cpu").record(lambda: given[1:]).footprint([given])
    assert (found.peak_bytes, found.kept_bytes, found.result_bytes, found.num_allocations) == (0, 0, 0, 0)


def test_a_result_that_is_a_view_counts_the_whole_memory_behind_it_and_once():
    def call():
        made = floats()
        return made[:1], made[1:2]

    assert device("cpu").record(call).footprint().result_bytes == MIB


def test_what_is_saved_is_what_the_graph_alone_keeps():
    saved = METRICS["saved_memory"].measure
    weights = 2 * 64 * 64 * 4
    assert saved(case("inference")) == 0
    assert [saved(case(direction)) for direction in ("forward", "backward", "forward_backward")] == [weights + 8] * 3


def test_scratch_is_the_peak_less_the_results():
    seen = case("inference")
    assert METRICS["scratch_memory"].measure(seen) == 2 * (2 * 64 * 64 * 4)
    assert METRICS["peak_memory"].measure(seen) == 2 * (2 * 64 * 64 * 4) + 2 * 64 * 8 * 4


def test_the_metrics_of_a_cell_share_one_pass():
    calls = []

    def counting(query, key, value):
        calls.append(1)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    seen = case("inference", counting)
    on_cpu = ["allocated_memory", "num_allocations", "peak_memory", "saved_memory", "scratch_memory"]
    assert all(METRICS[name].fits(seen.workload) for name in on_cpu)
    assert all(METRICS[name].measure(seen) >= 0 for name in on_cpu)
    assert len(calls) == 2  # one to allocate what stays, one that is counted


def test_what_the_allocator_of_cuda_reserves_is_a_metric_there_alone():
    there = msgspec.structs.replace(Workload(), device="cuda")
    over_ranks = {name for name, metric in METRICS.items() if metric.fits(Workload(world_size=2))} - {
        name for name, metric in METRICS.items() if metric.fits(Workload())
    }
    elsewhere = [name for name, metric in METRICS.items() if not metric.fits(Workload()) and name not in over_ranks]
    assert elsewhere == ["outside_memory", "reserved_memory"]
    assert all(metric.fits(there) for name, metric in METRICS.items() if name not in over_ranks)


@pytest.mark.parametrize(("place", "fits"), [("cpu", True), ("cuda", False)])
def test_ranks_of_another_device_have_no_latency_and_do_not_say_how_long_they_wait(place, fits):
    """The latency would include copies of inputs and output through the host's memory."""
    workload = Workload(device=place, world_size=2)
    assert METRICS["latency"].fits(workload) is METRICS["straggling"].fits(workload) is fits
    assert METRICS["slowest_rank"].fits(workload)
    assert METRICS["latency"].fits(Workload(device=place))


@pytest.mark.parametrize("is_first", [True, False])
def test_two_readings_of_cudas_allocator_give_what_lies_between(is_first):
    before = {
        "allocated_bytes.all.current": 100,
        "allocation.all.allocated": 7,
        "allocated_bytes.all.allocated": 500,
        "reserved_bytes.all.current": 128,
    }
    if is_first:  # torch has no numbers before the first allocation
        before = {}
    after = {
        "allocated_bytes.all.current": 140,
        "allocated_bytes.all.peak": 190,
        "allocated_bytes.all.allocated": 640,
        "allocation.all.allocated": 10,
        "reserved_bytes.all.peak": 256,
    }
    start, calls, taken, reserved = (0, 0, 0, 0) if is_first else (100, 7, 500, 128)
    assert Accelerator.allocated(before, after) == Footprint(
        peak_bytes=190 - start,
        kept_bytes=140 - start,
        num_allocations=10 - calls,
        allocated_bytes=640 - taken,
        reserved_bytes=256 - reserved,
    )


def test_a_worker_keeps_a_case_between_the_metrics_of_its_cell_and_no_longer(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    worker = Worker(Heartbeat())
    workload = Workload(seq_len=32, num_heads=2, head_dim=8, direction="inference", num_threads=1)

    def observed(spec):
        cell = Cell(workload=workload, arm=Arm(implementation="it"), spec=spec)
        worker.answer("observe", cell=cell, metric="peak_memory")
        return worker.case(cell)

    first = observed("fused")
    assert observed("fused") is first
    assert observed("sdpa") is not first
    cell = Cell(workload=workload, arm=Arm(implementation="fused"), spec="fused")
    worker.answer("prepare", cell=cell, limits=Limits(call_s=9, memory_bytes=0))
    assert worker.observed is None


@pytest.mark.parametrize("taken", [0, 1, 10 * MIB])
def test_memory_outside_of_the_allocator_stands_beside_the_peak_where_it_matters(taken, monkeypatch):
    """A library that takes memory from the driver: torch's allocator does not see it."""
    held = [100]
    monkeypatch.setattr(cpu.Cpu, "outside_bytes", lambda _: held[0])

    def attend(query, key, value):
        if held[0] == 100:  # at its first call, and never frees it
            held[0] += taken
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    seen = case("inference", attend)
    assert METRICS["outside_memory"].measure(seen) == taken
    assert ("leaves out 10.0 MiB outside of torch's allocator" in METRICS["peak_memory"].note(seen)) is (taken > 1)


def test_the_note_of_a_metric_is_stored_with_its_value(monkeypatch):
    taken = iter((0, 2**40))
    monkeypatch.setattr(cpu.Cpu, "outside_bytes", lambda _: next(taken))
    workload = Workload(seq_len=32, num_heads=2, head_dim=8, direction="inference")
    cell = Cell(workload=workload, arm=Arm(implementation="sdpa"), spec="sdpa")
    (said,) = Worker(Heartbeat()).answer("observe", cell=cell, metric="peak_memory").measurement.warnings
    assert "outside of torch's allocator" in said
