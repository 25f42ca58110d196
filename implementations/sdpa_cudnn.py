"""`scaled_dot_product_attention` restricted to its CUDNN_ATTENTION backend: NVIDIA's fused kernel, on CUDA only.

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnbench.contract import Workload, only_on

LARGEST_HEAD_DIM = 256
"""Limit of cuDNN 9.10 or later on compute capability 9.0. Elsewhere it is 128, and PyTorch rejects larger widths."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention: query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V).

    `mask` is boolean, True where visible, broadcastable to (B, H, T, S). `scale` is K**-0.5 by default.
    """
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # torch raises if it cannot run: no fallback
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_causal,  # aligned at the start (top-left)
            scale=scale,
            enable_gqa=enable_gqa,
        )


def unsupported(workload: Workload) -> str | None:
    """Return why the kernel cannot run a workload; None if it can.

    Source: check_cudnn_tensor_shapes in ATen/native/transformers/cuda/sdp_utils.cpp of PyTorch 2.11.
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
    if workload.mask_rule.changes_scores or workload.sinks != "none":
        return "this implementation passes no additive mask to the cuDNN kernel"
    if workload.mask == "causal" and workload.kv_len != workload.seq_len:
        return "the cuDNN kernel needs kv_len == seq_len under a causal mask"
    return None
