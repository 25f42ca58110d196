"""PyTorch's `varlen_attn` over a paged cache: FlashAttention that follows a block table, since torch 2.12.

The window (-1, 0) is causal, counted from the end of each request (bottom-right). Unless num_splits is 1, the length of
the longest request decides how the kernel splits the keys, which changes the last bits of the output.

Source: https://docs.pytorch.org/docs/stable/nn.attention.varlen.html

Shapes: N requests, T query tokens of all requests, P pages, H heads, G key/value heads, K head width.
"""

import inspect

from torch import Tensor

from attnbench.contract import Workload, missing_package, only_on

LARGEST_HEAD_DIM = 256
UNLIMITED = -1


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (UNLIMITED, 0),
) -> Tensor:
    """Compute attention, causal by default: query (T, H, K), both caches (P, page_size, G, K) -> (T, H, K).

    Request n has the queries cu_seqlens_q[n] to cu_seqlens_q[n + 1] - 1, which are the last of its seqused_k[n] tokens.
    Its keys and values are in the pages block_table[n], in order. Shapes: cu_seqlens_q (N + 1,), seqused_k (N,),
    block_table (N, pages of the longest request). softmax_scale is K**-0.5 by default. window_size has the numbers of
    keys that a query sees before and after its own; -1 stands for all.
    """
    from torch.nn.attention.varlen import varlen_attn

    attended: Tensor = varlen_attn(  # type: ignore[assignment] # a tuple only with aux outputs
        query,
        key_cache,
        value_cache,
        cu_seqlens_q,
        None,  # the lengths of keys are seqused_k
        max_seqlen_q,
        max_seqlen_k,
        scale=softmax_scale,
        window_size=window_size,
        enable_gqa=query.shape[1] != key_cache.shape[2],
        seqused_k=seqused_k,
        block_table=block_table,
    )
    return attended


def unsupported(workload: Workload) -> str | None:
    """Return why the kernel cannot run a batch; None if it can."""
    if missing_package("torch.nn.attention.varlen"):
        return "this version of torch has no varlen_attn"
    if reason := only_on("cuda", workload, "varlen_attn"):
        return reason
    from torch.nn.attention import varlen

    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        return "varlen_attn reads no pages before torch 2.12"
    if workload.dtype not in {"bfloat16", "float16"}:
        return "varlen_attn needs dtype bfloat16 or float16"
    if workload.value_dim != workload.head_dim or workload.head_dim > LARGEST_HEAD_DIM:
        return f"varlen_attn needs value_dim == head_dim <= {LARGEST_HEAD_DIM}"
    return None
