"""Memory that calls keep after their results are freed."""

import pytest
import torch
from torch.nn import functional as F

from attnbench.checking.case import Case, build, draw_normal, place
from attnbench.contract.loading import from_value
from attnbench.devices import cpu
from attnbench.metrics.call import growth, measure_kept
from attnbench.plugins import plugs
from attnbench.workloads.workload import Workload

OUTPUT, SCORES = 2 * 64 * 8 * 4, 2 * 64 * 64 * 4


def case(function, direction="inference") -> Case:
    workload = Workload(seq_len=64, num_heads=2, head_dim=8, direction=direction)
    return build(workload, from_value(function, "x.py:x"), place(draw_normal(workload, 0), workload))


def honest(query, key, value):
    return F.scaled_dot_product_attention(query, key, value)


def keeping(what):
    held = []

    def function(query, key, value):
        output = honest(query, key, value)
        held.append(what(query, key, output))
        return output

    return function


@pytest.mark.one_in(3)
@pytest.mark.parametrize("direction", ["inference", "backward", "forward_backward"])
def test_an_honest_function_keeps_nothing_and_has_its_inputs_back(direction):
    made = case(honest, direction)
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
    made, metrics = case(keeping(what)), plugs("attnbench.metrics", "METRIC")
    assert metrics["kept_memory"].measure(made) == num_bytes
    assert metrics["kept_once"].measure(made) == 0
    assert said in metrics["kept_memory"].note(made)
    assert len(recorded) == 2


def test_an_output_that_keeps_its_graph_keeps_more_than_an_output():
    made = case(keeping(lambda _query, _key, output: output), "forward")
    found = measure_kept(made)
    assert found.each_bytes > OUTPUT
    assert "with each call" in growth(found, made.workload)


def test_a_table_that_is_made_once_is_no_growth():
    tables = {}

    def tabled(query, key, value):
        tables.setdefault(0, torch.zeros(64, 64))
        return honest(query, key, value)

    found = measure_kept(case(tabled))
    assert (found.each_bytes, found.once_bytes) == (0, 64 * 64 * 4)


def test_answers_kept_by_their_inputs_grow_with_each_input():
    answers = {}

    def caching(query, key, value):
        return answers.setdefault(query.sum().item(), honest(query, key, value)).clone()

    assert measure_kept(case(caching)).each_bytes == OUTPUT
