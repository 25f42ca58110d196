"""A cache in pages or in 8 bits is read as what it holds."""

import pytest
import torch

from attnbench.checking.case import Inputs, bind, held, stored
from attnbench.contract import Implementation, Workload
from attnbench.plugins import plugs
from tests import reference

IMPLEMENTATIONS: dict[str, Implementation] = plugs("attnbench.implementations", "IMPLEMENTATION")
SIZES = {"batch_size": 2, "seq_len": 7, "num_heads": 4, "num_kv_heads": 2, "head_dim": 3, "dtype": "float64"}
CACHES = [{"page_size": 2}, {"page_size": 3}, {"cache_dtype": "float8_e4m3fn"}]
POINTS = [Workload(**(SIZES | {"direction": "inference"} | cache)) for cache in CACHES]
CACHED = [
    pytest.param(name, point, id=f"{name}-{point.id}")
    for point in POINTS
    for name, each in IMPLEMENTATIONS.items()
    if not each.compiles and each.unsupported(point) is None
]


@pytest.mark.parametrize(("name", "point"), CACHED)
def test_a_cache_is_read_as_what_it_holds(name: str, point: Workload) -> None:
    drawn = reference.draw(point)
    inputs = Inputs(tensors={key: tensor.detach() for key, tensor in drawn.tensors.items()}, weights=drawn.weights)
    kept, mask = stored(inputs, point).tensors, bind(point)
    mask.inputs = {key: tensor for key, tensor in kept.items() if key not in drawn.tensors}
    module = IMPLEMENTATIONS[name].build(drawn.weights.map(torch.Tensor.detach)).eval()
    found = module.attend(*(kept[key] for key in drawn.tensors), mask)
    expected = reference.attention(**held(inputs, point).tensors, point=point, operands={})
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
