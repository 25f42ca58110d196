"""Attention over a paged cache in its simplest form: gather the pages of each request, then call SDPA.

The gather is part of the call: it writes all keys and values once and reads them again.

Shapes: N requests, T query tokens of all requests, t query tokens and s keys of one request, P pages, H heads, G
key/value heads, K head width, V value width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, 0),
) -> Tensor:
    """Compute causal attention: query (T, H, K), caches (P, page_size, G, K) and (P, page_size, G, V) -> (T, H, V).

    Request n has the queries cu_seqlens_q[n] to cu_seqlens_q[n + 1] - 1, which are the last of its seqused_k[n] tokens.
    Its keys and values are in the pages block_table[n], in order. Shapes: cu_seqlens_q (N + 1,), seqused_k (N,),
    block_table (N, pages of the longest request). k_scale and v_scale, (G,) or (1,), multiply an 8-bit cache.
    softmax_scale is K**-0.5 by default. A query sees at most window_size[0] keys before its own, or all if that is -1.
    """
    attended = []
    bounds, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    for request, length in enumerate(lengths):
        tokens = query[bounds[request] : bounds[request + 1]]  # (t,H,K)
        if len(tokens) == 0:
            continue
        keys = gather(key_cache, block_table[request], length, k_scale, query.dtype)  # (G,s,K)
        values = gather(value_cache, block_table[request], length, v_scale, query.dtype)  # (G,s,V)
        mask, before, (left, _) = None, length - len(tokens), window_size
        if len(tokens) > 1 or left >= 0:  # the new tokens are the last of the keys: token i sees keys up to s - t + i
            mask = torch.ones(len(tokens), length, dtype=torch.bool, device=query.device).tril(before)
        if mask is not None and left >= 0:  # and no keys before s - t + i - left
            mask = mask.triu(before - left)
        heads = F.scaled_dot_product_attention(
            tokens.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )  # (1,H,t,V)
        attended.append(heads[0].transpose(0, 1))  # (H,t,V) -> (t,H,V)
    return torch.cat(attended)


def gather(cache: Tensor, pages: Tensor, length: int, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Gather the first `length` slots of a request's pages: (P, page_size, G, K) -> (G, s, K).

    With a `scale` (G,) or (1,), the slots are multiplied by it and converted to `dtype`.
    """
    page_size = cache.shape[1]
    used = pages[: -(-length // page_size)]  # the last page may be partly used
    slots = cache[used].flatten(0, 1)[:length]  # (pages,page_size,G,K) -> (s,G,K)
    if scale is not None:
        slots = (slots.float() * scale[:, None]).to(dtype)
    return slots.transpose(0, 1)  # (s,G,K) -> (G,s,K)
