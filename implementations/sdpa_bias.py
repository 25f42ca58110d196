"""`scaled_dot_product_attention` with PyTorch's causal biases: tensors without data that state the mask's alignment.

`causal_upper_left` becomes `is_causal=True`. `causal_lower_right` has kernels on CUDA only; on the CPU every call
builds the dense mask again, unless seq_len equals kv_len.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.bias.CausalBias.html

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from functools import lru_cache

from torch import Tensor
from torch.nn import functional as F

from attnbench.contract import Workload


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    is_causal_bottom_right: bool,
    scale: float | None = None,
    dropout: float = 0.0,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention: query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=causal_bias(query.shape[2], key.shape[2], is_at_start=is_causal),
        dropout_p=dropout,
        scale=scale,
        enable_gqa=enable_gqa,
    )


@lru_cache
def causal_bias(query_len: int, key_len: int, *, is_at_start: bool) -> Tensor:
    """Return a causal bias (T, S), aligned at the start (top-left) if `is_at_start`, else at the end (bottom-right)."""
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # takes as long as importing torch

    return causal_upper_left(query_len, key_len) if is_at_start else causal_lower_right(query_len, key_len)


def unsupported(workload: Workload) -> str | None:
    """Return why a causal bias cannot run a workload, or why PyTorch warns about it; None if neither is so."""
    if workload.mask == "none":
        return "PyTorch's causal biases express causal masks only"
    if workload.mask == "causal_bottom_right" and workload.seq_len > workload.kv_len:
        return "PyTorch warns that causal_lower_right gives NaN to queries that see no key: it needs kv_len >= seq_len"
    return None
