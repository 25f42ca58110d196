"""Projections and attention as Einstein sums: every line names its axes, no view and no transpose is needed.

Source: T. Rocktäschel, "Einsum is All you Need", https://rockt.ai/2018/04/30/einsum

Shapes and their letters: b batch, t query, s key, h heads, g key/value heads, r query heads per key/value head, k head
width, v value width, d embedding width. Weights keep their three axes (H, K, D).

At its peak a call holds scores, weights and output: 2 B H T S + B H T V numbers beyond its inputs.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from attnbench.contract import Attention, BoundMask, Implementation, Weights, dense_flops, nn


class Einsum(Attention):
    """Parameters (H, K, D), (G, K, D) and (G, V, D), as the canonical weights have them."""

    def make_layers(self) -> None:
        """Make the parameters and, where there are biases, theirs."""
        self.query_weight = nn.Parameter(torch.empty(self.num_heads, self.head_dim, self.embed_dim))
        self.key_weight = nn.Parameter(torch.empty(self.num_kv_heads, self.head_dim, self.embed_dim))
        self.value_weight = nn.Parameter(torch.empty(self.num_kv_heads, self.value_dim, self.embed_dim))
        self.query_bias = nn.Parameter(torch.empty(self.num_heads, self.head_dim)) if self.has_bias else None
        self.key_bias = nn.Parameter(torch.empty(self.num_kv_heads, self.head_dim)) if self.has_bias else None
        self.value_bias = nn.Parameter(torch.empty(self.num_kv_heads, self.value_dim)) if self.has_bias else None

    def pack(self, weights: Weights) -> dict[str, Tensor]:
        """The canonical weights, unchanged."""
        packed = {
            "query_weight": weights.query,
            "key_weight": weights.key,
            "value_weight": weights.value,
            "query_bias": weights.query_bias,
            "key_bias": weights.key_bias,
            "value_bias": weights.value_bias,
        }
        return {name: tensor for name, tensor in packed.items() if tensor is not None}

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D), (B, S, D) -> query (B, H, T, K), key (B, G, S, K), value (B, G, S, V)."""
        query = torch.einsum("btd,hkd->bhtk", x, self.query_weight)
        key = torch.einsum("bsd,gkd->bgsk", context, self.key_weight)
        value = torch.einsum("bsd,gvd->bgsv", context, self.value_weight)
        if self.query_bias is None or self.key_bias is None or self.value_bias is None:
            return query, key, value
        # (H,K) -> (H,1,K): the same bias for every token
        return query + self.query_bias[:, None], key + self.key_bias[:, None], value + self.value_bias[:, None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        groups = (key.shape[1], query.shape[1] // key.shape[1])
        query = torch.unflatten(query, 1, groups)  # (B,H,T,K) -> (B,G,R,T,K)
        scores = torch.einsum("bgrtk,bgsk->bgrts", query, key) / math.sqrt(query.shape[-1])
        scores = mask.adjust(scores.flatten(1, 2))  # (B,G,R,T,S) -> (B,H,T,S), changed where the mask says so
        if mask.hidden is not None:
            scores = scores.masked_fill(mask.hidden, -torch.inf)
        weights = scores.softmax(dim=-1)  # over the keys
        if mask.empty is not None:
            weights = weights.masked_fill(mask.empty, 0.0)  # who sees no key takes nothing
        weights = F.dropout(weights, self.dropout)
        weights = torch.unflatten(weights, 1, groups)  # (B,H,T,S) -> (B,G,R,T,S)
        return torch.einsum("bgrts,bgsv->bgrtv", weights, value).flatten(1, 2)  # (B,G,R,T,V) -> (B,H,T,V)


IMPLEMENTATION = Implementation(
    build=Einsum, source="https://rockt.ai/2018/04/30/einsum", executed_flops=dense_flops, has_dropout=True
)
