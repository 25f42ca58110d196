"""SageAttention: queries and keys in 8 bits, inference only. It is approximate, and the check reports its error.

Source: J. Zhang et al., https://arxiv.org/abs/2410.02367;
https://github.com/thu-ml/SageAttention/blob/v2.2.0/sageattention/core.py

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from torch import Tensor

from attnbench.contract import Workload, missing_package, only_on

LARGEST_HEAD_DIM = 128


def attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, num_kv_heads: int) -> Tensor:
    """Compute attention: query (B, H, T, K), key and value (B, G, S, K) -> (B, H, T, K)."""
    from sageattention import sageattn

    attended: Tensor = sageattn(query, key, value, tensor_layout="HND", is_causal=is_causal)  # heads before tokens
    return attended


def unsupported(workload: Workload) -> str | None:
    """Return why the kernel cannot run a workload; None if it can."""
    if reason := missing_package("sageattention") or only_on("cuda", workload, "sageattention"):
        return reason
    if workload.direction != "inference":
        return "sageattention has no gradients"
    if workload.dtype not in {"bfloat16", "float16"}:
        return "sageattention needs dtype bfloat16 or float16"
    if workload.value_dim != workload.head_dim or workload.head_dim > LARGEST_HEAD_DIM:
        return f"sageattention needs value_dim == head_dim <= {LARGEST_HEAD_DIM}"
    if workload.mask != "none" and workload.seq_len != workload.kv_len:
        return "sageattention needs kv_len == seq_len under a causal mask"
    return None
