"""`scaled_dot_product_attention` with PyTorch's causal biases: tensors without numbers that tell the alignment.

`causal_upper_left` ends in `is_causal=True`. `causal_lower_right` has kernels on CUDA alone; on the CPU, unless
seq_len is kv_len, every call makes the dense mask anew.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.bias.CausalBias.html

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from torch import Tensor
from torch.nn import functional as F

from harness.contract import Attention, BoundMask, Implementation, Workload

BIASES = {"causal": "causal_upper_left", "causal_bottom_right": "causal_lower_right"}


class SdpaBias(Attention):
    """One call; the bias is made once."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask.keep("causal bias", lambda: bias(mask)),
            dropout_p=self.dropout,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def bias(mask: BoundMask) -> Tensor:
    """The bias that stands for a causal mask."""
    from torch.nn.attention import bias as biases  # here: it takes torch's compiler along, as long as torch itself

    made: Tensor = getattr(biases, BIASES[mask.rule.name])(*mask.sizes[1:])
    return made


def unsupported(workload: Workload) -> str | None:
    """What is not causal, and what PyTorch itself warns of."""
    if workload.mask_rule.name not in BIASES:
        return f"PyTorch's causal biases stand for the masks {' and '.join(BIASES)} alone"
    if workload.mask == "causal_bottom_right" and workload.seq_len > workload.kv_len:
        return "causal_lower_right gives NaN, PyTorch warns, to queries that see no key, as here where T > S"
    return None


IMPLEMENTATION = Implementation(
    build=SdpaBias,
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.bias.CausalBias.html",
    unsupported=unsupported,
    has_dropout=True,
)
