"""cuDNN's attention through its own Python package, nvidia-cudnn-frontend, instead of through PyTorch.

Masks are aligned at the start (top-left) or at the end (bottom-right), as the workload says. The API is experimental.

Source: https://github.com/NVIDIA/cudnn-frontend/blob/v1.23.0/python/cudnn/experimental/ops/sdpa.py

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from typing import Any

from torch import Tensor

from attnbench.contract import (
    Attention,
    BoundMask,
    Implementation,
    Weights,
    Workload,
    compute_capability,
    missing_package,
    only_on,
)

MASKS = ("none", "causal", "causal_bottom_right")
LARGEST_HEAD_DIM, LARGEST_ON_HOPPER = 128, 256
HOPPER = 9


class CudnnFrontend(Attention):
    """One call; the first call at each size builds the graph."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        from cudnn.experimental.ops import scaled_dot_product_attention

        self.kernel: Any = scaled_dot_product_attention

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        attended: Tensor = self.kernel(
            query,
            key,
            value,
            is_causal=not mask.is_none,
            scale=mask.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            diagonal_alignment=int(mask.rule.name == "causal_bottom_right"),  # 0: at the start, 1: at the end
        )
        return attended


def unsupported(workload: Workload) -> str | None:
    """Return why the operator cannot run a workload, or None."""
    if reason := missing_package("cudnn.experimental.ops", "nvidia-cudnn-frontend"):
        return reason
    if reason := only_on("cuda", workload, "cudnn_frontend"):
        return reason
    if workload.dtype not in {"bfloat16", "float16"}:
        return "cudnn_frontend needs dtype bfloat16 or float16"
    major, _ = compute_capability(workload) or (HOPPER, 0)
    largest = LARGEST_ON_HOPPER if major == HOPPER else LARGEST_HEAD_DIM
    widths = workload.head_dim, workload.value_dim
    if max(widths) > largest or any(width % 8 for width in widths):
        return f"cudnn_frontend needs head_dim and value_dim that are multiples of 8, up to {largest} on this GPU"
    name = workload.mask_rule.name
    if name not in MASKS:
        return f"this form of cudnn_frontend takes no mask {name}, but {', '.join(MASKS)}"
    if workload.mask_rule.has_empty_rows(1, workload.seq_len, workload.kv_len):
        return "cudnn_frontend promises nothing for queries that see no key"
    return "cudnn_frontend has no dropout" if workload.dropout > 0 else None


IMPLEMENTATION = Implementation(
    build=CudnnFrontend,
    source="https://github.com/NVIDIA/cudnn-frontend/blob/v1.23.0/python/cudnn/experimental/ops/sdpa.py",
    unsupported=unsupported,
    compiles=True,
    features=("scale",),
)
