"""A case's tensors have the layout of the axis `layout` for check and timer, and the oracle's numbers."""

from dataclasses import replace

import pytest
import torch

from attnbench import case
from attnbench.case import copied, draw_normal, fill, place
from attnbench.checking import agreement
from attnbench.checking.reference import call_candidate, reference_for_probe
from attnbench.contract import Attention, Implementation, repeat_heads
from attnbench.contract.functions import from_function
from attnbench.contract.loading import named
from attnbench.processes.worker.answers import PreparedWorkload
from attnbench.storage.records import Arm
from attnbench.workloads.workload import LAYOUTS, Workload

POINT = Workload(batch_size=2, seq_len=6, num_heads=4, num_kv_heads=2, head_dim=8, dtype="float64")
STRIDES = {  # of a key (2, 2, 6, 8)
    "contiguous": (96, 48, 8, 1),
    "transposed": (96, 8, 16, 1),
    "mixed": (96, 48, 8, 1),
    "expanded": (48, 0, 8, 1),
    "broadcast": (0, 48, 8, 1),
    "value_in_key": (96, 48, 8, 1),
}


class Watching(Attention):
    """Right, and records the memory layout of its inputs."""

    seen: list[dict[str, tuple[int, ...]]]

    def attend(self, query, key, value, mask):
        self.seen.append({"query": query.stride(), "key": key.stride(), "value": value.stride()})
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        return (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1) @ value


def laid(layout, **axes):
    return Workload(**(POINT.axes() | {"layout": layout} | axes))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", ["inference", "forward_backward"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_check_and_timer_call_with_tensors_that_lie_as_asked(layout, direction, dtype):
    Watching.seen = []
    watching = Implementation(build=Watching, source="a test")
    point = laid(layout, direction=direction, dtype=dtype)
    reference = reference_for_probe(point, "needles", 0)
    found = call_candidate(watching, reference).compared
    assert all(reference.tolerances[name].judge(tensor).agrees for name, tensor in found.items())
    assert set(found) == set(reference.expected)
    bench = PreparedWorkload(point)
    arm = Arm(implementation="it")
    bench.timed(arm, watching).call()
    assert bench.verify(arm) == ""
    assert len(Watching.seen) >= 3
    query = (192, 8, 32, 1) if layout in {"transposed", "mixed"} else (192, 48, 8, 1)
    value = (16, 8, 32, 1) if layout == "mixed" else STRIDES[layout]
    for seen in Watching.seen:
        assert (seen["query"], seen["key"], seen["value"]) == (query, STRIDES[layout], value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_lies_as_its_original_and_shares_nothing_with_it(layout):
    original = place(draw_normal(laid(layout), 0), laid(layout))
    copy = copied(original, laid(layout))
    for name, tensor in copy.tensors.items():
        before = original.tensors[name].clone()
        assert tensor.stride() == original.tensors[name].stride()
        fill(tensor, -before)
        assert torch.equal(tensor, -before)
        assert torch.equal(original.tensors[name], before)


def test_a_large_tensor_is_drawn_alike_on_any_number_of_processors(monkeypatch):
    monkeypatch.setattr(case, "PART", 1000)
    first = case.normal_values(case.generator(1), 3, 1100)
    monkeypatch.setattr(case.containers, "processors", lambda: 1)
    assert torch.equal(first, case.normal_values(case.generator(1), 3, 1100))
    parts = first.flatten()[:3000].view(3, 1000)
    assert (torch.corrcoef(parts) - torch.eye(3)).abs().max() < 0.2  # six standard errors
    assert abs(float(first.std()) - 1) < 0.1


@pytest.mark.parametrize("direction", ["inference", "backward", "forward_backward"])
def test_a_refereed_call_repeats_no_heads_that_the_timed_one_gets_repeated(monkeypatch, direction):
    """Else the referee's time would include work of the harness."""
    made = from_function(lambda query, key, value: (query @ key.mT).softmax(-1) @ value, "a test")
    workload = Workload(**POINT.axes() | {"direction": direction})
    inputs = place(draw_normal(workload, 0), workload)
    (call, named), right = agreement.ready(built := case.build(workload, made, inputs), inputs, 1, 2)[0], {}
    if direction != "inference":
        given = {name: each.requires_grad_() for name, each in agreement.turned(inputs, workload, 2, 0).tensors.items()}
        output = replace(built, tensors=given).output()
        output.backward(torch.full_like(output, case.grad_value(workload)))
        right = {f"gradient of {name}": each.grad for name, each in given.items()}
    with monkeypatch.context() as patch:
        patch.setattr("attnbench.contract.functions.repeat_heads", None)
        result = call()
    found = named(result)
    assert ("output" in found) is (direction != "backward")
    assert all(torch.allclose(found[name], each) for name, each in right.items())


@pytest.mark.parametrize(("direction", "moves"), [("inference", True), ("forward_backward", True), ("backward", False)])
def test_other_values_in_timed_tensors_move_their_versions_unless_a_graph_needs_them(direction, moves):
    """A cache by identity and version is honest, and met old versions with new contents."""
    workload = Workload(seq_len=6, num_heads=2, head_dim=8, direction=direction)
    inputs = place(draw_normal(workload, 0), workload)
    timed = case.build(workload, from_function(torch.nn.functional.scaled_dot_product_attention, "a test"), inputs)
    call, key = timed.call(), timed.tensors["key"]
    before = key._version
    with timed.holding({"key": -key.detach()}):
        within = key._version
    after = key._version
    assert (before < within < after) is moves
    assert (before == within == after) is not moves
    with timed.grad_mode():
        call()


def test_a_convention_for_empty_rows_holds_while_code_is_timed():
    textbook = lambda q, k, v, mask: (q @ k.mT / 8**0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v  # noqa: E731
    bench, arm = (
        PreparedWorkload(Workload(batch_size=2, seq_len=8, num_heads=2, head_dim=8, mask="padding_to_nothing")),
        Arm(),
    )
    bench.timed(arm, from_function(textbook, "a test"))
    assert bench.verify(arm) == ""


def test_a_float8_cache_where_torch_has_none_is_refused_with_the_way_out(monkeypatch):
    point = Workload(batch="2q1kv32", page_size=16, cache_dtype="float8_e5m2")
    assert case.reason_against(named("paged_gather"), point) is None
    monkeypatch.delattr(torch, "float8_e5m2")
    reason = case.reason_against(named("paged_gather"), point)
    assert reason == "this version of torch has no float8_e5m2: leave out cache_dtype"
