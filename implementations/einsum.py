"""Attention as Einstein sums: every line names its axes, so no view or transpose is needed.

Letters and sizes: b (B) batch, t (T) query length, s (S) key length, h (H) heads, k (K) head width, v (V) value width.

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
    softcap: float | None = None,
) -> Tensor:
    """Compute attention: query (B, H, T, K), key (B, H, S, K), value (B, H, S, V) -> (B, H, T, V).

    `mask` is broadcastable to (B, H, T, S): boolean, True where visible, or additive. `scale` is K**-0.5 by default.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bhtk,bhsk->bhts", query, key) * scale
    if softcap is not None:  # as in Gemma 2: scores stay within -softcap..softcap
        scores = softcap * (scores / softcap).tanh()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.where(mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1)  # over the keys
    weights = F.dropout(weights, dropout)
    return torch.einsum("bhts,bhsv->bhtv", weights, value)
