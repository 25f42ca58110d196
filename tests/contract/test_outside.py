"""The harness's work outside a function's call: right by a plain loop, repeated for new inputs, timed apart."""

import math

import pytest
import torch

from attnbench.case import build, draw_normal, place
from attnbench.contract import Implementation
from attnbench.contract.adapters import adapt
from attnbench.contract.loading import from_value
from attnbench.contract.outside import Bound, Prepared, add_sink, repeat_heads, show_rows
from attnbench.metrics.call import METRIC
from attnbench.workloads.workload import Workload

OUTSIDE_TIME = METRIC["outside_time"]


@pytest.mark.parametrize("hidden", [False, -math.inf])
def test_queries_that_see_no_key_see_all_of_them(hidden):
    mask = torch.full((1, 1, 3, 4), hidden, dtype=torch.bool if hidden is False else torch.float32)
    mask[:, :, 1:] = 1
    shown = show_rows(mask, torch.tensor([True, False, False])[:, None])
    assert shown[0, 0, 0].tolist() == [0.0 if hidden else 1.0] * 4
    assert shown[:, :, 1:].equal(mask[:, :, 1:])


@pytest.mark.parametrize("kind", ["none", "boolean", "numbers"])
def test_a_sink_takes_its_share_as_one_more_key_would(kind):
    query, key, sinks = torch.randn(1, 2, 3, 4).double(), torch.randn(1, 2, 5, 4).double(), torch.randn(2).double()
    visible = torch.ones(3, 5).tril(1).bool()
    mask = {"none": None, "boolean": visible, "numbers": torch.zeros(3, 5).double().masked_fill(~visible, -math.inf)}
    scores = query @ key.transpose(-2, -1)
    taken = (torch.nn.functional.pad(scores, (0, 1)) + add_sink(mask[kind], sinks, query, 5)).softmax(dim=-1)
    for head in range(2):
        for row in range(3):
            seen = range(5) if kind == "none" else range(min(row + 2, 5))
            exps = [math.exp(scores[0, head, row, column]) for column in seen]
            whole = sum(exps) + math.exp(sinks[head])
            assert taken[0, head, row, 0].item() == pytest.approx(exps[0] / whole)
            assert taken[0, head, row, 5].item() == pytest.approx(math.exp(sinks[head]) / whole)


def test_what_was_prepared_follows_the_inputs_in_the_same_memory():
    key = torch.randn(1, 1, 3, 2)
    bound = Bound(torch.sum, lambda: Prepared(tensors=(repeat_heads(key, 2),), passed={}), [key])
    before = bound.call()
    key.mul_(2)
    bound.refresh()
    assert bound.call() == 2 * before
    assert not bound.is_plain


def case(function, **axes):
    workload = Workload(seq_len=16, num_heads=4, head_dim=8, scope="attention", direction="inference", **axes)
    made = function if isinstance(function, Implementation) else from_value(function, "mine")
    return build(workload, made, place(draw_normal(workload, 0), workload))


def mine(query, key, value, *, mask=None):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


@pytest.mark.parametrize(("order", "layout"), [("bthk", "mixed"), ("bhtk", "transposed"), ("bhtk", "mixed")])
def test_functions_get_values_that_are_as_strided_as_the_case(order, layout):
    shown = []
    function = adapt(lambda query, key, value: shown.append(value) or query, layout=order)
    for each in ("contiguous", layout):
        case(function, layout=each, batch_size=2, num_kv_heads=4 if order == "bthk" else 2).output()
    assert [value.is_contiguous() for value in shown] == [True, False]


def test_its_time_is_a_metric_and_nothing_where_nothing_is_done():
    grouped = case(mine, num_kv_heads=2)
    assert OUTSIDE_TIME.measure(grouped) > 0
    plain = case(mine)
    assert OUTSIDE_TIME.measure(plain) == 0
