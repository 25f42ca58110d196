"""`scaled_dot_product_attention` restricted to its MATH backend: separate products and a softmax, with dense weights.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.

Peak memory beyond the inputs: scores, weights, a boolean of the same shape, the scaled key, and a boolean for each row:
(8 + 1) B H T S + 4 B G S K + B H T bytes in float32.
"""

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnbench.contract import Attention, BoundMask, Implementation, Workload, dense_flops


class SdpaMath(Attention):
    """One call with one backend."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=None if mask.is_causal else mask.explicit(query.dtype),
                is_causal=mask.is_causal,  # aligned at the start (top-left)
                dropout_p=self.dropout,
                scale=mask.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )


def unsupported(workload: Workload) -> str | None:
    """Return why the call cannot run a workload, or None."""
    return None if workload.mask_rule.is_additive else "scaled_dot_product_attention has no softcap"


IMPLEMENTATION = Implementation(
    build=SdpaMath,
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html",
    executed_flops=dense_flops,
    backend="math",
    unsupported=unsupported,
    has_dropout=True,
    features=("scale", "learned bias"),
)
