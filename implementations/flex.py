"""`flex_attention`, compiled into a kernel that is generated for the mask and skips hidden tiles.

The mask, a function of positions, is traced into the kernel. The list of tiles (PyTorch's block mask) is computed once
for each mask. Tracing, compilation and block masks stay outside the timed calls. The uncompiled function is slow and is
never timed.

Source: J. Dong et al., "Flex Attention", https://arxiv.org/abs/2412.05496, as in
https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from attnbench.contract import BoundMask, Workload, compile_whole, device, is_on

SMALLEST_CUDA_HEAD_DIM = 16


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bound_mask: BoundMask,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention: query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
    attended: Tensor = compiled()(
        query,
        key,
        value,
        score_mod=score_mod(bound_mask),
        block_mask=block_mask(bound_mask) if bound_mask.rule.hides else None,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return attended


@cache
def compiled() -> Callable[..., Any]:
    """Return the compiled flex_attention, which keeps its kernels; all calls in the process share it."""
    return compile_whole(flex_attention)


@lru_cache(maxsize=4)
def block_mask(mask: BoundMask) -> BlockMask:
    """Return PyTorch's block mask: which tiles are hidden, visible or partial, and the predicate for partial tiles."""

    def sees(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask.sees(batch, query, key)

    batch_size, query_len, key_len = mask.sizes
    place = torch.zeros(1, dtype=torch.long, device=mask.device)
    first = mask.sees(torch.arange(batch_size, device=mask.device)[:, None], place, place)
    differs = first.dim() > 1  # the batch rows have different masks
    return create_block_mask(sees, batch_size if differs else None, None, query_len, key_len, device=str(mask.device))


@lru_cache(maxsize=4)
def score_mod(mask: BoundMask) -> Callable[..., Tensor] | None:
    """Return the function that changes a score by each part of the mask in turn; None if the mask only hides."""
    offset, parts = mask.sizes[2] - mask.sizes[1], [*zip(mask.rule.changes, mask.per_head, strict=True)]

    def change(score: Tensor, _batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        for part, per_head in parts:
            if part.is_additive:
                score = score + part.bias(per_head[head], query, key, offset).to(score.dtype)
            else:
                score = part.transform(score)
        return score

    return change if mask.rule.changes_scores else None


def unsupported(workload: Workload) -> str | None:
    """Return why flex_attention cannot run a workload, such as a missing compiler; None if it can."""
    if workload.mask_rule.is_learned:
        return "this implementation passes no learned bias to flex_attention"
    if is_on("cuda", workload):
        if min(workload.head_dim, workload.value_dim) < SMALLEST_CUDA_HEAD_DIM:
            return f"flex_attention on CUDA needs head_dim and value_dim >= {SMALLEST_CUDA_HEAD_DIM}"
        return device(workload.device).missing_compiler()
    if workload.direction != "inference":
        return "flex_attention has no gradients on the CPU"
    if workload.dtype == "float64":
        return "flex_attention has no float64 on the CPU"
    if torch.backends.cpu.get_cpu_capability() not in {"AVX2", "AVX512"}:
        return "flex_attention on the CPU needs AVX2"
    return device(workload.device).missing_compiler()
