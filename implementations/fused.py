"""The textbook form: one projection for queries, keys and values, heads by view and transpose, batched products.

Source: A. Vaswani et al., "Attention Is All You Need", section 3.2, https://arxiv.org/abs/1706.03762, laid out as in
https://github.com/karpathy/nanoGPT/blob/master/model.py

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width, D embedding
width. Scores and weights are both (B, H, T, S), and live together with the output: at its peak a call holds 2 B H T S +
B H T V numbers beyond its inputs, and keeps the B H T S weights for a backward pass.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from attnbench.contract import (
    Attention,
    BoundMask,
    Implementation,
    Weights,
    dense_flops,
    nn,
    repeat_heads,
    softmax_with_sinks,
)


class Fused(Attention):
    """One linear layer makes queries, keys and values of all heads; every product runs over all heads at once."""

    def make_layers(self) -> None:
        """Make the one projection; `sizes` are its rows for queries, keys and values."""
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        self.sizes = [num_heads * self.head_dim, num_kv_heads * self.head_dim, num_kv_heads * self.value_dim]
        self.qkv = nn.Linear(self.embed_dim, sum(self.sizes), bias=self.has_bias)

    def pack(self, weights: Weights) -> dict[str, Tensor]:
        """Stack the rows of all heads: queries, then keys, then values."""
        parts = (weights.query, weights.key, weights.value)
        packed = {"qkv.weight": torch.cat([part.flatten(0, 1) for part in parts])}  # -> (H*K+G*K+G*V,D)
        biases = (weights.query_bias, weights.key_bias, weights.value_bias)
        given = [bias.flatten() for bias in biases if bias is not None]  # (H*K,) (G*K,) (G*V,)
        return packed | {"qkv.bias": torch.cat(given)} if given else packed

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D), (B, S, D) -> query (B, H, T, K), key (B, G, S, K), value (B, G, S, V)."""
        if context is x:
            query, key, value = self.qkv(x).split(self.sizes, dim=-1)  # (B,T,H*K) (B,T,G*K) (B,T,G*V)
        else:  # cross-attention: queries from one input, keys and values from the other
            weights = torch.split(self.qkv.weight, self.sizes)  # (H*K,D) (G*K,D) (G*V,D)
            biases = torch.split(self.qkv.bias, self.sizes) if self.has_bias else (None, None, None)
            query = F.linear(x, weights[0], biases[0])  # (B,T,D) -> (B,T,H*K)
            key = F.linear(context, weights[1], biases[1])  # (B,S,D) -> (B,S,G*K)
            value = F.linear(context, weights[2], biases[2])  # (B,S,D) -> (B,S,G*V)
        query = query.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # (B,T,H*K) -> (B,H,T,K)
        key = key.unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)  # (B,S,G*K) -> (B,G,S,K)
        value = value.unflatten(-1, (self.num_kv_heads, self.value_dim)).transpose(1, 2)  # (B,S,G*V) -> (B,G,S,V)
        return query, key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])  # (B,G,S,K) -> (B,H,S,K)
        scores = query @ key.transpose(-2, -1) * mask.scale_for(query.shape[-1])  # (B,H,T,K) @ (B,H,K,S) -> (B,H,T,S)
        scores = mask.adjust(scores)  # where the mask changes scores
        if mask.hidden is not None:
            scores = scores.masked_fill(mask.hidden, -torch.inf)
        sinks = None if mask.sinks is None else mask.sinks[:, None, None]  # (H,) -> (H,1,1)
        weights = softmax_with_sinks(scores, sinks)  # over the keys
        if mask.empty is not None:
            weights = weights.masked_fill(mask.empty, 0.0)  # a query that sees no key gets 0
        weights = F.dropout(weights, self.dropout)
        return weights @ value  # (B,H,T,S) @ (B,H,S,V) -> (B,H,T,V)


IMPLEMENTATION = Implementation(
    build=Fused,
    source="https://arxiv.org/abs/1706.03762, section 3.2",
    executed_flops=dense_flops,
    has_dropout=True,
    features=("scale", "sinks", "learned bias"),
)
