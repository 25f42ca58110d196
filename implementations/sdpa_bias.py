"""`scaled_dot_product_attention` with PyTorch's causal biases: tensors without data that name the alignment.

`causal_upper_left` becomes `is_causal=True`. `causal_lower_right` has kernels on CUDA only; on the CPU every call
builds the dense mask again, unless seq_len equals kv_len.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.bias.CausalBias.html

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from torch import Tensor
from torch.nn import functional as F

from attnbench.contract import Attention, BoundMask, Implementation, Weights, Workload

MASKS = ("causal", "causal_bottom_right")


class SdpaBias(Attention):
    """One call; the bias is created once."""

    def __init__(self, weights: Weights) -> None:
        """Import the biases here: the import loads torch's compiler and takes as long as torch itself."""
        from torch.nn.attention import bias

        super().__init__(weights)
        self.biases = {"causal": bias.causal_upper_left, "causal_bottom_right": bias.causal_lower_right}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask.keep("causal bias", lambda: self.biases[mask.rule.name](*mask.sizes[1:])),
            dropout_p=self.dropout,
            scale=mask.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def unsupported(workload: Workload) -> str | None:
    """Return why a causal bias cannot run a workload, or None; cases that PyTorch warns about are refused."""
    if workload.mask_rule.name not in MASKS:
        return f"PyTorch's causal biases stand for the masks {' and '.join(MASKS)} alone"
    if workload.mask == "causal_bottom_right" and workload.seq_len > workload.kv_len:
        return "causal_lower_right gives NaN, PyTorch warns, to queries that see no key, as here where T > S"
    return None


IMPLEMENTATION = Implementation(
    build=SdpaBias,
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.bias.CausalBias.html",
    unsupported=unsupported,
    has_dropout=True,
    features=("scale",),
)
