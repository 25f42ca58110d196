"""`chunked` drops the same weights forward and backward, others in each tile, and as many as it is asked to."""

import torch

from attnbench.implementations.chunked import TILE, attention

LENGTH = TILE + 44
SHARE = 0.3


def kept_weights(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The weights (B, H, T, S) after dropout, as the output for values that are unit vectors shows them."""
    torch.manual_seed(3)
    units = torch.eye(key.shape[2], dtype=key.dtype).expand(*key.shape[:2], -1, -1)
    return attention(query, key, units, dropout=SHARE)


def test_the_backward_pass_drops_what_the_forward_pass_dropped():
    draws = torch.Generator().manual_seed(5)
    query, key, value = (
        torch.randn(2, 3, LENGTH, 4, generator=draws, dtype=torch.float64).requires_grad_() for _ in range(3)
    )
    dropped = kept_weights(query.detach(), key.detach()) == 0
    torch.manual_seed(3)
    found = attention(query, key, value, dropout=SHARE)
    weights = (query @ key.mT / 2).softmax(-1)
    expected = weights.masked_fill(dropped, 0.0) / (1 - SHARE) @ value
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    weight = torch.randn(found.shape, generator=draws, dtype=torch.float64)
    of_tiles = torch.autograd.grad((found * weight).sum(), (query, key, value))
    for one, other in zip(of_tiles, torch.autograd.grad((expected * weight).sum(), (query, key, value)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_as_many_are_dropped_as_asked_for_and_no_tile_is_like_another():
    query = torch.zeros(1, 2, LENGTH, 4, dtype=torch.float64)
    dropped = kept_weights(query, query) == 0
    assert abs(float(dropped.double().mean()) - SHARE) < 0.01
    corner, last = slice(0, LENGTH - TILE), slice(TILE, LENGTH)
    parts = [dropped[0, head, rows, keys] for head in (0, 1) for rows in (corner, last) for keys in (corner, last)]
    for place, one in enumerate(parts):
        for other in parts[place + 1 :]:
            assert 0.5 < float((one == other).double().mean()) < 0.66  # 0.58 where they are drawn apart
