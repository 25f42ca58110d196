"""`chunked` drops the same weights forward and backward."""

import torch

from attnbench.implementations.chunked import TILE, attention

LENGTH = TILE + 44
SHARE = 0.3


def kept_weights(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Recover the weights (B, H, T, S) after dropout from the output for unit vectors as values."""
    torch.manual_seed(3)
    units = torch.eye(key.shape[2], dtype=key.dtype).expand(*key.shape[:2], -1, -1)
    return attention(query, key, units, dropout=SHARE)


def test_the_backward_pass_drops_what_the_forward_pass_dropped():
    draws = torch.Generator().manual_seed(5)
    query, key, value = torch.randn(3, 2, 3, LENGTH, 4, generator=draws, dtype=torch.float64).requires_grad_().unbind()
    dropped = kept_weights(query.detach(), key.detach()) == 0
    torch.manual_seed(3)
    found = attention(query, key, value, dropout=SHARE)
    expected = (query @ key.mT / 2).softmax(-1).masked_fill(dropped, 0.0) / (1 - SHARE) @ value
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    weight = torch.randn(found.shape, generator=draws, dtype=torch.float64)
    of_tiles = torch.autograd.grad((found * weight).sum(), (query, key, value))
    for one, other in zip(of_tiles, torch.autograd.grad((expected * weight).sum(), (query, key, value)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
