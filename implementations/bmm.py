"""The input is replicated once per head and projected by one batched product; attention folds heads into the batch.

Source: S. Raschka, "Understanding and Coding the Self-Attention Mechanism of Large Language Models From Scratch",
section on multi-head attention, https://sebastianraschka.com/blog/2023/self-attention-from-scratch.html

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width, D embedding
width.

At its peak a call holds scores, weights and output: 2 B H T S + B H T V numbers beyond its inputs.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from attnbench.contract import (
    BoundMask,
    CanonicalAttention,
    Implementation,
    dense_flops,
    repeat_heads,
    softmax_with_sinks,
)


class Bmm(CanonicalAttention):
    """Parameters (H, K, D), one matrix for each head."""

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D), (B, S, D) -> query (B, H, T, K), key (B, G, S, K), value (B, G, S, V)."""
        query = project_replicas(x, self.query_weight, self.query_bias)
        key = project_replicas(context, self.key_weight, self.key_bias)
        value = project_replicas(context, self.value_weight, self.value_bias)
        return query, key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        sizes = query.shape[:2]
        query = query.flatten(0, 1)  # (B,H,T,K) -> (B*H,T,K)
        key = repeat_heads(key, sizes[1]).flatten(0, 1)  # (B,G,S,K) -> (B*H,S,K)
        value = repeat_heads(value, sizes[1]).flatten(0, 1)  # (B,G,S,V) -> (B*H,S,V)
        scores = torch.bmm(query, key.transpose(1, 2)) * mask.scale_for(query.shape[-1])  # -> (B*H,T,S)
        if mask.changes_scores:
            scores = mask.adjust(torch.unflatten(scores, 0, sizes)).flatten(0, 1)  # by (B,H,T,S), as masks are
        if mask.hidden is not None:
            scores = torch.unflatten(scores, 0, sizes)  # (B*H,T,S) -> (B,H,T,S)
            scores = scores.masked_fill(mask.hidden, -torch.inf).flatten(0, 1)  # (B,H,T,S) -> (B*H,T,S)
        sinks = None if mask.sinks is None else mask.sinks.repeat(sizes[0])[:, None, None]  # (H,) -> (B*H,1,1)
        weights = softmax_with_sinks(scores, sinks)  # over the keys
        if mask.empty is not None:  # a query that sees no key gets 0
            weights = torch.unflatten(weights, 0, sizes).masked_fill(mask.empty, 0.0).flatten(0, 1)
        weights = F.dropout(weights, self.dropout)
        return torch.unflatten(torch.bmm(weights, value), 0, sizes)  # (B*H,T,S) @ (B*H,S,V) -> (B,H,T,V)


def project_replicas(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(B, T, D) with one weight (K, D) and bias (K,) for each of H heads -> (B, H, T, K)."""
    replicas = x.flatten(0, 1).repeat(len(weight), 1, 1)  # (B,T,D) -> (H,B*T,D)
    projected = torch.bmm(replicas, weight.transpose(1, 2))  # (H,B*T,D) @ (H,D,K) -> (H,B*T,K)
    if bias is not None:
        projected = projected + bias[:, None]  # (H,K) -> (H,1,K)
    return torch.unflatten(projected, 1, x.shape[:2]).transpose(0, 1)  # (H,B*T,K) -> (B,H,T,K)


IMPLEMENTATION = Implementation(
    build=Bmm,
    source="https://sebastianraschka.com/blog/2023/self-attention-from-scratch.html",
    executed_flops=dense_flops,
    has_dropout=True,
    features=("scale", "sinks", "learned bias"),
)
