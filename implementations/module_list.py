"""A list of heads, each a small module that projects and attends alone; their outputs are concatenated.

Source: S. Raschka, "Build a Large Language Model (From Scratch)", chapter 3, `MultiHeadAttentionWrapper`,
https://github.com/rasbt/LLMs-from-scratch/tree/main/ch03

Shapes: B batch, T query length, S key length, H heads, K head width, V value width, D embedding width.

At its peak a call holds scores and weights of one head and the outputs of all: 2 B T S + B H T V numbers; where a
graph is recorded, the weights of all heads and the scores of one.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from attnbench.contract import (
    Attention,
    BoundMask,
    Implementation,
    Weights,
    Workload,
    dense_flops,
    nn,
    softmax_with_sinks,
)


class Head(nn.Module):
    """One head with query, key and value projections of its own."""

    def __init__(self, number: int, embed_dim: int, head_dim: int, value_dim: int, *, bias: bool) -> None:
        """Make the three projections of head `number`."""
        super().__init__()
        self.number = number
        self.query = nn.Linear(embed_dim, head_dim, bias=bias)
        self.key = nn.Linear(embed_dim, head_dim, bias=bias)
        self.value = nn.Linear(embed_dim, value_dim, bias=bias)

    def forward(self, x: Tensor, context: Tensor, mask: BoundMask, dropout: float) -> Tensor:
        """(B, T, D), (B, S, D) -> (B, T, V)."""
        return attend_head(self.query(x), self.key(context), self.value(context), mask, self.number, dropout)


class ModuleList(Attention):
    """The heads, one after the other."""

    def make_layers(self) -> None:
        """Make the heads."""
        sizes = (self.embed_dim, self.head_dim, self.value_dim)
        self.heads = nn.ModuleList(Head(number, *sizes, bias=self.has_bias) for number in range(self.num_heads))

    def pack(self, weights: Weights) -> dict[str, Tensor]:
        """Give each head its rows: (H, K, D) -> H times (K, D)."""
        layers = {
            "query.weight": weights.query,
            "key.weight": weights.key,
            "value.weight": weights.value,
            "query.bias": weights.query_bias,
            "key.bias": weights.key_bias,
            "value.bias": weights.value_bias,
        }
        return {
            f"heads.{head}.{name}": tensor[head]
            for name, tensor in layers.items()
            if tensor is not None
            for head in range(self.num_heads)
        }

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, H, S, K), value (B, H, S, V) -> (B, H, T, V)."""
        heads = zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True)  # H times (B,T,K) (B,S,K) (B,S,V)
        attended = [attend_head(*head, mask, number, self.dropout) for number, head in enumerate(heads)]
        return torch.stack(attended, dim=1)  # H times (B,T,V) -> (B,H,T,V)

    def forward(self, x: Tensor, context: Tensor | None = None, *, mask: BoundMask) -> Tensor:
        """(B, T, D) and, for cross-attention, (B, S, D) -> (B, T, D), or (B, T, H*V) without an output projection."""
        context = x if context is None else context
        merged = torch.cat([head(x, context, mask, self.dropout) for head in self.heads], dim=-1)  # -> (B,T,H*V)
        return merged if self.out is None else self.out(merged)


def attend_head(  # noqa: PLR0913, PLR0917 - three tensors, and what is done to the weights
    query: Tensor, key: Tensor, value: Tensor, mask: BoundMask, number: int, dropout: float
) -> Tensor:
    """Query (B, T, K), key (B, S, K), value (B, S, V) of head `number` -> (B, T, V)."""
    scores = query @ key.transpose(-2, -1) * mask.scale_for(query.shape[-1])  # (B,T,K) @ (B,K,S) -> (B,T,S)
    scores = mask.adjust(scores, heads=number)  # where the mask changes scores
    if mask.hidden is not None:
        scores = scores.masked_fill(mask.hidden.squeeze(1), -torch.inf)  # (B,1,T,S) -> (B,T,S)
    weights = softmax_with_sinks(scores, None if mask.sinks is None else mask.sinks[number])  # over the keys
    if mask.empty is not None:
        weights = weights.masked_fill(mask.empty.squeeze(1), 0.0)  # a query that sees no key gets 0
    weights = F.dropout(weights, dropout)
    return weights @ value  # (B,T,S) @ (B,S,V) -> (B,T,V)


def unsupported(workload: Workload) -> str | None:
    """Heads that share keys and values do not project alone."""
    if workload.num_kv_heads != workload.num_heads:
        return "each head has key and value projections of its own: num_kv_heads must be num_heads"
    return None


IMPLEMENTATION = Implementation(
    build=ModuleList,
    source="https://github.com/rasbt/LLMs-from-scratch/tree/main/ch03",
    unsupported=unsupported,
    executed_flops=dense_flops,
    has_dropout=True,
    features=("scale", "sinks", "learned bias"),
)
