"""`scaled_dot_product_attention` that always gets its mask as a dense tensor, as in much existing code.

The difference from `sdpa` shows the gain of `is_causal=True`, and the cost of a mask that hides nothing.

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention: query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V).

    `mask` is broadcastable to (B, H, T, S): boolean, True where visible, or additive. `scale` is K**-0.5 by default.
    """
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=everywhere(query.shape[2], key.shape[2], query.device) if mask is None else mask,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=enable_gqa,
    )


@lru_cache
def everywhere(query_len: int, key_len: int, device: torch.device) -> Tensor:
    """Return a mask (T, S) that hides nothing."""
    return torch.ones(query_len, key_len, dtype=torch.bool, device=device)
