"""What `chunked` says it executes, against the products that really run in its backward pass."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnbench.contract import BoundMask, Workload
from attnbench.implementations.chunked import IMPLEMENTATION, TiledAttention


def backward_flops(workload: Workload) -> int:
    shape = (workload.batch_size, workload.num_heads, workload.seq_len, workload.head_dim)
    tensors = [torch.randn(shape).requires_grad_() for _ in range(3)]
    sizes = (workload.batch_size, workload.seq_len, workload.seq_len)
    mask = BoundMask(workload.mask_rule, sizes, "cpu", num_heads=workload.num_heads)
    output = TiledAttention.apply(*tensors, None, mask, None)
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("mask", "products"), [("none", 5), ("causal", 5), ("alibi", 5), ("softcap(20)", 6)])
def test_scores_are_made_a_third_time_only_where_a_change_of_them_bends(mask, products):
    workload = Workload(seq_len=512, num_heads=2, head_dim=8, mask=mask, direction="backward")
    found = backward_flops(workload)
    assert found == IMPLEMENTATION.executed_flops(workload)
    pairs = 512 * 512 * (3 / 4 if mask == "causal" else 1)
    assert found == products * 2 * 2 * pairs * 8
