"""Attention as batched matrix products: heads are folded into the batch, so tensors of three axes are enough.

Shapes: B batch, T query length, S key length, H heads, K head width, V value width.

Peak memory beyond the inputs: scores, weights and output, 2 B H T S + B H T V numbers.
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
    query = query.flatten(0, 1)  # (B,H,T,K) -> (B*H,T,K)
    key = key.flatten(0, 1)  # (B,H,S,K) -> (B*H,S,K)
    value = value.flatten(0, 1)  # (B,H,S,V) -> (B*H,S,V)
    scores = torch.bmm(query, key.transpose(1, 2)) * scale  # (B*H,T,K) @ (B*H,K,S) -> (B*H,T,S)
    if mask is not None:
        scores = scores.view(batch_size, num_heads, query_len, -1)  # (B*H,T,S) -> (B,H,T,S), to fit masks
        scores = scores.where(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        scores = scores.flatten(0, 1)  # (B,H,T,S) -> (B*H,T,S)
    weights = scores.softmax(dim=-1)  # over the keys
    weights = F.dropout(weights, dropout)
    attended = torch.bmm(weights, value)  # (B*H,T,S) @ (B*H,S,V) -> (B*H,T,V)
    return attended.view(batch_size, num_heads, query_len, -1)  # (B*H,T,V) -> (B,H,T,V)
