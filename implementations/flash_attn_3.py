"""FlashAttention 3, for Hopper GPUs, from the folder `hopper` of flash-attention: module flash_attn_interface.

Some versions return the logsumexp with the output.

Source: J. Shah et al., https://arxiv.org/abs/2407.08608;
https://github.com/Dao-AILab/flash-attention/tree/0251105a/hopper, 3.0.0

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width.
"""

from torch import Tensor

from attnbench.contract import Workload, missing_package, only_on

LARGEST_HEAD_DIM = 256


def attention(query: Tensor, key: Tensor, value: Tensor, window_size: tuple[int, int], num_kv_heads: int) -> Tensor:
    """Compute attention: query (B, H, T, K), key and value (B, G, S, K) -> (B, H, T, K).

    `window_size` is (left, right): query i sees keys i + S - T - left to i + S - T + right; -1 means no limit.
    """
    from flash_attn_interface import flash_attn_func

    tokens = (tensor.transpose(1, 2) for tensor in (query, key, value))  # (B,H,T,K) -> (B,T,H,K)
    output = flash_attn_func(*tokens, causal=window_size == (-1, 0), window_size=window_size)
    attended: Tensor = output[0] if isinstance(output, tuple) else output
    return attended.transpose(1, 2)  # (B,T,H,K) -> (B,H,T,K)


def unsupported(workload: Workload) -> str | None:
    """Return why the kernel cannot run a workload on compute capability 9.0, for which it is made; None if it can."""
    if reason := missing_package("flash_attn_interface", "flash_attn_3") or only_on("cuda", workload, "flash_attn_3"):
        return reason
    if workload.dtype not in {"bfloat16", "float16"}:
        return "flash_attn_3 needs dtype bfloat16 or float16"
    if workload.value_dim != workload.head_dim or workload.head_dim > LARGEST_HEAD_DIM:
        return f"this function of flash_attn_3 needs value_dim == head_dim <= {LARGEST_HEAD_DIM}"
    return "flash_attn_3 needs a head_dim that is a multiple of 8" if workload.head_dim % 8 else None
