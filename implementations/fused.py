"""Textbook attention: one projection for queries, keys and values, heads by view and transpose, batched products.

The layout follows https://github.com/karpathy/nanoGPT/blob/master/model.py

Shapes: B batch, T query length, S key length, H heads, K head width, V value width, D embedding width.

Scores and weights are both (B, H, T, S). Peak memory beyond the inputs: scores, weights and output, 2 B H T S + B H T V
numbers. The B H T S weights are kept for a backward pass.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnbench.contract.adapters import Sizes, packed


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend: query (B, H, T, K), key (B, H, S, K), value (B, H, S, V), mask (B or 1, H or 1, T, S) -> (B, H, T, V)."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale  # (B,H,T,K) @ (B,H,K,S) -> (B,H,T,S)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.where(mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1)  # over the keys
    weights = F.dropout(weights, dropout)
    return weights @ value  # (B,H,T,S) @ (B,H,S,V) -> (B,H,T,V)


class Fused(nn.Module):
    """Self-attention with one linear layer for the queries, keys and values of all heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.num_heads = sizes.num_heads
        self.dropout = 0.0
        width = sizes.num_heads * sizes.head_dim
        self.qkv = nn.Linear(sizes.embed_dim, 3 * width, bias=sizes.qkv_bias)
        self.out = nn.Linear(width, sizes.embed_dim, bias=sizes.out_bias)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
        """Attend from tokens x (B, T, D) to themselves -> (B, T, D); `mask` is broadcastable to (B, H, T, T)."""
        query, key, value = self.qkv(x).chunk(3, dim=-1)  # (B,T,D) -> 3 times (B,T,H*K)
        query = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B,T,H*K) -> (B,T,H,K) -> (B,H,T,K)
        key = key.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B,T,H*K) -> (B,T,H,K) -> (B,H,T,K)
        value = value.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B,T,H*K) -> (B,T,H,K) -> (B,H,T,K)
        attended = attention(query, key, value, mask, scale, self.dropout)  # (B,H,T,K)
        return self.out(attended.transpose(1, 2).flatten(2))  # (B,H,T,K) -> (B,T,H,K) -> (B,T,H*K) -> (B,T,D)


MODULE, LAYOUT = Fused, packed("qkv", out="out")  # all query rows, then all key rows, then all value rows
