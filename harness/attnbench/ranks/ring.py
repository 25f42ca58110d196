"""Attention in blocks: keys and values circulate around a ring of ranks, and results are merged by logsumexp.

Each rank keeps its queries. Keys and values go round once in the forward pass. In the backward pass they go round again
together with their gradients; the gradients move one step further, and so return to the rank that owns the keys. Half
precision is computed in float32.

Source: Ring Attention, https://arxiv.org/abs/2310.01889, and https://github.com/zhuzilin/ring-flash-attention.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnbench.ranks.rank import Rank

Slices = tuple[slice, slice, bool]
"""A part of a rank's queries, a part of the keys that are at the rank, and whether a causal mask hides some pairs."""


def wide(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32; return a float64 tensor unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def grouped(query: Tensor, num_kv_heads: int) -> Tensor:
    """Concatenate the queries that read the same key/value head: (B, H, t, K) -> (B, G, H/G * t, K)."""
    return query.reshape(query.shape[0], num_kv_heads, -1, query.shape[-1])


def block_scores(query: Tensor, key: Tensor, rank: Rank, *, is_diagonal: bool) -> Tensor:
    """Compute scores: query (B, H, t, K), key (B, G, s, K) -> (B, H, t, s); if `is_diagonal`, later keys get -inf."""
    scores = grouped(query, key.shape[1]) @ key.transpose(-2, -1) * rank.scale  # (B,G,H/G*t,K) @ (B,G,K,s)
    scores = scores.reshape(*query.shape[:3], key.shape[2])  # -> (B,H,t,s)
    if is_diagonal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def blocks(rank: Rank, source: int) -> Iterator[Slices]:
    """Yield pairs of a part of this rank's queries and a part of rank `source`'s keys, without fully hidden pairs."""
    at = 0
    for queries in rank.tokens():
        start = 0
        for keys in rank.tokens(source):
            if queries and keys and not (rank.is_causal and keys.start > queries.start):
                yield (
                    slice(at, at + len(queries)),
                    slice(start, start + len(keys)),
                    rank.is_causal and keys.start == queries.start,
                )
            start += len(keys)
        at += len(queries)


class _RingPass(torch.autograd.Function):
    """The forward and backward pass of one rank."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rank: Rank) -> Tensor:  # noqa: ANN401
        """Compute the output: query (B, H, t, K), key (B, G, s, K), value (B, G, s, V) -> (B, H, t, V)."""
        wide_query = wide(query)
        out = wide_query.new_zeros((*query.shape[:3], value.shape[3]))
        logsumexp = wide_query.new_full((*query.shape[:3], 1), -math.inf)
        held = [key, value]
        for step in range(rank.world_size):
            source = (rank.rank - step) % rank.world_size
            is_last = step == rank.world_size - 1
            wait = None if is_last else rank.pass_on(held, rank.num_tokens((source - 1) % rank.world_size))
            for queries, keys, is_diagonal in blocks(rank, source):
                block_key, block_value = (wide(each[:, :, keys]) for each in held)
                scores = block_scores(wide_query[:, :, queries], block_key, rank, is_diagonal=is_diagonal)
                of_block = scores.logsumexp(dim=-1, keepdim=True)  # (B,H,t,1)
                weights = grouped((scores - of_block).exp(), value.shape[1])  # (B,G,H/G*t,s)
                made = (weights @ block_value).unflatten(2, (-1, scores.shape[2])).flatten(1, 2)  # (B,H,t,V)
                before = logsumexp[:, :, queries]
                both = torch.logaddexp(before, of_block)
                out[:, :, queries] = out[:, :, queries] * (before - both).exp() + made * (of_block - both).exp()
                logsumexp[:, :, queries] = both
            held = held if wait is None else wait()
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.rank = rank
        return out.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Compute the gradients of query, key and value, block by block as in FlashAttention-2, algorithm 2.

        Source: https://arxiv.org/abs/2307.08691.
        """
        query, key, value, out, logsumexp = ctx.saved_tensors
        rank: Rank = ctx.rank
        wide_query, wide_grad = wide(query), wide(grad_output)
        along = (wide_grad * out).sum(dim=-1, keepdim=True)  # (B,H,t,1)
        grad_query = torch.zeros_like(wide_query)
        held, grads = [key, value], [torch.zeros_like(wide(key)), torch.zeros_like(wide(value))]
        for step in range(rank.world_size):
            source = (rank.rank - step) % rank.world_size
            num_tokens = rank.num_tokens((source - 1) % rank.world_size)
            is_last = step == rank.world_size - 1
            wait = None if is_last else rank.pass_on(held, num_tokens)
            for queries, keys, is_diagonal in blocks(rank, source):
                block_query, block_grad = wide_query[:, :, queries], wide_grad[:, :, queries]
                block_key, block_value = (wide(each[:, :, keys]) for each in held)
                scores = block_scores(block_query, block_key, rank, is_diagonal=is_diagonal)
                weights = grouped((scores - logsumexp[:, :, queries]).exp(), key.shape[1])  # (B,G,H/G*t,s)
                of_output = grouped(block_grad, key.shape[1])  # (B,G,H/G*t,V)
                of_weights = of_output @ block_value.transpose(-2, -1)  # (B,G,H/G*t,s)
                of_scores = weights * (of_weights - grouped(along[:, :, queries], key.shape[1])) * rank.scale
                made = (of_scores @ block_key).unflatten(2, (-1, block_query.shape[2])).flatten(1, 2)
                grad_query[:, :, queries] += made
                grads[0][:, :, keys] += of_scores.transpose(-2, -1) @ grouped(block_query, key.shape[1])
                grads[1][:, :, keys] += weights.transpose(-2, -1) @ of_output
            if rank.world_size > 1:
                held = held if wait is None else wait()
                grads = rank.pass_on(grads, num_tokens)()
        grad_key, grad_value = grads
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None


def ring_pass(query: Tensor, key: Tensor, value: Tensor, rank: Rank) -> Tensor:
    """Compute one rank's output: query (B, H, t, K), key (B, G, s, K), value (B, G, s, V) -> (B, H, t, V).

    Raises:
        CommunicationError: another rank is late or has died.
    """
    output: Tensor = _RingPass.apply(query, key, value, rank)  # type: ignore[no-untyped-call]
    return output
