"""Attention as a tutorial explains it, word by word: one batch row, one head and one query token at a time.

Source: S. Raschka, "Understanding and Coding Self-Attention, Multi-Head Attention, Cross-Attention, and
Causal-Attention in LLMs", https://magazine.sebastianraschka.com/p/understanding-and-coding-self-attention

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.

At its peak a call holds the output of each token, and the same once more, stacked: 2 B H T V numbers.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from attnbench.contract import Attention, BoundMask, Implementation, Workload, dense_flops, softmax_with_sinks


class NaiveLoop(Attention):
    """Three nested loops around the attention of a single token, in float32 at least.

    A key's gradient is a sum over all queries, one at a time: in half precision its last terms would be lost.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        dtype = query.dtype
        query, key, value = (each.to(torch.promote_types(dtype, torch.float32)) for each in (query, key, value))
        batch_size, num_heads, query_len, _ = query.shape
        group_size = num_heads // key.shape[1]  # query heads that read the same key/value head
        hidden = torch.zeros((), dtype=torch.bool, device=query.device) if mask.hidden is None else mask.hidden
        hidden = hidden.expand(batch_size, num_heads, query_len, key.shape[2])  # any -> (B,H,T,S)
        scale = mask.scale_for(query.shape[-1])

        def change(products: Tensor, row: int, head: int, token: int) -> Tensor:
            return mask.adjust(products * scale, rows=row, heads=head, queries=token)

        attended = []
        for b in range(batch_size):
            for h in range(num_heads):
                keys, values = key[b, h // group_size], value[b, h // group_size]  # (S,K), (S,V)
                sink = None if mask.sinks is None else mask.sinks[h]
                for t, token in enumerate(query[b, h]):  # T times (K,)
                    scores_of = partial(change, row=b, head=h, token=t)  # of its products with the keys (S,)
                    attended.append(attend_token(token, keys, values, hidden[b, h, t], scores_of, sink, self.dropout))
        return torch.stack(attended).view(batch_size, num_heads, query_len, -1).to(dtype)  # (B*H*T,V) -> (B,H,T,V)


def attend_token(  # noqa: PLR0913, PLR0917 - three tensors, and what is done to the weights
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor,
    scores_of: Callable[[Tensor], Tensor],
    sink: Tensor | None,
    dropout: float,
) -> Tensor:
    """What one token takes from the others: query (K,), keys (S, K), values (S, V), hidden (S,), sink () -> (V,)."""
    if hidden.all():
        return values[:0].sum(dim=0)  # a query that sees no key gets 0
    scores = scores_of(keys @ query)  # (S,K) @ (K,) -> (S,)
    weights = softmax_with_sinks(scores.masked_fill(hidden, -torch.inf), sink)  # over the keys
    weights = F.dropout(weights, dropout)
    return weights @ values  # (S,) @ (S,V) -> (V,)


def executed_flops(workload: Workload) -> int | None:
    """Every pair of each token that sees a key; who sees none is passed over, and these are not counted here."""
    sizes = (workload.batch_size, workload.seq_len, workload.kv_len)
    return None if workload.mask_rule.has_empty_rows(*sizes) else dense_flops(workload)


IMPLEMENTATION = Implementation(
    build=NaiveLoop,
    source="https://magazine.sebastianraschka.com/p/understanding-and-coding-self-attention",
    executed_flops=executed_flops,
    has_dropout=True,
    features=("scale", "sinks", "learned bias"),
)
