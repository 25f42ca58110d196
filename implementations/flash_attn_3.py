"""FlashAttention 3, for Hopper GPUs, from the folder `hopper` of flash-attention: module flash_attn_interface.

Some versions return the logsumexp with the output.

Source: J. Shah et al., https://arxiv.org/abs/2407.08608;
https://github.com/Dao-AILab/flash-attention/tree/0251105a/hopper, 3.0.0

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


class FlashAttn3(Attention):
    """One call with tokens before heads."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        from flash_attn_interface import flash_attn_func

        self.kernel = flash_attn_func

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key and value (B, G, S, K) -> (B, H, T, K)."""
        window = attention_window(mask.rule, *mask.sizes[1:])
        assert window is not None  # see `unsupported`
        tokens = (tensor.transpose(1, 2) for tensor in (query, key, value))  # (B,H,T,K) -> (B,T,H,K)
        found = self.kernel(*tokens, causal=window == (-1, 0), window_size=window)
        attended: Tensor = found[0] if isinstance(found, tuple) else found
        return attended.transpose(1, 2)  # (B,T,H,K) -> (B,H,T,K)


def unsupported(workload: Workload) -> str | None:
    """Return why the kernel cannot run a workload, or None. It needs a GPU of compute capability 9.0."""
    if reason := missing_package("flash_attn_interface", "flash_attn_3") or only_on("cuda", workload, "flash_attn_3"):
        return reason
    if workload.dtype not in {"bfloat16", "float16"}:
        return "flash_attn_3 needs dtype bfloat16 or float16"
    if workload.value_dim != workload.head_dim or workload.head_dim > LARGEST_HEAD_DIM:
        return f"this form of flash_attn_3 needs value_dim == head_dim <= {LARGEST_HEAD_DIM}"
    if workload.head_dim % 8:
        return "flash_attn_3 needs a head_dim that is a multiple of 8"
    if workload.dropout > 0:
        return "this form of flash_attn_3 has no dropout"
    return not_a_window(workload.mask_rule, workload.seq_len, workload.kv_len)


IMPLEMENTATION = Implementation(build=FlashAttn3, source="https://arxiv.org/abs/2407.08608", unsupported=unsupported)
