"""FlashAttention 2, from the package flash-attn: since 2.1 its mask is aligned at the end (bottom-right).

A query that sees no key gets 0. Grouped heads are not copied.

The check for the package looks for the file of its function, because flash-attn-4 alone also creates a folder
flash_attn.

Source: T. Dao, https://arxiv.org/abs/2307.08691;
https://github.com/Dao-AILab/flash-attention/blob/v2.8.3/flash_attn/flash_attn_interface.py

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
    missing_package,
    not_a_window,
    only_on,
)

LARGEST_HEAD_DIM = 256


class FlashAttn2(Attention):
    """One call with tokens before heads."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        from flash_attn.flash_attn_interface import flash_attn_func

        self.kernel = flash_attn_func

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key and value (B, G, S, K) -> (B, H, T, K)."""
        window = attention_window(mask.rule, *mask.sizes[1:])
        assert window is not None  # see `unsupported`
        tokens = (tensor.transpose(1, 2) for tensor in (query, key, value))  # (B,H,T,K) -> (B,T,H,K)
        attended: Tensor = self.kernel(*tokens, causal=window == (-1, 0), window_size=window)
        return attended.transpose(1, 2)  # (B,T,H,K) -> (B,H,T,K)


def unsupported(workload: Workload) -> str | None:
    """Return why the kernel cannot run a workload, or None, as of 2.8."""
    if reason := missing_package("flash_attn.flash_attn_interface") or only_on("cuda", workload, "flash_attn"):
        return reason
    if workload.dtype not in {"bfloat16", "float16"}:
        return "flash_attn needs dtype bfloat16 or float16"
    if workload.value_dim != workload.head_dim or workload.head_dim > LARGEST_HEAD_DIM:
        return f"this form of flash_attn needs value_dim == head_dim <= {LARGEST_HEAD_DIM}"
    if workload.dropout > 0:
        return "this form of flash_attn has no dropout"
    return not_a_window(workload.mask_rule, workload.seq_len, workload.kv_len)


IMPLEMENTATION = Implementation(
    build=FlashAttn2,
    source="https://arxiv.org/abs/2307.08691",
    unsupported=unsupported,
    copies="the package pads a head_dim that is no multiple of 8",
)
