"""`scaled_dot_product_attention` restricted to its CUDNN_ATTENTION backend: NVIDIA's fused kernel, on CUDA only.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.SDPBackend.html

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnbench.contract import Attention, BoundMask, Implementation, Workload, only_on

LARGEST_HEAD_DIM = 256
"""Since cuDNN 9.10 on compute capability 9.0; elsewhere the limit is 128, and larger widths are a fallback."""


class SdpaCudnn(Attention):
    """One call with one backend; torch raises if the kernel cannot run and never falls back."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=None if mask.is_causal else mask.visible,
                is_causal=mask.is_causal,  # aligned at the start (top-left)
                scale=mask.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )


def unsupported(workload: Workload) -> str | None:
    """Return why the kernel cannot run a workload, or None.

    Source: check_cudnn_tensor_shapes in ATen/native/transformers/cuda/sdp_utils.cpp of 2.11.
    """
    if reason := only_on("cuda", workload, "the cuDNN kernel"):
        return reason
    if workload.dtype not in {"bfloat16", "float16"}:
        return "the cuDNN kernel needs dtype bfloat16 or float16"
    if max(workload.head_dim, workload.value_dim) > LARGEST_HEAD_DIM:
        return f"the cuDNN kernel needs head_dim and value_dim <= {LARGEST_HEAD_DIM}"
    if workload.head_dim % 8 or workload.value_dim % 8:
        return "the cuDNN kernel needs head_dim and value_dim that are multiples of 8"
    if workload.kv_len == 1:
        return "the cuDNN kernel needs kv_len > 1"
    if workload.mask_rule.changes_scores:
        return f"this form hands over no mask {workload.mask_rule.name}"
    if workload.mask == "causal" and workload.kv_len != workload.seq_len:
        return "the cuDNN kernel needs kv_len == seq_len under a causal mask"
    return "this form has no dropout" if workload.dropout > 0 else None


IMPLEMENTATION = Implementation(
    build=SdpaCudnn,
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.SDPBackend.html",
    unsupported=unsupported,
    backend="cudnn",
    features=("scale",),
)
