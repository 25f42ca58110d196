"""`scaled_dot_product_attention` restricted to EFFICIENT_ATTENTION, PyTorch's copy of xformers' kernel, on CUDA only.

The kernel has no grouped heads: keys and values are repeated for the query heads that read them.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.SDPBackend.html

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnbench.contract import Attention, BoundMask, Implementation, Workload, only_on, repeat_heads


class SdpaEfficient(Attention):
    """One call with one backend; torch raises if the kernel cannot run and never falls back."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])  # (B,G,S,K) -> (B,H,S,K)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=None if mask.is_causal else mask.visible,
                is_causal=mask.is_causal,  # aligned at the start (top-left)
                scale=mask.scale,
            )


def unsupported(workload: Workload) -> str | None:
    """Return why the kernel cannot run a workload, or None.

    Source: minimum_gemm_alignment in ATen/native/transformers/cuda/sdp_utils.cpp of 2.11.
    """
    if reason := only_on("cuda", workload, "the memory-efficient kernel"):
        return reason
    if workload.dtype == "float64":
        return "the memory-efficient kernel needs dtype float32, bfloat16 or float16"
    multiple = 4 if workload.dtype == "float32" else 8  # 16 bytes
    if workload.head_dim % multiple or workload.value_dim % multiple:
        widths = f"head_dim and value_dim that are multiples of {multiple}"
        return f"the memory-efficient kernel needs {widths} in {workload.dtype}"
    if workload.mask_rule.changes_scores:
        return f"this form hands over no mask {workload.mask_rule.name}"
    return "this form has no dropout" if workload.dropout > 0 else None


IMPLEMENTATION = Implementation(
    build=SdpaEfficient,
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.SDPBackend.html",
    unsupported=unsupported,
    backend="efficient",
    copies="keys and values are repeated where heads are grouped",
    features=("scale",),
)
