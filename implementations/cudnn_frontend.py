"""cuDNN's attention through its own Python package, nvidia-cudnn-frontend, instead of through PyTorch.

The first call at each size builds the graph. The API is experimental.

Source: https://github.com/NVIDIA/cudnn-frontend/blob/v1.23.0/python/cudnn/experimental/ops/sdpa.py

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from torch import Tensor

from attnbench.contract import Workload, device, missing_package, only_on

LARGEST_HEAD_DIM, LARGEST_ON_HOPPER = 128, 256  # of head_dim and value_dim
HOPPER = 9  # major compute capability


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    is_causal: bool = False,
    is_causal_bottom_right: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention: query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
    from cudnn.experimental.ops import scaled_dot_product_attention

    attended: Tensor = scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=is_causal or is_causal_bottom_right,
        scale=scale,
        enable_gqa=enable_gqa,
        diagonal_alignment=int(is_causal_bottom_right),  # 0: at the start (top-left), 1: at the end (bottom-right)
    )
    return attended


def unsupported(workload: Workload) -> str | None:
    """Return why the operator cannot run a workload; None if it can."""
    if reason := missing_package("cudnn.experimental.ops", "nvidia-cudnn-frontend"):
        return reason
    if reason := only_on("cuda", workload, "cudnn_frontend"):
        return reason
    if workload.dtype not in {"bfloat16", "float16"}:
        return "cudnn_frontend needs dtype bfloat16 or float16"
    major, _ = device(workload.device).compute_capability() or (HOPPER, 0)
    largest = LARGEST_ON_HOPPER if major == HOPPER else LARGEST_HEAD_DIM
    widths = workload.head_dim, workload.value_dim
    if max(widths) > largest or any(width % 8 for width in widths):
        return f"cudnn_frontend needs head_dim and value_dim that are multiples of 8, up to {largest} on this GPU"
    if workload.mask_rule.has_empty_rows(1, workload.seq_len, workload.kv_len):
        return "cudnn_frontend does not define the output of queries that see no key"
    return None
