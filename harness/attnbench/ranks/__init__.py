"""Attention over several ranks: the tokens of a call are split among a group of processes.

An implementation passes query, key and value to `over_ranks`, with a function that computes the share of one rank. With
one rank, the function runs in this process. With several, it runs in each process of a group (group.py), on the tokens
of that process (rank.py).

Shapes are as in contract/__init__.py. T and S are equal here; one rank has t of the T queries and s of the S keys.
"""

import os
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnbench.devices import device
from attnbench.ranks.group import Asked, RankGroup, RankLostError, RankSilentError, group_of
from attnbench.ranks.rank import Rank, Share, tokens_of
from attnbench.ranks.ring import ring_pass
from attnbench.workloads.workload import Workload

__all__ = ["Rank", "RankLostError", "RankSilentError", "not_over_ranks", "over_ranks", "ring_pass", "tokens_of"]


def not_over_ranks(workload: Workload) -> str | None:
    """Return why ranks cannot compute the workload together; None if they can."""
    if workload.mask not in {"none", "causal"}:
        return f"it supports the masks none and causal, and not {workload.mask}"
    if workload.seq_len != workload.kv_len:
        return "its ranks split queries and keys in the same way: set kv_len to the value of seq_len"
    if workload.world_size == 1:
        return None
    if workload.scope == "module":
        return "over several ranks the projections would run in one process: choose scope=attention"
    if workload.num_threads > 1:
        return "each of several ranks has one thread: set num_threads to 1, or leave it at 0"
    if not hasattr(os, "memfd_create"):
        return "ranks share memory through memfd_create, which this system lacks: use Linux"
    if device(workload.device).is_host:
        return None
    last = device(f"{workload.device.partition(':')[0]}:{workload.world_size - 1}")
    return None if last.missing() is None else f"each rank needs a device of its own: {last.missing()}"


class _OverRanks(torch.autograd.Function):
    """A call whose autograd graph is kept in the processes of the ranks."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - every tensor that has a gradient
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: RankGroup,
        asked: Asked,
    ) -> Tensor:
        call, output = group.forward((query, key, value), asked)
        if asked.keeps_graph:
            ctx.group, ctx.call = group, call
            ctx.like = [(each.dtype, tuple(each.shape)) for each in (query, key, value)]
            weakref.finalize(ctx, group.forget, call)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        made = ctx.group.backward(ctx.call, grad_output, ctx.like)
        needed = zip(made, ctx.needs_input_grad[:3], strict=True)
        return (*(each if needs else None for each, needs in needed), None, None)


def over_ranks(  # noqa: PLR0913 - the operands of a call, and how they are split
    share: Share,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    world_size: int,
    is_causal: bool,
    order: str = "contiguous",
) -> Tensor:
    """Compute a call on `world_size` ranks: query (B, H, T, K), key (B, G, T, K), value (B, G, T, V) -> (B, H, T, V).

    `share` is a function at the top level of a module; each rank imports it and calls it with the rank's own tokens.
    `order` says how the tokens are split (see `tokens_of`). `scale` is the factor of the scores. `share` finds `scale`
    and `is_causal` in its argument `rank`.

    Raises:
        RankLostError: a rank has died; the message says which.
        RankSilentError: a rank did not answer in time.
        RuntimeError: a rank raised an error.
    """
    rank = Rank(length=query.shape[2], order=order, is_causal=is_causal, scale=scale)
    if world_size == 1:
        return share(query, key, value, rank)
    asked = Asked(
        module=share.__module__,
        function=share.__qualname__,
        file=share.__code__.co_filename,
        rank=rank,
        keeps_graph=torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value)),
    )
    group = group_of(world_size, query.device.type)
    output: Tensor = _OverRanks.apply(query, key, value, group, asked)  # type: ignore[no-untyped-call]
    return output
