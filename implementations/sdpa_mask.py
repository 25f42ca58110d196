"""`scaled_dot_product_attention` that is always handed its mask as a dense tensor, as much code in the field does.

What `is_causal=True` saves, and what a mask costs that hides nothing, is the difference to `sdpa`.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.contract import Attention, BoundMask, Implementation, Workload


class SdpaMask(Attention):
    """One call; the mask is boolean, True where visible, and is made once."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask.keep("dense", lambda: dense(mask)),
            enable_gqa=query.shape[1] != key.shape[1],
        )


def dense(mask: BoundMask) -> Tensor:
    """(T, S) or (B, 1, T, S), never smaller: all True under mask `none`."""
    everywhere = torch.ones(mask.sizes[1:], dtype=torch.bool, device=mask.device)
    return everywhere if mask.visible is None else mask.visible & everywhere


def unsupported(workload: Workload) -> str | None:
    """What a boolean mask cannot say."""
    if workload.mask_rule.changes_scores:
        return f"mask {workload.mask_rule.name} changes scores, which a boolean mask cannot say"
    return "this form has no dropout" if workload.dropout > 0 else None


IMPLEMENTATION = Implementation(
    build=SdpaMask,
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
    unsupported=unsupported,
)
