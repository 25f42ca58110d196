"""`scaled_dot_product_attention` restricted to FLASH_ATTENTION: tiles in fast memory, weights never stored.

Source: T. Dao et al., "FlashAttention", https://arxiv.org/abs/2205.14135, as in
https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.

Peak memory beyond the inputs on the CPU: B H T V numbers of the output, B H T of the logsumexp, and a tile for each
thread.
"""

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnbench.contract import Workload, is_on

LARGEST_CUDA_HEAD_DIM = 256


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention: query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V).

    `mask` is broadcastable to (B, H, T, S): boolean, True where visible, or additive. `scale` is K**-0.5 by default.
    """
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # torch raises if it cannot run: no fallback
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_causal,  # aligned at the start (top-left)
            dropout_p=dropout,
            scale=scale,
            enable_gqa=enable_gqa,
        )


def unsupported(workload: Workload) -> str | None:
    """Return why the kernel cannot run a workload; None if it can.

    Source: https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers.
    """
    if workload.value_dim != workload.head_dim:
        return "the flash kernel needs value_dim == head_dim"
    if (workload.mask_rule.is_learned or workload.sinks != "none") and workload.direction != "inference":
        return "the flash kernel computes no gradient of a mask, which learned biases and sinks need"
    if not is_on("cuda", workload):
        return "the flash kernel has no dropout on the CPU" if workload.dropout > 0 else None
    if workload.dtype not in {"bfloat16", "float16"}:
        return "the flash kernel on CUDA needs dtype bfloat16 or float16"
    if workload.mask not in {"none", "causal"} or workload.sinks != "none":
        return "the flash kernel on CUDA takes no mask other than causal"
    if workload.mask == "causal" and workload.kv_len != workload.seq_len:
        return "the flash kernel on CUDA needs kv_len == seq_len under a causal mask"
    if workload.head_dim > LARGEST_CUDA_HEAD_DIM:
        return f"the flash kernel on CUDA needs head_dim <= {LARGEST_CUDA_HEAD_DIM}"
    return None
