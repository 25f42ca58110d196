"""xformers' `memory_efficient_attention`: the package chooses among its own kernels and FlashAttention's.

In versions after 0.0.35, the kernels are in another package, mslk; without it, xformers can be imported, but has no
attention.

Source: B. Lefaudeux et al., https://github.com/facebookresearch/xformers/blob/v0.0.35/xformers/ops/fmha/__init__.py;
https://github.com/meta-pytorch/MSLK/blob/v1.3.0-rc1/mslk/attention/fmha/__init__.py

Shapes: B batch, T query length, S key length, H heads, K head width, V value width.
"""

import re
from importlib import metadata

from torch import Tensor

from attnbench.contract import Workload, missing_package, only_on


def attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, is_causal_bottom_right: bool = False
) -> Tensor:
    """Compute attention: query (B, H, T, K), key (B, H, S, K), value (B, H, S, V) -> (B, H, T, V)."""
    from xformers.ops import memory_efficient_attention
    from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask, LowerTriangularMask

    tokens = (tensor.transpose(1, 2) for tensor in (query, key, value))  # (B,H,T,K) -> (B,T,H,K)
    bias = LowerTriangularMask() if is_causal else None
    if is_causal_bottom_right:
        bias = LowerTriangularFromBottomRightMask()
    attended: Tensor = memory_efficient_attention(*tokens, attn_bias=bias)
    return attended.transpose(1, 2)  # (B,T,H,V) -> (B,H,T,V)


def unsupported(workload: Workload) -> str | None:
    """Return why the kernels cannot run a workload; None if they can."""
    reason = missing_package("xformers.ops", "xformers") or missing_kernels() or only_on("cuda", workload, "xformers")
    if reason:
        return reason
    if workload.dtype == "float64":
        return "xformers needs dtype float32, bfloat16 or float16"
    if workload.mask == "causal" and workload.seq_len != workload.kv_len:
        return "not all kernels of xformers align a causal mask at the start: it needs kv_len == seq_len"
    if workload.mask == "causal_bottom_right" and workload.seq_len > workload.kv_len:
        return "xformers does not define the output of queries that see no key"
    return None


def missing_kernels() -> str | None:
    """Return an error message if xformers takes its kernels from the package mslk, and this is missing; else None."""
    try:
        required = metadata.requires("xformers") or ()
    except metadata.PackageNotFoundError:
        return None
    is_apart = any(re.match(r"mslk\b", each) for each in required)
    return missing_package("mslk.attention", "mslk") if is_apart else None
