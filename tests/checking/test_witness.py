"""Witness samples: answers from an earlier call are detected, and honest code passes."""

import pytest
import torch

from attnbench.case import QKV, build, draw_normal, place
from attnbench.checking import agreement
from attnbench.contract.loading import implementation
from attnbench.workloads.workload import Workload
from tests.pairwise import pairwise

SHAPE = {"seq_len": 40, "num_heads": 2, "head_dim": 16}
NUM_CALLS = 7


def judged(workload, spec, number, *, change=lambda case: None, is_thorough=True):
    """Return the judge's verdict on the call with this number."""
    drawn = draw_normal(workload, 0)
    placed = place(drawn, workload)
    case = build(workload, implementation(spec), placed)
    change(case)
    with case.grad_mode():
        case.call()()  # on the timed inputs
        outputs = [named(call()) for call, named in agreement.ready(case, placed, NUM_CALLS, 5)]
    assert len(outputs) == NUM_CALLS
    found = {name: tensor for name, tensor in outputs[number].items() if tensor is not None}
    assert ("output" in found) == (workload.direction != "backward")
    return agreement.judge(workload, drawn, found, number, 5, judge_seed=11, is_thorough=is_thorough)


@pytest.mark.one_in(2)
@pairwise(
    spec=["sdpa", "naive_loop"],
    scope=["attention", "module"],
    direction=["inference", "forward", "forward_backward", "backward"],
    dtype=["float32", "bfloat16"],
    mask=["none", "causal", "padding"],
)
def test_an_honest_call_is_right_whichever_is_handed_in(spec, scope, direction, dtype, mask):
    workload = Workload(**SHAPE, scope=scope, direction=direction, dtype=dtype, mask=mask)
    for kept in (0, 3, NUM_CALLS - 1):
        assert judged(workload, spec, kept, is_thorough=kept > 0) == ""


@pytest.mark.parametrize(
    ("scope", "direction", "missing"),
    [
        ("attention", "inference", "output"),
        ("attention", "backward", "gradient of query"),
        ("module", "forward_backward", "gradient of x"),
    ],
)
def test_a_result_that_is_not_handed_in_is_wrong(scope, direction, missing):
    workload = Workload(**SHAPE, scope=scope, direction=direction)
    drawn = draw_normal(workload, 0)
    found = {"output": torch.zeros(1)} if missing != "output" else {}
    said = agreement.judge(workload, drawn, found, 0, 5, judge_seed=11, is_thorough=False)
    assert said == f"while it was timed: it returned no {missing}"


def attending(change):
    """Let a case call `change(honest, query, key, value, mask)` in place of its honest attention."""

    def install(case):
        honest = case.module.attend
        case.module.attend = lambda *given: change(honest, *given)
        case.module.bind = None  # which calls the function itself

    return install


@pytest.mark.parametrize("direction", ["inference", "forward", "forward_backward"])
@pytest.mark.parametrize("scope", ["attention", "module"])
@pytest.mark.parametrize("age", [1, 3, 99])
def test_an_answer_that_is_kept_from_an_earlier_call_is_wrong(age, scope, direction):
    outputs = []

    def keep(honest, *given):
        outputs.append(honest(*given))
        return outputs[max(0, len(outputs) - 1 - age)].detach() + 0 * outputs[-1]

    workload = Workload(**SHAPE, scope=scope, direction=direction, dtype="bfloat16" if age == 1 else "float32")
    said = judged(workload, "sdpa", 4, change=attending(keep))
    assert "while it was timed: it returned its answer to an earlier call: output is wrong on fresh inputs" in said


def test_an_answer_that_is_wrong_for_every_call_is_not_said_to_be_kept():
    spoil = attending(lambda honest, *given: 0.9 * honest(*given))
    assert "earlier call" not in judged(Workload(**SHAPE, scope="attention"), "sdpa", 4, change=spoil)


@pytest.mark.parametrize("direction", ["backward", "forward_backward"])
@pytest.mark.parametrize(("name", "is_thorough"), [("query", False), ("query", True), ("key", True), ("value", True)])
def test_a_wrong_gradient_is_seen(direction, name, is_thorough):
    place = QKV.index(name)

    def spoil(honest, *given):
        copy = given[place].view_as(given[place])
        copy.register_hook(lambda grad: 0.9 * grad)
        return honest(*given[:place], copy, *given[place + 1 :])

    workload = Workload(**SHAPE, scope="attention", direction=direction)
    said = judged(workload, "sdpa", 1, change=attending(spoil), is_thorough=is_thorough)
    assert f"gradient of {name} is wrong" in said


def test_one_row_that_is_wrong_among_thousands_is_seen():
    row = torch.ones(2048, 1).index_fill(0, torch.tensor([1234]), 0.0)
    spoil = attending(lambda honest, *given: honest(*given) * row)
    workload = Workload(seq_len=2048, num_heads=2, head_dim=16, scope="attention")
    assert ", 1234," in judged(workload, "sdpa", 2, change=spoil)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded", "broadcast"])
def test_each_call_has_inputs_of_its_own_in_the_same_layout(layout):
    workload = Workload(**SHAPE, batch_size=2, num_kv_heads=1, scope="attention", layout=layout)
    placed = place(draw_normal(workload, 0), workload)
    made = [agreement.turned(placed, workload, seed, number) for seed, number in ((1, 0), (1, 1), (2, 0), (1, 0))]
    for name, tensor in placed.tensors.items():
        first, second, other, again = (each.tensors[name] for each in made)
        assert torch.equal(first, again)
        assert not any(torch.equal(first, each) for each in (second, other, tensor))
        assert first.stride() == tensor.stride()
        assert torch.equal(first.abs(), tensor.abs())
