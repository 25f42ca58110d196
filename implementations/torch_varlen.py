"""PyTorch's `varlen_attn`: FlashAttention over packed sequences, so documents need no mask and no padding.

Windows are counted from the end of each sequence (bottom-right). Grouped heads need torch 2.12, which added
`enable_gqa`.

Source: https://docs.pytorch.org/docs/stable/nn.attention.varlen.html

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

import inspect
import itertools
from collections import Counter
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from attnbench.contract import BoundMask, Workload, attention_window, missing_package, not_a_window, only_on

LARGEST_HEAD_DIM = 256


def attention(query: Tensor, key: Tensor, value: Tensor, bound_mask: BoundMask, num_kv_heads: int) -> Tensor:
    """Compute attention: query (B, H, T, K), key and value (B, G, S, K) -> (B, H, T, K); the batch is packed."""
    from torch.nn.attention.varlen import varlen_attn

    kernel: Any = partial(varlen_attn, enable_gqa=True) if query.shape[1] != num_kv_heads else varlen_attn
    bounds = sequences(bound_mask)
    tokens = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))  # (B,H,T,K) -> (B*T,H,K)
    window = attention_window(bound_mask.rule, *bound_mask.sizes[1:]) or (-1, -1)
    attended: Tensor = kernel(*tokens, *bounds, window_size=window)
    return torch.unflatten(attended, 0, (len(query), -1)).transpose(1, 2)  # (B*T,H,K) -> (B,H,T,K)


@lru_cache(maxsize=4)
def sequences(mask: BoundMask) -> tuple[Tensor, Tensor, int, int]:
    """Return the bounds of N sequences in the queries and in the keys, (N + 1,) each, and the largest length in each.

    A sequence is a batch row or, under the mask `document`, one document of a row.
    """
    batch_size, query_len, key_len = mask.sizes
    query_lens, key_lens = [query_len], [key_len]
    if mask.rule.name == "document":
        firsts, _ = mask.rule.table(*mask.sizes)
        query_lens = key_lens = list(Counter(firsts.tolist()).values())

    def starts(lengths: list[int]) -> Tensor:
        ends = itertools.accumulate(lengths * batch_size, initial=0)
        return torch.tensor(list(ends), dtype=torch.int32, device=mask.device)

    return starts(query_lens), starts(key_lens), max(query_lens), max(key_lens)


def takes_groups() -> bool:
    """Return whether `varlen_attn` has the parameter `enable_gqa` in this version of torch."""
    from torch.nn.attention import varlen

    return "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


def unsupported(workload: Workload) -> str | None:
    """Return why the kernel cannot run a workload; None if it can."""
    if missing_package("torch.nn.attention.varlen"):
        return "this version of torch has no varlen_attn"
    if reason := only_on("cuda", workload, "varlen_attn"):
        return reason
    if workload.num_heads != workload.num_kv_heads and not takes_groups():
        return "varlen_attn has no grouped heads before torch 2.12"
    if workload.dtype not in {"bfloat16", "float16"}:
        return "varlen_attn needs dtype bfloat16 or float16"
    if workload.value_dim != workload.head_dim or workload.head_dim > LARGEST_HEAD_DIM:
        return f"varlen_attn needs value_dim == head_dim <= {LARGEST_HEAD_DIM}"
    if workload.mask_rule.name == "document":
        return None
    return not_a_window(workload.mask_rule, workload.seq_len, workload.kv_len)
