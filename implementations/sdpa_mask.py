"""`scaled_dot_product_attention` that is always handed its mask as a dense tensor, as much code in the field does.

What `is_causal=True` saves, and what a mask costs that hides nothing, is the difference to `sdpa`.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from attnbench.contract import Attention, BoundMask, Implementation, Workload


class SdpaMask(Attention):
    """One call; the mask is made once: boolean, True where visible, or numbers where it changes scores."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask.keep("dense", lambda: dense(mask, query.dtype)),
            dropout_p=self.dropout,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def dense(mask: BoundMask, dtype: torch.dtype) -> Tensor:
    """(T, S), or broadcastable to (B, H, T, S), never smaller than (T, S): all True under mask `none`."""
    everywhere = torch.ones(mask.sizes[1:], dtype=torch.bool, device=mask.device)
    numbers = mask.bias(dtype) if mask.changes_scores else None
    if numbers is not None:
        return numbers.where(everywhere, 0.0)
    return everywhere if mask.visible is None else mask.visible & everywhere


def unsupported(workload: Workload) -> str | None:
    """What a dense mask cannot say."""
    return None if workload.mask_rule.is_additive else "scaled_dot_product_attention has no softcap"


IMPLEMENTATION = Implementation(
    build=SdpaMask,
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
    unsupported=unsupported,
    has_dropout=True,
)
