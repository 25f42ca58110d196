"""Transformer Engine's `DotProductAttention`, which chooses among FlashAttention, cuDNN and unfused products.

NVTE_FLASH_ATTN=0 or NVTE_FUSED_ATTN=0 in the environment disables one of them. Masks are aligned at the start
(top-left) or at the end (bottom-right), as the workload says.

Source: https://github.com/NVIDIA/TransformerEngine/blob/v2.18/transformer_engine/pytorch/attention/
dot_product_attention/dot_product_attention.py

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from typing import Any

from torch import Tensor

from attnbench.contract import Attention, BoundMask, Implementation, Weights, Workload, missing_package, only_on

MASKS = {"none": "no_mask", "causal": "causal", "causal_bottom_right": "causal_bottom_right"}
"""The package's name for each mask."""


class TransformerEngine(Attention):
    """One call of a module without weights, with tokens before heads; it is created once for each mask."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        from transformer_engine.pytorch import DotProductAttention

        self.kind: Any = DotProductAttention

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        module = mask.keep(("transformer_engine", query.shape[1]), lambda: self.made(query, key, value, mask))
        tokens = (tensor.transpose(1, 2) for tensor in (query, key, value))  # (B,H,T,K) -> (B,T,H,K)
        merged: Tensor = module(*tokens)  # (B,T,H*V)
        attended: Tensor = merged.unflatten(-1, (query.shape[1], -1)).transpose(1, 2)  # (B,T,H*V) -> (B,H,T,V)
        return attended

    def made(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Any:  # noqa: ANN401 - the package's
        """The module for these sizes and this mask."""
        return self.kind(
            num_attention_heads=query.shape[1],
            kv_channels=(query.shape[-1], value.shape[-1]),
            num_gqa_groups=key.shape[1],
            qkv_format="bshd",
            attn_mask_type=MASKS[mask.rule.name],
            attention_type="self" if query.shape[2] == key.shape[2] else "cross",
            softmax_scale=mask.scale,
        )


def unsupported(workload: Workload) -> str | None:
    """Return why the module cannot run a workload, or None; workloads that it silently computes unfused are refused."""
    if reason := missing_package("transformer_engine.pytorch.attention"):
        return reason
    if reason := only_on("cuda", workload, "transformer_engine"):
        return reason
    if workload.dtype not in {"bfloat16", "float16"}:
        return "transformer_engine needs dtype bfloat16 or float16"
    if workload.head_dim % 8 or workload.value_dim % 8:
        return "the fused kernels of transformer_engine need head_dim and value_dim that are multiples of 8"
    name = workload.mask_rule.name
    if name not in MASKS:
        return f"this form of transformer_engine takes no mask {name}, but {', '.join(MASKS)}"
    if workload.mask_rule.has_empty_rows(1, workload.seq_len, workload.kv_len):
        return "transformer_engine promises nothing for queries that see no key"
    return "this form of transformer_engine has no dropout" if workload.dropout > 0 else None


IMPLEMENTATION = Implementation(
    build=TransformerEngine,
    source="https://github.com/NVIDIA/TransformerEngine/blob/v2.18/transformer_engine/pytorch/attention",
    unsupported=unsupported,
    features=("scale",),
)
