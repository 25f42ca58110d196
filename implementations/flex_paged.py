"""FlexAttention over a paged cache: all pages form one row of keys, and a block mask selects the keys of each token.

A block of keys is a page. From the block table, each block of queries gets the list of its requests' pages, so that the
kernel reads no other page. The predicate of the mask converts a slot of the pool to the key's position in its request.
The function is compiled. Each call computes the block mask, because a serving engine needs a new one at each step, and
copies the whole pool with 0 in the unused slots.

Source: https://github.com/meta-pytorch/attention-gym/blob/main/attn_gym/paged_attention (the idea of the conversion)

Shapes: N requests, T query tokens of all requests, P pages, c slots of a page, H heads, G key/value heads, K head
width, V value width.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from attnbench.contract import Workload, compile_whole, device, is_on

QUERY_BLOCK = 16
SMALLEST_PAGE = 16


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    softmax_scale: float | None = None,
) -> Tensor:
    """Compute causal attention: query (T, H, K), key_cache (P, c, G, K), value_cache (P, c, G, V) -> (T, H, V).

    Request n has the queries cu_seqlens_q[n] to cu_seqlens_q[n + 1] - 1, which are the last of its seqused_k[n] tokens.
    Its keys and values are in the pages block_table[n], in order. Shapes: cu_seqlens_q (N + 1,), seqused_k (N,),
    block_table (N, pages of the longest request). softmax_scale is K**-0.5 by default.
    """
    plan = converted(block_table, seqused_k, cu_seqlens_q, key_cache.shape[0], key_cache.shape[1], len(query))
    used = plan.used[..., None, None]  # (P,c,1,1)
    values = value_cache.where(used, 0.0)  # a slot that no request uses may contain NaN, and 0 * NaN is NaN
    keys = key_cache.where(used, 0.0)
    attended: Tensor = compiled()(
        query.transpose(0, 1)[None],  # (T,H,K) -> (1,H,T,K)
        keys.flatten(0, 1).transpose(0, 1)[None],  # (P,c,G,K) -> (1,G,P*c,K)
        values.flatten(0, 1).transpose(0, 1)[None],  # (P,c,G,V) -> (1,G,P*c,V)
        block_mask=plan.mask,
        scale=softmax_scale,
        enable_gqa=query.shape[1] != key_cache.shape[2],
    )
    return attended[0].transpose(0, 1)  # (1,H,T,V) -> (T,H,V)


class Plan:
    """The block mask of a batch over the pool of pages, and the slots that requests use: `used` (P, c), boolean."""

    mask: BlockMask
    used: Tensor


def converted(table: Tensor, lengths: Tensor, starts: Tensor, num_pages: int, page_size: int, num_tokens: int) -> Plan:
    """Convert a block table (N, pages of the longest request), key lengths (N,) and query starts (N + 1,) to a plan.

    The pool has `num_pages` pages of `page_size` slots, and the batch has `num_tokens` query tokens.
    """
    number = torch.arange(table.shape[1], device=table.device)
    is_used = number < ((lengths + page_size - 1) // page_size)[:, None]  # (N,most pages)
    request, place = is_used.nonzero(as_tuple=True)
    pages = table[request, place].long()
    place_of = torch.full((len(table), num_pages), -1, device=table.device)  # (N,P): a page's index in the request
    place_of[request, pages] = place
    num_new = starts.diff()
    of_token = torch.repeat_interleave(torch.arange(len(table), device=table.device), num_new)  # (T,)
    last = (lengths - num_new)[of_token] + torch.arange(num_tokens, device=table.device) - starts[of_token]  # (T,)

    def sees(_batch: Tensor, _head: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        page_number = place_of[of_token[token], slot // page_size]
        return (page_number >= 0) & (page_number * page_size + slot % page_size <= last[token])

    num_blocks = -(-num_tokens // QUERY_BLOCK)
    block = torch.arange(num_tokens, device=table.device) // QUERY_BLOCK
    needed = torch.zeros(num_blocks, num_pages, dtype=torch.int32, device=table.device)
    needed.index_add_(0, block, (place_of >= 0).int()[of_token])  # (blocks,P): how many tokens of a block need a page
    order = (needed > 0).int().argsort(dim=1, descending=True, stable=True).int()
    plan = Plan()
    plan.mask = BlockMask.from_kv_blocks(
        (needed > 0).sum(1, dtype=torch.int32)[None, None],
        order[None, None],
        BLOCK_SIZE=(QUERY_BLOCK, page_size),
        mask_mod=sees,
        seq_lengths=(num_tokens, num_pages * page_size),
    )
    slots = torch.arange(page_size, device=table.device)
    plan.used = torch.zeros(num_pages, page_size, dtype=torch.bool, device=table.device)
    plan.used[pages] = place[:, None] * page_size + slots < lengths[request, None]  # (used pages,c)
    return plan


@cache
def compiled() -> Callable[..., Any]:
    """Return the compiled flex_attention, which keeps its kernels; all calls in the process share it."""
    return compile_whole(flex_attention)


def unsupported(workload: Workload) -> str | None:
    """Return why flex_attention cannot run a batch, such as a missing compiler; None if it can."""
    if workload.page_size < SMALLEST_PAGE:
        return f"each page is a block of the mask, so it needs page_size >= {SMALLEST_PAGE}"
    if is_on("cpu", workload) and torch.backends.cpu.get_cpu_capability() not in {"AVX2", "AVX512"}:
        return "flex_attention on the CPU needs AVX2"
    if is_on("cpu", workload) and workload.dtype == "float64":
        return "flex_attention has no float64 on the CPU"
    return device(workload.device).missing_compiler()
