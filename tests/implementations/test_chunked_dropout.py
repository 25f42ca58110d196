"""What `chunked` drops: the same weights forward and backward, each tile others, all of them as often as asked."""

import math

import torch

from attnbench.contract import BoundMask
from attnbench.implementations.chunked import TILE, Drop, TiledAttention, tiles
from attnbench.workloads.masks import parse_mask

LENGTH = TILE + 44
SHARE = 0.3


def factors(drop: Drop) -> torch.Tensor:
    """What every weight (B, H, T, S) is multiplied by, put together from tiles."""
    whole = torch.empty(2, 3, LENGTH, LENGTH, dtype=torch.float64)
    for rows in tiles(LENGTH):
        for keys in tiles(LENGTH):
            whole[..., rows, keys] = drop.factor(whole[..., rows, keys], rows, keys)
    return whole


def test_output_and_gradients_are_those_of_the_whole_matrix_with_the_same_weights_dropped():
    draws = torch.Generator().manual_seed(5)
    given = [torch.randn(2, 3, LENGTH, 4, generator=draws, dtype=torch.float64) for _ in range(3)]
    weight = torch.randn(2, 3, LENGTH, 4, generator=draws, dtype=torch.float64)
    drop = Drop(share=SHARE, seed=11)
    mask = BoundMask(parse_mask("causal"), (2, LENGTH, LENGTH), "cpu", num_heads=3)

    def gradients(attend):
        query, key, value = leaves = [tensor.clone().requires_grad_() for tensor in given]
        output = attend(query, key, value)
        return [output, *torch.autograd.grad((output * weight).sum(), leaves)]

    def whole(query, key, value):
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        weights = (query @ key.transpose(-2, -1)).masked_fill(hidden, -math.inf).softmax(-1)
        return (weights * factors(drop)) @ value

    by_tiles = gradients(lambda *tensors: TiledAttention.apply(*tensors, None, mask, drop))
    for found, expected in zip(by_tiles, gradients(whole), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_as_many_are_dropped_as_asked_for_and_no_tile_is_like_another():
    found = factors(Drop(share=SHARE, seed=7))
    assert set(found.unique().tolist()) == {0.0, 1 / (1 - SHARE)}
    assert abs(float((found == 0).double().mean()) - SHARE) < 5 * math.sqrt(SHARE * (1 - SHARE) / found.numel())
    corner = slice(0, LENGTH - TILE)
    last = slice(TILE, LENGTH)
    parts = [found[..., rows, keys] for rows in (corner, last) for keys in (corner, last)]
    heads = [part[sentence, head] for part in parts for sentence in range(2) for head in range(3)]
    for place, one in enumerate(heads):
        for other in heads[place + 1 :]:
            assert 0.5 < float((one == other).double().mean()) < 0.66  # 0.58 where they are drawn apart
