"""Laws of scale, sinks, learned biases and caches that need no oracle: each ties two calls of one implementation."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from attnbench.checking.case import draw_weights
from attnbench.contract import BoundMask, Implementation, Workload
from attnbench.plugins import plugs

IMPLEMENTATIONS: dict[str, Implementation] = plugs("attnbench.implementations", "IMPLEMENTATION")
SIZES = {"batch_size": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "float64"}
MASKS = ("none", "causal", "sliding_window(3)+softcap(20)")
SHAPE = {"seq_len": 6, "kv_len": 6}


def supporting(**axes: object) -> list[object]:
    """Every implementation that takes such a workload, under each mask that it takes, and needs no compiler."""
    return [
        pytest.param(name, point, id=f"{name}-{mask}")
        for (name, each), mask in product(IMPLEMENTATIONS.items(), MASKS)
        if not each.compiles and each.unsupported(point := Workload(**(SIZES | SHAPE | {"mask": mask} | axes))) is None
    ]


def drawn(point: Workload, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, heads, groups, width = point.batch_size, point.num_heads, point.num_kv_heads, point.head_dim
    shapes = ((heads, point.seq_len), (groups, point.kv_len), (groups, point.kv_len))
    query, key, value = (torch.randn(batch, *each, width, generator=generator, dtype=torch.float64) for each in shapes)
    return query, key, value


def attend(
    name: str,
    point: Workload,
    tensors: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float | None = None,
    **inputs: Tensor,
) -> Tensor:
    sizes = (point.batch_size, point.seq_len, point.kv_len)
    mask = BoundMask(point.mask_rule, sizes, "cpu", num_heads=point.num_heads, scale=scale)
    mask.inputs = inputs
    output: Tensor = IMPLEMENTATIONS[name].build(draw_weights(point)).eval().attend(*tensors, mask)
    return output


@pytest.mark.parametrize(("name", "point"), supporting(scale=0.7))
def test_a_scale_is_a_factor_of_the_queries(name: str, point: Workload) -> None:
    query, key, value = drawn(point)
    scaled = attend(name, point, (query, key, value), scale=0.7)
    stretched = attend(name, point, (query * 0.7 * math.sqrt(point.head_dim), key, value))
    torch.testing.assert_close(scaled, stretched, rtol=0, atol=1e-12)
    assert not torch.allclose(scaled, attend(name, point, (query, key, value)), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("name", "point"), supporting(sinks="learned"))
def test_a_sink_that_attracts_nothing_changes_nothing_and_one_that_attracts_all_leaves_nothing(
    name: str, point: Workload
) -> None:
    tensors, plain = drawn(point), Workload(**(point.axes() | {"sinks": "none"}))
    without = attend(name, plain, tensors)
    nothing = attend(name, point, tensors, sinks=torch.full((point.num_heads,), -math.inf, dtype=torch.float64))
    torch.testing.assert_close(nothing, without, rtol=0, atol=1e-12)
    everything = attend(name, point, tensors, sinks=torch.full((point.num_heads,), 1e3, dtype=torch.float64))
    assert everything.abs().max() < 1e-12


@pytest.mark.parametrize(("name", "point"), supporting(sinks="learned"))
def test_a_sink_takes_its_share_by_the_sum_of_the_others(name: str, point: Workload) -> None:
    tensors = drawn(point)
    ones = torch.ones_like(tensors[2])
    zero = torch.zeros(point.num_heads, dtype=torch.float64)
    share = attend(name, point, (*tensors[:2], ones), sinks=zero)  # 1 - 1 / (1 + sum), the sum of exp(score)
    total = share / (1 - share)
    more = attend(name, point, (*tensors[:2], ones), sinks=zero + math.log(3))
    torch.testing.assert_close(more, total / (total + 3), rtol=0, atol=1e-10)


SAME = [
    ("window(2,0)", "sliding_window(3)"),
    ("window(5,5)", "none"),
    ("chunks(6)", "none"),
    ("chunks(1)", "sliding_window(1)+causal"),
    ("streaming(3,6)", "causal"),
    ("ragged(6,6)", "causal_bottom_right"),
    ("tree_of(0,1,1,1,1,1)", "causal_bottom_right"),
    ("decomposed", "none"),
    ("relative_buckets", "none"),
    ("relative_buckets_past+causal", "causal"),
]


PAIRS = [
    pytest.param(name, *points, id=f"{name}-{points[0].mask}")
    for name in ("fused", "naive_loop", "chunked", "sdpa")
    for points in ([Workload(**SIZES, **SHAPE, mask=mask) for mask in pair] for pair in SAME)
    if all(IMPLEMENTATIONS[name].unsupported(point) is None for point in points)
]


@pytest.mark.parametrize(("name", "one", "other"), PAIRS)
def test_masks_that_mean_the_same_give_the_same(name: str, one: Workload, other: Workload) -> None:
    tensors = drawn(one)
    zeros = {each: torch.zeros(shape, dtype=torch.float64) for each, shape in one.operands.items()}
    first, second = attend(name, one, tensors, **zeros), attend(name, other, tensors)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)
