"""The function `eager_attention_forward` of the package transformers' Llama: two products and a softmax.

The softmax is in float32 for every dtype. The mask is added as the dtype's lowest number.

Source: https://github.com/huggingface/transformers, src/transformers/models/llama/modeling_llama.py

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attnbench.contract import Attention, BoundMask, Implementation, Weights, Workload, missing_package


class TransformersEager(Attention):
    """One call of the function that the package's models call, with the few module attributes that it reads."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        from transformers.models.llama.modeling_llama import eager_attention_forward

        self.function: Any = eager_attention_forward
        groups = self.num_heads // self.num_kv_heads
        self.as_module: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=False, training=False)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        attended: Tensor = self.function(
            self.as_module,
            query,
            key,
            value,
            None if mask.is_none else mask.keep(f"lowest {query.dtype}", lambda: lowest(mask, query.dtype)),
            scaling=mask.scale_for(query.shape[-1]),
        )[0]
        return attended.transpose(1, 2)  # (B,T,H,V) -> (B,H,T,V)


def lowest(mask: BoundMask, dtype: torch.dtype) -> Tensor:
    """(B or 1, 1, T or 1, S): 0 where visible, the lowest number of the dtype where hidden."""
    assert mask.hidden is not None
    added = torch.zeros(mask.hidden.shape, dtype=dtype, device=mask.device)
    return added.masked_fill_(mask.hidden, torch.finfo(dtype).min)


def unsupported(workload: Workload) -> str | None:
    """Return why the function cannot run a workload, or None."""
    if missing := missing_package("transformers"):
        return missing
    if workload.dtype == "float64":
        return "the function makes its softmax in float32, whatever the dtype: half of the digits of float64 are lost"
    if workload.mask_rule.changes_scores:
        return f"this form hands over no mask {workload.mask_rule.name}"
    if workload.mask_rule.has_empty_rows(workload.batch_size, workload.seq_len, workload.kv_len):
        return "the function gives the mean of all values to a query that sees no key"
    return "this form has no dropout" if workload.dropout > 0 else None


IMPLEMENTATION = Implementation(
    build=TransformersEager,
    source="https://github.com/huggingface/transformers",
    unsupported=unsupported,
    features=("scale",),
)
