"""`scaled_dot_product_attention` restricted to its MATH backend: separate products and a softmax, with dense weights.

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.

Peak memory beyond the inputs, in bytes for float32: (8 + 1) B H T S of scores, weights and a boolean of their shape,
4 B G S K of the scaled key, and B H T of a boolean for each row.
"""

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


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
    with sdpa_kernel(SDPBackend.MATH):  # torch raises if it cannot run: no fallback
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_causal,  # aligned at the start (top-left)
            dropout_p=dropout,
            scale=scale,
            enable_gqa=enable_gqa,
        )
