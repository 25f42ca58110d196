"""`scaled_dot_product_attention` that always gets its mask as a dense tensor, as in much existing code.

The difference to `sdpa` shows the gain of `is_causal=True`, and the cost of a mask that hides nothing.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from attnbench.contract import Attention, BoundMask, Implementation, Workload


class SdpaMask(Attention):
    """One call. The mask is created once: boolean, True where visible, or numbers if it changes scores."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        if mask.rule.is_learned or mask.sinks is not None:
            made = dense(mask, query.dtype)
        else:
            made = mask.keep("dense", lambda: dense(mask, query.dtype))
        if mask.sinks is not None:
            key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))  # one more key, of zeros
            made = with_sinks(made, mask.sinks)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=made,
            dropout_p=self.dropout,
            scale=mask.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def dense(mask: BoundMask, dtype: torch.dtype) -> Tensor:
    """(T, S), or broadcastable to (B, H, T, S), never smaller than (T, S): all True under mask `none`."""
    everywhere = torch.ones(mask.sizes[1:], dtype=torch.bool, device=mask.device)
    numbers = mask.bias(dtype) if mask.changes_scores else None
    if numbers is not None:
        return numbers.where(everywhere, 0.0)
    return everywhere if mask.visible is None else mask.visible & everywhere


def with_sinks(mask: Tensor, sinks: Tensor) -> Tensor:
    """A dense mask, boolean or of numbers, with the score of one more key for each head (H,): (..., H, T, S + 1)."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=sinks.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    shape = (*mask.shape[:-3], len(sinks), *mask.shape[-2:])  # (T,S) -> (H,T,S), (B,1,T,S) -> (B,H,T,S)
    return torch.cat([mask.expand(shape), sinks[:, None, None].expand(*shape[:-1], 1)], dim=-1)


def unsupported(workload: Workload) -> str | None:
    """Return why a dense mask cannot express a workload, or None."""
    return None if workload.mask_rule.is_additive else "scaled_dot_product_attention has no softcap"


IMPLEMENTATION = Implementation(
    build=SdpaMask,
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
    unsupported=unsupported,
    has_dropout=True,
    features=("scale", "sinks", "learned bias"),
)
