"""Attention over ranks by all-gather: each rank gathers all keys and values, and attends to them with its queries.

The gradients of a key and its value are sent to the rank that holds the token, which sums them in float32 or wider.

Source: context parallelism of Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2.

Shapes: B batch, T tokens of all ranks, t of one rank, H heads, G key/value heads, K head width, V value width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnbench.contract import repeat_heads
from attnbench.ranks import Rank, over_ranks
from attnbench.ranks import not_over_ranks as unsupported  # noqa: F401 - the harness reads it


class Gather(torch.autograd.Function):
    """Gather the tokens of all ranks, in float32 or wider; the backward pass sums gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rank: Rank) -> Tensor:  # noqa: ANN401
        """Gather the tokens of all ranks: (B, G, t, K) -> (B, G, T, K)."""
        ctx.rank, ctx.dtype = rank, tensor.dtype
        whole = torch.cat(rank.gather(tensor), dim=2)
        return whole.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        """Sum all ranks' gradients of this rank's tokens: (B, G, T, K) -> (B, G, t, K)."""
        rank: Rank = ctx.rank
        parts = grad.split([rank.num_tokens(each) for each in range(rank.world_size)], dim=2)
        found = rank.exchange(parts, [parts[rank.rank].shape] * rank.world_size)
        return torch.stack(found).sum(dim=0).to(ctx.dtype), None


def attend_to_all(query: Tensor, key: Tensor, value: Tensor, rank: Rank) -> Tensor:
    """Compute one rank's output (B, H, t, V) from its query (B, H, t, K), key (B, G, t, K) and value (B, G, t, V)."""
    key, value = (Gather.apply(each, rank) for each in (key, value))  # type: ignore[no-untyped-call] # t -> T tokens
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])  # -> (B,H,T,K), (B,H,T,V)
    scores = query.to(key.dtype) @ key.transpose(-2, -1) * rank.scale  # (B,H,t,K) @ (B,H,K,T) -> (B,H,t,T)
    if rank.is_causal:
        own = torch.cat([torch.arange(each.start, each.stop, device=key.device) for each in rank.tokens()])
        hidden = torch.arange(rank.length, device=key.device) > own[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(dim=-1) @ value).to(query.dtype)  # (B,H,t,T) @ (B,H,T,V) -> (B,H,t,V)


def attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, num_kv_heads: int, world_size: int, is_causal: bool = False
) -> Tensor:
    """Compute attention over ranks: query (B, H, T, K), key (B, G, T, K), value (B, G, T, V) -> (B, H, T, V)."""
    return over_ranks(attend_to_all, query, key, value, scale=scale, world_size=world_size, is_causal=is_causal)
