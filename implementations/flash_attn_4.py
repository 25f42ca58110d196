"""FlashAttention 4, written in CuTe DSL for Hopper and Blackwell GPUs: package flash-attn-4, module flash_attn.cute.

A window without a limit is None, not -1. The first call compiles the kernel. The logsumexp is returned with the output.

Source: https://github.com/Dao-AILab/flash-attention/blob/fa4-v4.0.0.beta27/flash_attn/cute/interface.py

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width.
"""

from torch import Tensor

from attnbench.contract import (
    Attention,
    BoundMask,
    Implementation,
    Weights,
    Workload,
    attention_window,
    compute_capability,
    missing_package,
    not_a_window,
    only_on,
)

HOPPER = 9
LARGEST_HEAD_DIM = {HOPPER: 256, 10: 128, 11: 128}
"""By major compute capability. Versions 10 and 11 also have a kernel for (256, 256)."""
OWN_KERNEL = 256


class FlashAttn4(Attention):
    """One call with tokens before heads."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        from flash_attn.cute import flash_attn_func

        self.kernel = flash_attn_func

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key and value (B, G, S, K) -> (B, H, T, K)."""
        window = attention_window(mask.rule, *mask.sizes[1:])
        assert window is not None  # see `unsupported`
        left, right = (None if limit < 0 else limit for limit in window)
        tokens = (tensor.transpose(1, 2) for tensor in (query, key, value))  # (B,H,T,K) -> (B,T,H,K)
        found = self.kernel(*tokens, causal=window == (-1, 0), window_size=(left, right))
        attended: Tensor = found[0] if isinstance(found, tuple) else found
        return attended.transpose(1, 2)  # (B,T,H,K) -> (B,H,T,K)


def unsupported(workload: Workload) -> str | None:
    """Return why the kernel cannot run a workload, or None, as of 4.0.0.beta27: `_validate_head_dims`."""
    if reason := missing_package("flash_attn.cute", "flash_attn_4") or only_on("cuda", workload, "flash_attn_4"):
        return reason
    if workload.dtype not in {"bfloat16", "float16"}:
        return "flash_attn_4 needs dtype bfloat16 or float16"
    major, _ = compute_capability(workload) or (HOPPER, 0)
    largest = LARGEST_HEAD_DIM.get(major, OWN_KERNEL)
    if workload.value_dim != workload.head_dim or (workload.head_dim > largest and workload.head_dim != OWN_KERNEL):
        own = f", or {OWN_KERNEL}" if largest < OWN_KERNEL else ""
        return f"this form of flash_attn_4 needs value_dim == head_dim <= {largest}{own} on this GPU"
    if workload.head_dim % 8:
        return "flash_attn_4 needs a head_dim that is a multiple of 8"
    if workload.dropout > 0:
        return "this form of flash_attn_4 has no dropout"
    return not_a_window(workload.mask_rule, workload.seq_len, workload.kv_len)


IMPLEMENTATION = Implementation(
    build=FlashAttn4,
    source="https://github.com/Dao-AILab/flash-attention/tree/main/flash_attn/cute",
    unsupported=unsupported,
    compiles=True,
)
