"""xformers' `memory_efficient_attention`: the package chooses among its own kernels and FlashAttention's.

After 0.0.35 the kernels are in another package, mslk; without it xformers can be imported but has no attention.

Source: B. Lefaudeux et al., https://github.com/facebookresearch/xformers/blob/v0.0.35/xformers/ops/fmha/__init__.py;
https://github.com/meta-pytorch/MSLK/blob/v1.3.0-rc1/mslk/attention/fmha/__init__.py

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

import re
from importlib import metadata
from typing import Any

from torch import Tensor

from attnbench.contract import (
    Attention,
    BoundMask,
    Implementation,
    Weights,
    Workload,
    missing_package,
    only_on,
    repeat_heads,
)

BIASES = {"causal": "LowerTriangularMask", "causal_bottom_right": "LowerTriangularFromBottomRightMask"}


class Xformers(Attention):
    """One call with tokens before heads; keys and values are repeated for the query heads that read them."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        from xformers.ops import memory_efficient_attention
        from xformers.ops.fmha import attn_bias

        self.kernel: Any = memory_efficient_attention
        self.biases: Any = attn_bias

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        heads = query.shape[1]
        key, value = repeat_heads(key, heads), repeat_heads(value, heads)  # (B,G,S,K) -> (B,H,S,K)
        tokens = (tensor.transpose(1, 2) for tensor in (query, key, value))  # (B,H,T,K) -> (B,T,H,K)
        bias = None if mask.is_none else mask.keep("xformers", getattr(self.biases, BIASES[mask.rule.name]))
        attended: Tensor = self.kernel(*tokens, attn_bias=bias)
        return attended.transpose(1, 2)  # (B,T,H,V) -> (B,H,T,V)


def unsupported(workload: Workload) -> str | None:
    """Return why the kernels cannot run a workload, or None."""
    if (
        reason := missing_package("xformers.ops", "xformers")
        or missing_kernels()
        or only_on("cuda", workload, "xformers")
    ):
        return reason
    if workload.dtype == "float64":
        return "xformers needs dtype float32, bfloat16 or float16"
    if workload.dropout > 0:
        return "this form of xformers has no dropout"
    name = workload.mask_rule.name
    if name not in {"none", *BIASES}:
        return f"this form of xformers takes no mask {name}, but none, {', '.join(BIASES)}"
    if name == "causal" and workload.seq_len != workload.kv_len:
        return "not all kernels of xformers align a causal mask at the start: it needs kv_len == seq_len"
    if name == "causal_bottom_right" and workload.seq_len > workload.kv_len:
        return "xformers promises nothing for queries that see no key"
    return None


def missing_kernels() -> str | None:
    """Return why there is no attention, or None: the package of the kernels that xformers requires may be missing."""
    try:
        required = metadata.requires("xformers") or ()
    except metadata.PackageNotFoundError:
        return None
    is_apart = any(re.match(r"mslk\b", each) for each in required)
    return missing_package("mslk.attention", "mslk") if is_apart else None


IMPLEMENTATION = Implementation(
    build=Xformers,
    source="https://github.com/facebookresearch/xformers",
    unsupported=unsupported,
    copies="keys and values are repeated where heads are grouped",
)
