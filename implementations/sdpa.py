"""`scaled_dot_product_attention` as PyTorch ships it: the dispatcher chooses the kernel.

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from torch import Tensor
from torch.nn import functional as F


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention: query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V).

    `mask` is broadcastable to (B, H, T, S): boolean, True where visible, or additive. `scale` is K**-0.5 by default.
    """
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=is_causal,  # aligned at the start (top-left); the kernel skips the hidden half
        dropout_p=dropout,
        scale=scale,
        enable_gqa=enable_gqa,
    )
