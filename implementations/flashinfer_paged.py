"""FlashInfer over a paged cache: `BatchPrefillWithPagedKVCacheWrapper`, which also computes decodes.

Each call plans its work and then runs. A model plans once for all of its layers, so that planning costs less per layer.

Source: Z. Ye et al., https://arxiv.org/abs/2501.01005; flashinfer/prefill.py of flashinfer-python 0.7.4

Shapes: N requests, T query tokens of all requests, P pages, H heads, G key/value heads, K head width.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnbench.contract import Workload, missing_package, only_on

HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 * 2**20  # as in FlashInfer's own example


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, 0),
) -> Tensor:
    """Compute causal attention: query (T, H, K), key_cache and value_cache (P, page_size, G, K) -> (T, H, K).

    Request n has the queries cu_seqlens_q[n] to cu_seqlens_q[n + 1] - 1, which are the last of its seqused_k[n] tokens.
    Its keys and values are in the pages block_table[n], in order. Shapes: cu_seqlens_q (N + 1,), seqused_k (N,),
    block_table (N, pages of the longest request). softmax_scale is K**-0.5 by default. A query sees at most
    window_size[0] keys before its own, or all if that is -1.
    """
    page_size, planner = key_cache.shape[1], planner_on(query.device)
    num_pages = (seqused_k + page_size - 1) // page_size  # (N,)
    is_used = torch.arange(block_table.shape[1], device=query.device) < num_pages[:, None]
    planner.plan(
        cu_seqlens_q,
        F.pad(num_pages.cumsum(0), (1, 0)).int(),  # where the pages of each request begin, (N + 1,)
        block_table[is_used],
        seqused_k - (num_pages - 1) * page_size,  # tokens in the last page of each request
        query.shape[1],
        key_cache.shape[2],
        query.shape[2],
        page_size,
        causal=True,
        sm_scale=softmax_scale,
        window_left=window_size[0],
        q_data_type=query.dtype,
        kv_data_type=key_cache.dtype,
    )
    attended: Tensor = planner.run(query, (key_cache, value_cache))
    return attended


@cache
def planner_on(device: torch.device) -> Any:  # noqa: ANN401 - a class of flashinfer
    """Return the object that plans and runs, with its workspace, created once for each device."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    return BatchPrefillWithPagedKVCacheWrapper(torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "NHD")


def unsupported(workload: Workload) -> str | None:
    """Return why the kernel cannot run a batch; None if it can."""
    if reason := missing_package("flashinfer") or only_on("cuda", workload, "flashinfer"):
        return reason
    if workload.dtype not in {"bfloat16", "float16"}:
        return "flashinfer needs dtype bfloat16 or float16"
    if workload.value_dim != workload.head_dim or workload.head_dim not in HEAD_DIMS:
        return f"flashinfer needs value_dim == head_dim, one of {', '.join(map(str, HEAD_DIMS))}"
    if not all(request.total for request in workload.requests):
        return "flashinfer cannot take a request without keys"
    return None
