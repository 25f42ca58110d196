"""The attention function `sdpa` of the package transformers, the default of most models on its hub.

No mask is created where `is_causal` can express it, as in the package's own masking.

Source: https://github.com/huggingface/transformers, src/transformers/integrations/sdpa_attention.py

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from attnbench.contract import Attention, BoundMask, Implementation, Weights, Workload, missing_package


class TransformersSdpa(Attention):
    """One call of the function that the package's models call, with the few module attributes that it reads."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.function: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
        groups = self.num_heads // self.num_kv_heads
        self.as_module: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=False, training=False)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        is_causal = mask.is_causal and query.shape[2] > 1  # the function shows a single query every key
        attended: Tensor = self.function(
            self.as_module,
            query,
            key,
            value,
            None if is_causal else mask.visible,
            scaling=mask.scale_for(query.shape[-1]),
            is_causal=is_causal,
        )[0]
        return attended.transpose(1, 2)  # (B,T,H,V) -> (B,H,T,V)


def unsupported(workload: Workload) -> str | None:
    """Return why the function cannot run a workload, or None."""
    if missing := missing_package("transformers"):
        return missing
    if workload.mask_rule.changes_scores:
        return f"this form hands over no mask {workload.mask_rule.name}"
    return "this form has no dropout" if workload.dropout > 0 else None


IMPLEMENTATION = Implementation(
    build=TransformersSdpa,
    source="https://github.com/huggingface/transformers",
    unsupported=unsupported,
    features=("scale",),
)
