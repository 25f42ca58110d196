"""Layouts: every canonical number is in the state dict once, and gradients find their way back."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.checking.case import draw_weights
from attnbench.contract.adapters import packed, sizes_of, split, stacked, transposed
from attnbench.workloads.workload import BIASES, Workload

ORDERS = ["".join(order) for order in permutations("qkv")]
HEADS = split("heads.{head}.a", "heads.{head}.b", "heads.{head}.c", out=None)
LAYOUTS = st.sampled_from(
    [
        split("q", "k", "v", out="o"),
        HEADS,
        stacked({"to_kv": "vk", "to_q": "q"}, out="out"),
        *(packed("in_proj_{}", order, out="out") for order in ORDERS),
        *(transposed(packed("qkv", order, out="out", per_head=True)) for order in ORDERS),
    ]
)


@settings(deadline=None)
@given(LAYOUTS, st.tuples(*[st.integers(1, 3)] * 3), st.integers(1, 5), st.sampled_from(BIASES))
def test_a_layout_moves_every_number_once(layout, heads, width, bias):
    groups, repeats, head_dim = heads
    num_heads = groups if layout is HEADS else groups * repeats
    sizes = {"num_heads": num_heads, "num_kv_heads": groups, "head_dim": head_dim, "embed_dim": width}
    point = Workload(scope="module", bias=bias, **sizes)
    weights = draw_weights(point).map(lambda tensor: tensor.requires_grad_())
    state = layout.pack(weights)
    kept = replace(weights, out=None, out_bias=None) if layout is HEADS else weights
    given_numbers = torch.cat([tensor.flatten() for tensor in kept.tensors().values()])
    packed_numbers = torch.cat([tensor.flatten() for tensor in state.values()])
    assert torch.equal(given_numbers.sort().values, packed_numbers.sort().values)
    torch.autograd.backward([tensor.sum() for tensor in state.values()])
    assert all((tensor.grad == 1).all() for tensor in kept.tensors().values())


@given(st.sampled_from(BIASES), st.integers(1, 3), st.integers(1, 4))
def test_sizes_are_those_of_the_weights(bias, groups, head_dim):
    point = Workload(num_heads=6, num_kv_heads=groups, head_dim=head_dim, value_dim=5, scope="module", bias=bias)
    weights = draw_weights(point)
    found = sizes_of(weights)
    asked = (point.embed_dim, 6, groups, head_dim, 5)
    assert (found.embed_dim, found.num_heads, found.num_kv_heads, found.head_dim, found.value_dim) == asked
    assert (found.qkv_bias, found.out_bias) == (bias in {"all", "qkv"}, bias in {"all", "out"})
    everything = draw_weights(Workload(**(point.axes() | {"bias": "all"})))
    assert all(torch.equal(tensor, everything.tensors()[name]) for name, tensor in weights.tensors().items())


@pytest.mark.parametrize("order", ["qkk", "qk", "qkvv", "abc", ""])
def test_an_order_names_each_of_three_once(order):
    with pytest.raises(ValueError, match="name q, k and v once each"):
        packed("qkv", order, out="proj")
