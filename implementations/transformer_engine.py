"""Transformer Engine's `DotProductAttention`, which chooses among FlashAttention, cuDNN and unfused products.

In the environment, NVTE_FLASH_ATTN=0 disables FlashAttention, and NVTE_FUSED_ATTN=0 disables cuDNN.

Source: https://github.com/NVIDIA/TransformerEngine/blob/v2.18/transformer_engine/pytorch/attention/
dot_product_attention/dot_product_attention.py

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from functools import lru_cache
from typing import Any

from torch import Tensor

from attnbench.contract import Workload, missing_package, only_on


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    is_causal: bool = False,
    is_causal_bottom_right: bool = False,
    num_kv_heads: int = 1,
) -> Tensor:
    """Compute attention: query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
    mask = "causal" if is_causal else "causal_bottom_right" if is_causal_bottom_right else "no_mask"
    is_cross = query.shape[2] != key.shape[2]
    widths = query.shape[-1], value.shape[-1]
    module = module_for(query.shape[1], num_kv_heads, widths, mask, scale, is_cross=is_cross)
    tokens = (tensor.transpose(1, 2) for tensor in (query, key, value))  # (B,H,T,K) -> (B,T,H,K)
    merged: Tensor = module(*tokens)  # (B,T,H*V)
    attended: Tensor = merged.unflatten(-1, (query.shape[1], -1)).transpose(1, 2)  # (B,T,H*V) -> (B,H,T,V)
    return attended


@lru_cache
def module_for(
    num_heads: int, num_kv_heads: int, widths: tuple[int, int], mask: str, scale: float | None, *, is_cross: bool
) -> Any:  # noqa: ANN401 - the package's
    """Return the module, which has no weights, for these sizes and this mask.

    `widths` is (K, V), and a `scale` of None means K**-0.5. The inputs of the module have tokens before heads:
    (B, T, H, K).
    """
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        num_attention_heads=num_heads,
        kv_channels=widths,
        num_gqa_groups=num_kv_heads,
        qkv_format="bshd",
        attn_mask_type=mask,
        attention_type="cross" if is_cross else "self",
        softmax_scale=scale,
    )


def unsupported(workload: Workload) -> str | None:
    """Return why the module cannot run a workload with a fused kernel; None if it can."""
    if reason := missing_package("transformer_engine.pytorch.attention"):
        return reason
    if reason := only_on("cuda", workload, "transformer_engine"):
        return reason
    if workload.dtype not in {"bfloat16", "float16"}:
        return "transformer_engine needs dtype bfloat16 or float16"
    if workload.head_dim % 8 or workload.value_dim % 8:
        return "the fused kernels of transformer_engine need head_dim and value_dim that are multiples of 8"
    if workload.mask_rule.has_empty_rows(1, workload.seq_len, workload.kv_len):
        return "transformer_engine does not define the output of queries that see no key"
    return None
