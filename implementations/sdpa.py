"""`scaled_dot_product_attention` as PyTorch ships it: the dispatcher chooses the kernel.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from torch import Tensor
from torch.nn import functional as F

from attnbench.contract import Attention, BoundMask, Implementation, Workload


class Sdpa(Attention):
    """One call."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if mask.is_causal else mask.explicit(query.dtype),
            is_causal=mask.is_causal,  # aligned at the start (top-left); the kernel skips the hidden half
            dropout_p=self.dropout,
            scale=mask.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def unsupported(workload: Workload) -> str | None:
    """What the call has no argument for."""
    return None if workload.mask_rule.is_additive else "scaled_dot_product_attention has no softcap"


IMPLEMENTATION = Implementation(
    build=Sdpa,
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
    unsupported=unsupported,
    has_dropout=True,
    features=("scale", "learned bias"),
)
