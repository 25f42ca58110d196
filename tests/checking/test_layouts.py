"""Weights without inputs can be placed for every layout: a worker does so as it prepares a cell."""

import pytest

from attnbench.checking.case import Inputs, draw_weights, place
from attnbench.workloads.workload import LAYOUTS, Workload


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_alone_are_placed(layout: str) -> None:
    sizes = {"num_kv_heads": 1, "value_dim": 16} if layout == "value_in_key" else {}
    workload = Workload(layout=layout, num_heads=2, head_dim=16, **sizes)  # type: ignore[arg-type]
    placed = place(Inputs(tensors={}, weights=draw_weights(workload)), workload)
    assert placed.tensors == {}
    assert placed.weights.query.shape[0] == 2
