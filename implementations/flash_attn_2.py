"""FlashAttention 2, from the package flash-attn: since 2.1 its causal mask is aligned at the end (bottom-right).

A query that sees no key gets 0. Grouped heads are not copied. `unsupported` looks for a module of the package, because
the package flash-attn-4 alone also creates a folder flash_attn.

Source: T. Dao, https://arxiv.org/abs/2307.08691;
https://github.com/Dao-AILab/flash-attention/blob/v2.8.3/flash_attn/flash_attn_interface.py

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width.
"""

from torch import Tensor

from attnbench.contract import Workload, missing_package, only_on

LARGEST_HEAD_DIM = 256


def attention(query: Tensor, key: Tensor, value: Tensor, window_size: tuple[int, int], num_kv_heads: int) -> Tensor:
    """Compute attention: query (B, H, T, K), key and value (B, G, S, K) -> (B, H, T, K).

    `window_size` is (left, right): query i sees keys i + S - T - left to i + S - T + right; -1 means no limit.
    """
    from flash_attn.flash_attn_interface import flash_attn_func

    tokens = (tensor.transpose(1, 2) for tensor in (query, key, value))  # (B,H,T,K) -> (B,T,H,K)
    attended: Tensor = flash_attn_func(*tokens, causal=window_size == (-1, 0), window_size=window_size)
    return attended.transpose(1, 2)  # (B,T,H,K) -> (B,H,T,K)


def unsupported(workload: Workload) -> str | None:
    """Return why the kernel cannot run a workload; None if it can. Limits are those of flash-attn 2.8."""
    if reason := missing_package("flash_attn.flash_attn_interface") or only_on("cuda", workload, "flash_attn"):
        return reason
    if workload.dtype not in {"bfloat16", "float16"}:
        return "flash_attn needs dtype bfloat16 or float16"
    if workload.value_dim != workload.head_dim or workload.head_dim > LARGEST_HEAD_DIM:
        return f"this function of flash_attn needs value_dim == head_dim <= {LARGEST_HEAD_DIM}"
    return None
