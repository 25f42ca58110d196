"""`scaled_dot_product_attention` restricted to EFFICIENT_ATTENTION, PyTorch's copy of xformers' kernel, on CUDA only.

The kernel has no grouped heads.

Shapes: B batch, T query length, S key length, H heads, K head width, V value width.
"""

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnbench.contract import Workload, only_on


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Compute attention: query (B, H, T, K), key (B, H, S, K), value (B, H, S, V) -> (B, H, T, V).

    `mask` is boolean, True where visible, broadcastable to (B, H, T, S). `scale` is K**-0.5 by default.
    """
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):  # torch raises if it cannot run: no fallback
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_causal,  # aligned at the start (top-left)
            scale=scale,
        )


def unsupported(workload: Workload) -> str | None:
    """Return why the kernel cannot run a workload; None if it can.

    Source: minimum_gemm_alignment in ATen/native/transformers/cuda/sdp_utils.cpp of PyTorch 2.11.
    """
    if reason := only_on("cuda", workload, "the memory-efficient kernel"):
        return reason
    if workload.dtype == "float64":
        return "the memory-efficient kernel needs dtype float32, bfloat16 or float16"
    multiple = 4 if workload.dtype == "float32" else 8  # 16 bytes
    if workload.head_dim % multiple or workload.value_dim % multiple:
        widths = f"head_dim and value_dim that are multiples of {multiple}"
        return f"the memory-efficient kernel needs {widths} in {workload.dtype}"
    if workload.mask_rule.changes_scores or workload.sinks != "none":
        return "this implementation passes no additive mask to the memory-efficient kernel"
    return None
