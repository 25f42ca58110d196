"""Projections and attention as Einstein sums: every line names its axes, no view and no transpose is needed.

Source: T. Rocktäschel, "Einsum is All you Need", https://rockt.ai/2018/04/30/einsum

Shapes and their letters: b batch, t query, s key, h heads, g key/value heads, r query heads per key/value head, k head
width, v value width, d embedding width. Weights keep their three axes (H, K, D).

At its peak a call holds scores, weights and output: 2 B H T S + B H T V numbers beyond its inputs.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from attnbench.contract import BoundMask, CanonicalAttention, Implementation, dense_flops, softmax_with_sinks


class Einsum(CanonicalAttention):
    """Parameters (H, K, D), (G, K, D) and (G, V, D), as the canonical weights have them."""

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
        scores = torch.einsum("bgrtk,bgsk->bgrts", query, key) * mask.scale_for(query.shape[-1])
        scores = mask.adjust(scores.flatten(1, 2))  # (B,G,R,T,S) -> (B,H,T,S), changed where the mask says so
        if mask.hidden is not None:
            scores = scores.masked_fill(mask.hidden, -torch.inf)
        sinks = None if mask.sinks is None else mask.sinks[:, None, None]  # (H,) -> (H,1,1)
        weights = softmax_with_sinks(scores, sinks)  # over the keys
        if mask.empty is not None:
            weights = weights.masked_fill(mask.empty, 0.0)  # a query that sees no key gets 0
        weights = F.dropout(weights, self.dropout)
        weights = torch.unflatten(weights, 1, groups)  # (B,H,T,S) -> (B,G,R,T,S)
        return torch.einsum("bgrts,bgsv->bgrtv", weights, value).flatten(1, 2)  # (B,G,R,T,V) -> (B,H,T,V)


IMPLEMENTATION = Implementation(
    build=Einsum,
    source="https://rockt.ai/2018/04/30/einsum",
    executed_flops=dense_flops,
    has_dropout=True,
    features=("scale", "sinks", "learned bias"),
)
