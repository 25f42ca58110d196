"""Weights without inputs can be placed for every layout: a worker does so as it prepares a cell."""

import math

import pytest
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attnbench.checking.agreement import ask_oracle, check
from attnbench.checking.case import Inputs, draw_weights, place
from attnbench.contract import BoundMask, Implementation
from attnbench.workloads.workload import LAYOUTS, Workload


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_alone_are_placed(layout: str) -> None:
    sizes = {"num_kv_heads": 1, "value_dim": 16} if layout == "value_in_key" else {}
    workload = Workload(layout=layout, num_heads=2, head_dim=16, **sizes)  # type: ignore[arg-type]
    placed = place(Inputs(tensors={}, weights=draw_weights(workload)), workload)
    assert placed.tensors == {}
    assert placed.weights.query.shape[0] == 2


class InKeys(nn.Module):
    """Reads the values from the keys, as kernels for latents do, or from where they are given; some lose large ones."""

    def __init__(self, *, reads_keys: bool = False, most: float = math.inf) -> None:
        super().__init__()
        self.reads_keys, self.most = reads_keys, most

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        values = key[..., : value.shape[-1]] if self.reads_keys else value
        return scaled_dot_product_attention(query, key, values.clamp(-self.most, self.most), attn_mask=mask.visible)


@pytest.mark.parametrize("value_dim", [4, 2])
@pytest.mark.parametrize("direction", ["inference", "forward_backward"])
def test_values_in_keys_are_judged_as_such(value_dim: int, direction: str) -> None:
    sizes = {"seq_len": 9, "num_heads": 2, "head_dim": 4, "value_dim": value_dim, "mask": "causal"}
    references = ask_oracle(Workload(layout="value_in_key", direction=direction, **sizes), 0)  # type: ignore[arg-type]
    whole = check(references, Implementation(build=lambda _: InKeys(), source="a test"))
    assert whole.agrees, whole.diagnosis
    clamped = check(references, Implementation(build=lambda _: InKeys(most=1e5), source="a test"))
    assert not clamped.agrees
    if direction == "inference":  # it has one gradient instead of two
        reading = check(references, Implementation(build=lambda _: InKeys(reads_keys=True), source="a test"))
        assert reading.agrees, reading.diagnosis
