"""Attention over a paged cache, page by page, with a running maximum and sum: it neither gathers keys nor keeps scores.

This is how kernels read a cache, with one block of threads for each request and head: "Efficient Memory Management for
Large Language Model Serving with PagedAttention", https://arxiv.org/abs/2309.06180, section 4.1.

Shapes: N requests, T query tokens of all requests, t query tokens of one request, P pages, c slots of a page, H heads,
G key/value heads, K head width, V value width.
"""

import torch
from torch import Tensor


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
) -> Tensor:
    """Compute causal attention: query (T, H, K), caches (P, page_size, G, K) and (P, page_size, G, V) -> (T, H, V).

    Request n has the queries cu_seqlens_q[n] to cu_seqlens_q[n + 1] - 1, which are the last of its seqused_k[n] tokens.
    Its keys and values are in the pages block_table[n], in order. Shapes: cu_seqlens_q (N + 1,), seqused_k (N,),
    block_table (N, pages of the longest request). k_scale and v_scale, (G,) or (1,), multiply an 8-bit cache.
    softmax_scale is K**-0.5 by default.
    """
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    page_size, num_groups = key_cache.shape[1:3]
    attended = query.new_empty(*query.shape[:2], value_cache.shape[-1])  # (T,H,V)
    bounds, lengths, table = cu_seqlens_q.tolist(), seqused_k.tolist(), block_table.tolist()
    for request, length in enumerate(lengths):
        start, end = bounds[request], bounds[request + 1]
        if start == end:
            continue
        tokens = query[start:end].float() * scale  # (t,H,K)
        tokens = tokens.unflatten(1, (num_groups, -1)).permute(1, 2, 0, 3)  # (t,H,K) -> (G,H/G,t,K)
        last_key = length - (end - start) + torch.arange(end - start, device=query.device)  # (t,): last visible keys
        largest = tokens.new_full((*tokens.shape[:3], 1), -torch.inf)  # (G,H/G,t,1)
        total = torch.zeros_like(largest)
        weighted = tokens.new_zeros(*tokens.shape[:3], value_cache.shape[-1])  # (G,H/G,t,V)
        for number in range(-(-length // page_size)):
            page, first = table[request][number], number * page_size
            used = min(page_size, length - first)  # the rest of the last page may contain anything, even NaN
            keys = key_cache[page, :used].float().transpose(0, 1)[:, None]  # (c,G,K) -> (G,1,c,K)
            values = value_cache[page, :used].float().transpose(0, 1)[:, None]  # (c,G,V) -> (G,1,c,V)
            if k_scale is not None and v_scale is not None:
                keys, values = keys * k_scale[:, None, None, None], values * v_scale[:, None, None, None]
            scores = tokens @ keys.transpose(-2, -1)  # (G,H/G,t,K) @ (G,1,K,c) -> (G,H/G,t,c)
            places = first + torch.arange(used, device=query.device)
            scores = scores.where(places <= last_key[:, None], -torch.inf)
            now = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
            now_finite = now.where(now > -torch.inf, 0.0)  # 0 if no key is visible so far
            powers, shrink = (scores - now_finite).exp(), (largest - now_finite).exp()
            total = total * shrink + powers.sum(dim=-1, keepdim=True)
            weighted = weighted * shrink + powers @ values  # (G,H/G,t,c) @ (G,1,c,V) -> (G,H/G,t,V)
            largest = now
        result = (weighted / total).permute(2, 0, 1, 3).flatten(1, 2)  # (G,H/G,t,V) -> (t,G,H/G,V) -> (t,H,V)
        attended[start:end] = result.to(query.dtype)
    return attended
