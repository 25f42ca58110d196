"""FlashAttention 2 over a paged cache, from the package flash-attn: `flash_attn_varlen_func` with a block table.

The causal mask is counted from the end of each request (bottom-right). Pages must have a multiple of 256 tokens. The
kernel for decodes, which splits the keys, runs only if the window has no limit on either side.

Source: https://github.com/Dao-AILab/flash-attention/blob/v2.8.3/flash_attn/flash_attn_interface.py

Shapes: N requests, T query tokens of all requests, P pages, H heads, G key/value heads, K head width.
"""

from torch import Tensor

from attnbench.contract import Workload, missing_package, only_on

LARGEST_HEAD_DIM = 256
TOKENS_OF_PAGES = 256


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, 0),
) -> Tensor:
    """Compute causal attention: query (T, H, K), key_cache and value_cache (P, page_size, G, K) -> (T, H, K).

    Request n has the queries cu_seqlens_q[n] to cu_seqlens_q[n + 1] - 1, which are the last of its tokens, and
    seqused_k[n] = cu_seqlens_k[n + 1] - cu_seqlens_k[n] keys, in the pages block_table[n], in order. Shapes:
    cu_seqlens_q and cu_seqlens_k (N + 1,), seqused_k (N,), block_table (N, pages of the longest request).
    softmax_scale is K**-0.5 by default. A query sees at most window_size[0] keys before its own, or all if that is -1.
    """
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    left, _ = window_size
    attended: Tensor = flash_attn_varlen_func(
        query,
        key_cache,
        value_cache,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=True,
        window_size=(left, -1 if left < 0 else 0),
        block_table=block_table,
    )
    return attended


def unsupported(workload: Workload) -> str | None:
    """Return why the kernel cannot run a batch; None if it can. Limits are those of flash-attn 2.8."""
    if reason := missing_package("flash_attn.flash_attn_interface") or only_on("cuda", workload, "flash_attn"):
        return reason
    if workload.dtype not in {"bfloat16", "float16"}:
        return "flash_attn needs dtype bfloat16 or float16"
    if workload.page_size % TOKENS_OF_PAGES:
        return f"flash_attn needs pages of {TOKENS_OF_PAGES} tokens, or a multiple: give page_size={TOKENS_OF_PAGES}"
    if workload.value_dim != workload.head_dim or workload.head_dim > LARGEST_HEAD_DIM:
        return f"this function of flash_attn needs value_dim == head_dim <= {LARGEST_HEAD_DIM}"
    news = {request.new for request in workload.requests}
    if news == {0, 1} and workload.num_heads != workload.num_kv_heads:
        return "with grouped heads, flash_attn needs a new token in each request of a batch of decodes"
    return None
