"""A list of heads with their own projections, which attend one after the other; their outputs are concatenated.

Shapes: B batch, T query length, S key length, H heads, K head width, V value width, D embedding width.

Peak memory beyond the inputs: scores and weights of one head, and all outputs: 2 B T S + B H T V numbers.
"""

import torch
from torch import Tensor, nn

from attnbench.contract.adapters import Sizes, split


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend: query (B, H, T, K), key (B, H, S, K), value (B, H, S, V), mask (B or 1, H or 1, T, S) -> (B, H, T, V)."""
    masks = [None if mask is None else mask[:, h % mask.shape[1]] for h in range(query.shape[1])]  # H times (B,T,S)
    heads = zip(query.unbind(1), key.unbind(1), value.unbind(1), masks, strict=True)  # H times (B,T,K) (B,S,K) (B,S,V)
    return torch.stack([attend_head(*head, scale, dropout) for head in heads], dim=1)  # H times (B,T,V) -> (B,H,T,V)


def attend_head(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, dropout: float
) -> Tensor:
    """Compute one head: query (B, T, K), key (B, S, K), value (B, S, V), mask (B or 1, T or 1, S) -> (B, T, V)."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale  # (B,T,K) @ (B,K,S) -> (B,T,S)
    if mask is not None:
        scores = scores.where(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(dim=-1)  # over the keys
    weights = nn.functional.dropout(weights, dropout)
    return weights @ value  # (B,T,S) @ (B,S,V) -> (B,T,V)


class ModuleList(nn.Module):
    """Query, key and value projections for each head, and one output projection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.dropout, width, bias = 0.0, sizes.head_dim, sizes.qkv_bias
        heads = [[nn.Linear(sizes.embed_dim, width, bias=bias) for _ in range(3)] for _ in range(sizes.num_heads)]
        self.heads = nn.ModuleList(map(nn.ModuleList, heads))
        self.out = nn.Linear(sizes.num_heads * width, sizes.embed_dim, bias=sizes.out_bias)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
        """Attend from tokens x (B, T, D) to themselves -> (B, T, D); `mask` is broadcastable to (B, H, T, T)."""
        attended = []
        for h, (query, key, value) in enumerate(self.heads):
            visible = None if mask is None else mask[:, h % mask.shape[1]]  # (B,H,T,S) or (B,1,T,S) -> (B,T,S)
            attended.append(attend_head(query(x), key(x), value(x), visible, scale, self.dropout))  # (B,T,D) -> (B,T,K)
        return self.out(torch.cat(attended, dim=-1))  # H times (B,T,K) -> (B,T,H*K) -> (B,T,D)


MODULE, LAYOUT = ModuleList, split("heads.{head}.0", "heads.{head}.1", "heads.{head}.2", out="out")
