"""The yardsticks are right: in float64 they give the oracle's output and gradients, under every kind of mask."""

import pytest
import torch

from attnbench import case
from attnbench.case import draw_normal
from attnbench.checking import oracle
from attnbench.workloads.workload import Workload
from tests import reference

MASKS = ["causal", "padding_to_nothing", "boolean(40)", "additive", "causal+alibi", "softcap(1)"]
MASKS += ["softcap(1)+alibi_bottom_right", "alibi+softcap(2)", "padding+additive+softcap(1)+alibi"]


@pytest.mark.parametrize("form", [*oracle.YARDSTICKS, oracle.OF_MOVED[0]], ids=["textbook", "recomputed", "detached"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_yardstick_is_the_oracle_forward_and_backward(mask, form):
    point = Workload(batch_size=2, seq_len=5, kv_len=7, num_heads=6, num_kv_heads=3, head_dim=4, mask=mask)
    rows = torch.tensor([0, 2, 4])
    inputs = draw_normal(point, 0).map(lambda tensor: (2 * tensor).requires_grad_())
    expected, found = (oracle.answer(point, inputs, rows, each) for each in (oracle.attend, form))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    formula = reference.attention(*(inputs.tensors[name] for name in case.QKV), point, {})
    torch.testing.assert_close(expected, formula[:, :, rows], rtol=0, atol=1e-13)
    leaves = list(inputs.tensors.values())
    gradients = [torch.autograd.grad(made, leaves, torch.ones_like(made)) for made in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-13)


@pytest.mark.parametrize("mask", ["additive", "alibi", "causal+alibi", "softcap(1)+alibi", "alibi+softcap(2)"])
def test_the_score_bound_holds_and_follows_bias_and_softcap(mask):
    point = Workload(batch_size=2, seq_len=40, kv_len=30, num_heads=3, head_dim=4, mask=mask)
    inputs, rows = draw_normal(point, 0), torch.arange(40)
    query, key, _ = oracle.heads(point, inputs, rows)
    shown = oracle.row_mask(point, rows)
    largest = shown.changed(query @ key.transpose(-2, -1) / 2).where(shown.seen, -torch.inf).amax(dim=-1)
    bound = oracle.score_bound(point, inputs, rows)
    assert float(largest.abs().max()) <= bound
    without = oracle.score_bound(Workload(**(point.axes() | {"mask": "none"})), inputs, rows)
    assert (bound < without) == ("softcap" in mask)
    assert bound != without
