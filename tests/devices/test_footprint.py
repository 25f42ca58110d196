"""Counted memory of a call, and memory that calls keep, compared with calls of known memory."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attnbench.case import Case, bind, build, draw_normal, place
from attnbench.contract.loading import from_value
from attnbench.devices import cpu, device
from attnbench.devices.accelerators import Accelerator
from attnbench.devices.recording import Footprint
from attnbench.metrics.call import growth, measure_kept
from attnbench.plugins import plugs
from attnbench.processes.messages import Heartbeat, Target
from attnbench.processes.worker.answers import Worker
from attnbench.storage.records import FIRST_CALLS, Arm
from attnbench.workloads.workload import Workload
from tests.checks import bundled

METRICS = plugs("attnbench.metrics", "METRIC")
MIB = 2**20
OUTPUT, SCORES = 2 * 64 * 8 * 4, 2 * 64 * 64 * 4
"""Bytes of a case's output, and of its scores."""


def floats(number: int = MIB // 4) -> torch.Tensor:
    return torch.zeros(number)


def case(direction: str, function=None) -> Case:
    workload = Workload(seq_len=64, num_heads=2, head_dim=8, direction=direction)
    made = from_value(function, "x.py:x") if function else bundled()["fused"]
    return build(workload, made, place(draw_normal(workload, 0), workload), bind(workload))


def test_a_recording_imports_no_compiler():
    source = (
        "import sys, torch; from attnbench.devices import device; device('cpu').record(lambda: torch.ones(9)); "
        "print('torch._inductor' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_each_part_of_a_footprint_is_what_the_call_took():
    """A result that is a view counts the whole memory behind it, once; inputs do not count."""
    given = floats()

    def call():
        first = floats()
        second = floats(MIB // 2)
        del first
        return second[:1], second[1:2], given[1:]

    found = device("cpu").record(call).footprint([given])
    assert found.peak_bytes == 3 * MIB
    assert found.kept_bytes == found.result_bytes == 2 * MIB


def test_saved_memory_is_kept_by_the_graph_and_scratch_is_the_rest_of_the_peak():
    saved, seen = METRICS["saved_memory"].measure, case("inference")
    assert saved(seen) == 0
    assert [saved(case(direction)) for direction in ("forward", "backward", "forward_backward")] == [SCORES + 8] * 3
    assert METRICS["scratch_memory"].measure(seen) == 2 * SCORES
    assert METRICS["peak_memory"].measure(seen) == 2 * SCORES + OUTPUT


def test_the_metrics_of_a_cell_share_one_pass():
    calls = []

    def counting(query, key, value):
        calls.append(1)
        return sdpa(query, key, value)

    seen = case("inference", counting)
    on_cpu = ["peak_memory", "saved_memory", "scratch_memory"]
    assert all(METRICS[name].measure(seen) >= 0 for name in on_cpu)
    assert len(calls) == 2  # one to allocate what stays, one that is counted


OFF_THE_HOST, OVER_RANKS = {"outside_memory", "energy"}, {"bytes_sent", "slowest_rank"}


@pytest.mark.parametrize(
    ("place", "world_size", "lacking"),
    [
        ("cpu", 1, OFF_THE_HOST | OVER_RANKS | {"straggling"}),
        ("cpu", 2, OFF_THE_HOST),
        ("cuda", 1, OVER_RANKS | {"straggling"}),
        ("cuda", 2, {"latency", "straggling", "energy"}),
    ],
)
def test_ranks_of_another_device_have_no_latency_and_only_there_memory_is_outside(place, world_size, lacking):
    """The latency would include copies of inputs and output through the host's memory."""
    workload = Workload(device=place, world_size=world_size)
    lacking = lacking | ({*FIRST_CALLS} if world_size > 1 else set())
    assert {name for name, metric in METRICS.items() if not metric.fits(workload)} == lacking


@pytest.mark.parametrize("is_first", [True, False])
def test_two_readings_of_cudas_allocator_give_what_lies_between(is_first):
    """Torch has no numbers before the first allocation."""
    held, start = "allocated_bytes.all", 0 if is_first else 100
    before, after = {f"{held}.current": start}, {f"{held}.current": 140, f"{held}.peak": 190}
    found = Accelerator.allocated({} if is_first else before, after)
    assert found == Footprint(peak_bytes=190 - start, kept_bytes=140 - start)


def test_a_worker_reuses_the_case_of_a_cell_and_stores_the_notes_of_values(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    taken = itertools.count(0, 2**40)
    monkeypatch.setattr(cpu.Cpu, "outside_bytes", lambda _: next(taken))
    worker = Worker(Heartbeat())
    workload = Workload(seq_len=32, num_heads=2, head_dim=8, direction="inference", num_threads=1)

    def observed(spec):
        cell = Target(workload=workload, arm=Arm(implementation="it"), spec=spec)
        (said,) = worker.answer("observe", cell=cell, metric="peak_memory").measurement.warnings
        assert "outside of torch's allocator" in said
        return worker.case(cell)

    first = observed("fused")
    assert observed("fused") is first
    assert observed("sdpa") is not first
    cell = Target(workload=workload, arm=Arm(implementation="fused"), spec="fused")
    worker.answer("prepare", cell=cell, limit_s=9)
    assert worker.observed is None


@pytest.mark.parametrize("taken", [0, 1, 10 * MIB])
def test_memory_outside_of_the_allocator_stands_beside_the_peak_where_it_matters(taken, monkeypatch):
    """A library that takes memory from the driver: torch's allocator does not see it."""
    held = [100]
    monkeypatch.setattr(cpu.Cpu, "outside_bytes", lambda _: held[0])

    def attend(query, key, value):
        held[0] = 100 + taken  # at its first call, and never frees it
        return sdpa(query, key, value)

    seen = case("inference", attend)
    assert METRICS["outside_memory"].measure(seen) == taken
    assert ("leaves out 10.0 MiB outside of torch's allocator" in METRICS["peak_memory"].note(seen)) is (taken > 1)


def honest(query, key, value):
    return sdpa(query, key, value)


def keeping(what):
    """Build a function that keeps this of each call."""
    held = []

    def function(query, key, value):
        output = sdpa(query, key, value)
        held.append(what(query, key, output))
        return output

    return function


@pytest.mark.one_in(3)
@pytest.mark.parametrize("direction", ["inference", "backward", "forward_backward"])
def test_an_honest_function_keeps_nothing_and_has_its_inputs_back(direction):
    made = case(direction, honest)
    before = {name: tensor.detach().clone() for name, tensor in made.tensors.items()}
    assert measure_kept(made).each_bytes == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.tensors.items())


@pytest.mark.parametrize(
    ("what", "num_bytes", "said"),
    [
        (lambda _query, _key, output: output, OUTPUT, "its output"),
        (lambda query, key, _output: (query @ key.transpose(-2, -1)).detach(), SCORES, "its scores"),
    ],
)
def test_what_grows_with_each_call_is_counted_and_named_by_one_measurement(what, num_bytes, said, monkeypatch):
    recorded, record = [], cpu.Cpu.record
    monkeypatch.setattr(cpu.Cpu, "record", lambda self, call: recorded.append(call) or record(self, call))
    made = case("inference", keeping(what))
    assert METRICS["kept_memory"].measure(made) == num_bytes
    assert METRICS["kept_once"].measure(made) == 0
    assert said in METRICS["kept_memory"].note(made)
    assert len(recorded) == 2


def test_an_output_that_keeps_its_graph_keeps_more_than_an_output():
    made = case("forward", keeping(lambda _query, _key, output: output))
    found = measure_kept(made)
    assert found.each_bytes > OUTPUT
    assert "with each call" in growth(found, made.workload)


def test_a_table_that_is_made_once_is_no_growth_and_answers_kept_by_their_inputs_are():
    tables, answers = {}, {}

    def tabled(query, key, value):
        tables.setdefault(0, torch.zeros(64, 64))
        return sdpa(query, key, value)

    def caching(query, key, value):
        return answers.setdefault(query.sum().item(), sdpa(query, key, value)).clone()

    found = measure_kept(case("inference", tabled))
    assert (found.each_bytes, found.once_bytes) == (0, 64 * 64 * 4)
    assert measure_kept(case("inference", caching)).each_bytes == OUTPUT
