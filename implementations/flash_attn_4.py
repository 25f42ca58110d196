"""FlashAttention 4, written in CuTe DSL for Hopper and Blackwell GPUs: package flash-attn-4, module flash_attn.cute.

A window without a limit is None, not -1. The first call compiles the kernel. The logsumexp is returned with the output.

Source: https://github.com/Dao-AILab/flash-attention/blob/fa4-v4.0.0.beta27/flash_attn/cute/interface.py

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width.
"""

from torch import Tensor

from attnbench.contract import Workload, device, missing_package, only_on

HOPPER = 9
LARGEST_HEAD_DIM = {HOPPER: 256, 10: 128, 11: 128}
"""Largest width by major compute capability. On 10 and 11 there is also a kernel for head_dim = value_dim = 256."""
OWN_KERNEL = 256


def attention(query: Tensor, key: Tensor, value: Tensor, window_size: tuple[int, int], num_kv_heads: int) -> Tensor:
    """Compute attention: query (B, H, T, K), key and value (B, G, S, K) -> (B, H, T, K).

    `window_size` is (left, right): query i sees keys i + S - T - left to i + S - T + right; -1 means no limit.
    """
    from flash_attn.cute import flash_attn_func

    left, right = (None if limit < 0 else limit for limit in window_size)
    tokens = (tensor.transpose(1, 2) for tensor in (query, key, value))  # (B,H,T,K) -> (B,T,H,K)
    output = flash_attn_func(*tokens, causal=window_size == (-1, 0), window_size=(left, right))
    attended: Tensor = output[0] if isinstance(output, tuple) else output
    return attended.transpose(1, 2)  # (B,T,H,K) -> (B,H,T,K)


def unsupported(workload: Workload) -> str | None:
    """Return why the kernel cannot run a workload; None if it can. Source: `_validate_head_dims` of the package."""
    if reason := missing_package("flash_attn.cute", "flash_attn_4") or only_on("cuda", workload, "flash_attn_4"):
        return reason
    if workload.dtype not in {"bfloat16", "float16"}:
        return "flash_attn_4 needs dtype bfloat16 or float16"
    major, _ = device(workload.device).compute_capability() or (HOPPER, 0)
    largest = LARGEST_HEAD_DIM.get(major, OWN_KERNEL)
    if workload.value_dim != workload.head_dim or (workload.head_dim > largest and workload.head_dim != OWN_KERNEL):
        own = f", or {OWN_KERNEL}" if largest < OWN_KERNEL else ""
        return f"this function of flash_attn_4 needs value_dim == head_dim <= {largest}{own} on this GPU"
    return "flash_attn_4 needs a head_dim that is a multiple of 8" if workload.head_dim % 8 else None
