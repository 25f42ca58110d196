"""PyTorch's own context parallelism: SDPA inside `context_parallel`, which splits the tokens itself.

`context_parallel` is experimental and made for CUDA; its errors on other devices are not caught. Each rank gets all
tokens, of which `context_parallel` keeps the rank's part; the outputs of all ranks are gathered at the end.

Source: https://docs.pytorch.org/tutorials/unstable/context_parallel.html

Shapes: B batch, T tokens of all ranks, H heads, G key/value heads, K head width, V value width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnbench.contract import Workload
from attnbench.ranks import Rank, not_over_ranks, over_ranks

TOKENS = 2
"""The axis that is split among ranks."""


class Parallel(torch.autograd.Function):
    """Attention whose forward and backward passes run inside `context_parallel`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rank: Rank) -> Tensor:  # noqa: ANN401
        """Compute the output of all tokens on each rank: (B, H, T, K), (B, G, T, K), (B, G, T, V) -> (B, H, T, V)."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import context_parallel_unshard

        ctx.mesh = init_device_mesh(query.device.type, (rank.world_size,))
        ctx.own = [each.detach().clone() for each in (query, key, value)]
        axes = [TOKENS] * 3
        with context_parallel(ctx.mesh, buffers=ctx.own, buffer_seq_dims=axes, no_restore_buffers=set(ctx.own)):
            with torch.enable_grad():
                for each in ctx.own:
                    each.requires_grad_()
                own_query, own_key, own_value = ctx.own
                ctx.made = torch.nn.functional.scaled_dot_product_attention(
                    own_query,
                    own_key,
                    own_value,
                    is_causal=rank.is_causal,
                    scale=rank.scale,
                    enable_gqa=query.shape[1] != key.shape[1],
                )
            (output,) = context_parallel_unshard(ctx.mesh, [ctx.made.detach()], [TOKENS])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Sequence[Tensor | None]:  # noqa: ANN401
        """Compute the gradients of query, key and value from the output's gradient (B, H, T, V), for all tokens."""
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import context_parallel_unshard

        own = grad.detach().clone()
        with context_parallel(ctx.mesh, buffers=[own], buffer_seq_dims=[TOKENS], no_restore_buffers={own}):
            found = torch.autograd.grad(ctx.made, ctx.own, own, retain_graph=True)
            whole = context_parallel_unshard(ctx.mesh, [each.detach() for each in found], [TOKENS] * 3)
        return (*whole, None)


def attend_in_parallel(query: Tensor, key: Tensor, value: Tensor, rank: Rank) -> Tensor:
    """Compute the output of all tokens on each rank: (B, H, T, K), (B, G, T, K), (B, G, T, V) -> (B, H, T, V)."""
    output: Tensor = Parallel.apply(query, key, value, rank)  # type: ignore[no-untyped-call]
    return output


def attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, num_kv_heads: int, world_size: int, is_causal: bool = False
) -> Tensor:
    """Compute attention over ranks: query (B, H, T, K), key (B, G, T, K), value (B, G, T, V) -> (B, H, T, V)."""
    return over_ranks(
        attend_in_parallel, query, key, value, scale=scale, world_size=world_size, is_causal=is_causal, order="whole"
    )


def unsupported(workload: Workload) -> str | None:
    """Return why a group of ranks cannot run a workload; None if it can."""
    if workload.world_size == 1:
        return "it needs a group of ranks: give world_size a value of 2 or more"
    return not_over_ranks(workload)
