"""Attention in plain PyTorch with tiles and an online softmax: memory grows with the length, not its square.

A row of scores is never stored whole. Each tile of keys updates the row's maximum, sum of exponentials and output; the
sum and the output are rescaled when the maximum grows. The backward pass recomputes the tiles of each row.

Shapes: B batch, T query length, S key length, H heads, K head width, V value width; t queries and s keys of one tile.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TILE = 256  # queries and keys: (H, t, s) scores of 8 heads in float32 are 2 MiB, about one core's cache


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """Attend: query (B, H, T, K), key (B, H, S, K), value (B, H, S, V), mask (B or 1, H or 1, T, S) -> (B, H, T, V)."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    attended, num_keys = [], key.shape[2]
    for first in range(0, query.shape[2], TILE):
        rows = query[:, :, first : first + TILE] * scale  # (B,H,T,K) -> (B,H,t,K)
        num_keys = key.shape[2]
        seen = (
            mask if mask is None or mask.shape[2] == 1 else mask[:, :, first : first + TILE]
        )  # (B,H,T,S) -> (B,H,t,S)
        if is_causal:
            num_keys = min(first + TILE, key.shape[2])  # no query of the tile sees a later key
            seen = torch.ones(rows.shape[2], num_keys, dtype=torch.bool, device=query.device).tril(first)  # (t,S)
        parts = (rows, key[:, :, :num_keys], value[:, :, :num_keys], seen, dropout)
        attended.append(checkpoint(attend_rows, *parts, use_reentrant=False))  # (B,H,t,V)
    return torch.cat(attended, dim=2)  # (B,H,t,V) -> (B,H,T,V)


def attend_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Attend from a tile of scaled queries (B, H, t, K) to key (B, H, S, K), value (B, H, S, V) -> (B, H, t, V)."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    maximum = torch.full_like(query[..., :1], torch.finfo(dtype).min, dtype=dtype)  # finite: -inf - -inf is NaN
    total, output = torch.zeros_like(maximum), torch.zeros_like(maximum)
    for first in range(0, key.shape[2], TILE):
        keys, values = key[:, :, first : first + TILE], value[:, :, first : first + TILE]  # (B,H,s,K), (B,H,s,V)
        scores = (query @ keys.transpose(-2, -1)).to(dtype)  # (B,H,t,K) @ (B,H,K,s) -> (B,H,t,s)
        if mask is not None:
            seen = mask[..., first : first + TILE]  # (B,H,t,S) -> (B,H,t,s)
            scores = scores.where(seen, -torch.inf) if seen.dtype == torch.bool else scores + seen
        previous, maximum = maximum, maximum.maximum(scores.detach().amax(dim=-1, keepdim=True))  # (B,H,t,1)
        rescale = (previous - maximum).exp()  # for sums under the previous maximum
        weights = scores.sub_(maximum).exp_()  # (B,H,t,s), in place of the scores
        total = total * rescale + weights.sum(dim=-1, keepdim=True)  # (B,H,t,1)
        weights = F.dropout(weights, dropout).to(value.dtype)  # after the sum, which covers all weights
        output = output * rescale + weights @ values  # (B,H,t,s) @ (B,H,s,V) -> (B,H,t,V)
    return (output / total).to(query.dtype)
