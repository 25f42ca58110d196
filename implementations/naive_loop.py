"""Attention token by token, as in a tutorial: one query token of one head and one batch row at a time.

Shapes: B batch, T query length, S key length, H heads, K head width, V value width.

Peak memory beyond the inputs: the output of each token, and all of them stacked, 2 B H T V numbers.
"""

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
) -> Tensor:
    """Compute attention: query (B, H, T, K), key (B, H, S, K), value (B, H, S, V) -> (B, H, T, V).

    `mask` is broadcastable to (B, H, T, S): boolean, True where visible, or additive. `scale` is K**-0.5 by default.
    """
    batch_size, num_heads, query_len, head_dim = query.shape
    scale = head_dim**-0.5 if scale is None else scale
    if mask is not None:
        mask = mask.expand(batch_size, num_heads, query_len, key.shape[2])  # any -> (B,H,T,S)
    attended = []
    for b in range(batch_size):
        for h in range(num_heads):
            keys, values = key[b, h], value[b, h]  # (S,K), (S,V)
            for t, token in enumerate(query[b, h]):  # T times (K,)
                visible = None if mask is None else mask[b, h, t]  # (S,)
                attended.append(attend_token(token, keys, values, visible, scale, dropout))  # (V,)
    return torch.stack(attended).view(batch_size, num_heads, query_len, -1)  # (B*H*T,V) -> (B,H,T,V)


def attend_token(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Compute attention of one token: query (K,), keys (S, K), values (S, V), mask (S,) or None -> (V,)."""
    scores = keys @ query * scale  # (S,K) @ (K,) -> (S,)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.where(mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=0)  # over the keys
    weights = F.dropout(weights, dropout)
    return weights @ values  # (S,) @ (S,V) -> (V,)
