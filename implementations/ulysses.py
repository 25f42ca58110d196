"""Ulysses: ranks exchange tokens for heads, attend to all tokens, and exchange heads for tokens.

In between, each rank has all tokens of H / W heads, so H and G must be multiples of W.

Source: https://arxiv.org/abs/2309.14509

Shapes: B batch, T tokens of all W ranks, t of one rank, H heads, G key/value heads, K head width, V value width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnbench.contract import Workload, repeat_heads
from attnbench.ranks import Rank, not_over_ranks, over_ranks


def to_heads(tensor: Tensor, rank: Rank) -> Tensor:
    """Exchange all heads of a rank's tokens (B, H, t, K) for some heads of all tokens (B, H/W, T, K)."""
    batch, heads, _, width = tensor.shape
    own = heads // rank.world_size
    shapes = [(batch, own, rank.num_tokens(each), width) for each in range(rank.world_size)]
    return torch.cat(rank.exchange(tensor.split(own, dim=1), shapes), dim=2)


def to_tokens(tensor: Tensor, rank: Rank) -> Tensor:
    """Exchange some heads of all tokens (B, H/W, T, V) for all heads of a rank's tokens (B, H, t, V)."""
    batch, own, _, width = tensor.shape
    numbers = [rank.num_tokens(each) for each in range(rank.world_size)]
    shapes = [(batch, own, rank.num_tokens(rank.rank), width)] * rank.world_size
    return torch.cat(rank.exchange(tensor.split(numbers, dim=2), shapes), dim=1)


class Exchange(torch.autograd.Function):
    """The exchanges `to_heads` and `to_tokens` with gradients: the backward pass of one is the other."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rank: Rank, is_to_heads: bool) -> Tensor:  # noqa: ANN401
        """Exchange (B, H, t, K) for (B, H/W, T, K), or the reverse."""
        ctx.rank, ctx.is_to_heads = rank, is_to_heads
        return (to_heads if is_to_heads else to_tokens)(tensor, rank)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """Exchange the output's gradient in the other direction."""
        return (to_tokens if ctx.is_to_heads else to_heads)(grad, ctx.rank), None, None


def exchanged(tensor: Tensor, rank: Rank, *, is_to_heads: bool) -> Tensor:
    """Exchange tokens for heads, (B, H, t, K) -> (B, H/W, T, K), or heads for tokens."""
    output: Tensor = Exchange.apply(tensor, rank, is_to_heads)  # type: ignore[no-untyped-call]
    return output


def attend_to_all(query: Tensor, key: Tensor, value: Tensor, rank: Rank) -> Tensor:
    """Compute one rank's output (B, H, t, V) from its query (B, H, t, K), key (B, G, t, K) and value (B, G, t, V)."""
    query, key, value = (exchanged(each, rank, is_to_heads=True) for each in (query, key, value))
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])  # -> (B,H/W,T,K), (B,H/W,T,V)
    made = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=rank.is_causal, scale=rank.scale
    )
    return exchanged(made, rank, is_to_heads=False)


def attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, num_kv_heads: int, world_size: int, is_causal: bool = False
) -> Tensor:
    """Compute attention over ranks: query (B, H, T, K), key (B, G, T, K), value (B, G, T, V) -> (B, H, T, V)."""
    return over_ranks(attend_to_all, query, key, value, scale=scale, world_size=world_size, is_causal=is_causal)


def unsupported(workload: Workload) -> str | None:
    """Return why ranks cannot run a workload, such as a number of heads that they cannot share; None if they can."""
    for name, heads in (("num_heads", workload.num_heads), ("num_kv_heads", workload.num_kv_heads)):
        if heads % workload.world_size:
            return f"{name}={heads} is not a multiple of world_size={workload.world_size}"
    return not_over_ranks(workload)
