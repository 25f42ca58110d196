"""FlashInfer's `single_prefill_with_kv_cache`: the kernel of serving engines, for one request and inference only.

Causal masks and windows aligned at the end (bottom-right) are passed as options, any other mask as bits, packed once.
The kernel reads query, key and value by their strides, without a copy.

Source: Z. Ye et al., https://arxiv.org/abs/2501.01005;
https://github.com/flashinfer-ai/flashinfer/blob/v0.6.17/flashinfer/prefill.py

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from functools import lru_cache

from torch import Tensor

from attnbench.contract import BoundMask, Workload, attention_window, missing_package, only_on

HEAD_DIMS = (64, 128, 256)


def attention(query: Tensor, key: Tensor, value: Tensor, bound_mask: BoundMask, num_kv_heads: int) -> Tensor:
    """Compute attention: query (1, H, T, K), key and value (1, G, S, K) -> (1, H, T, K)."""
    from flashinfer import single_prefill_with_kv_cache

    tokens = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (1,H,T,K) -> (T,H,K)
    window = attention_window(bound_mask.rule, *bound_mask.sizes[1:])
    if window is None or window[1] > 0:  # the kernel limits the right side only at the diagonal
        bits = packed(bound_mask)
        attended: Tensor = single_prefill_with_kv_cache(*tokens, packed_custom_mask=bits, kv_layout="NHD")
    else:
        left, right = window
        attended = single_prefill_with_kv_cache(*tokens, causal=right == 0, window_left=left, kv_layout="NHD")
    return attended.transpose(0, 1)[None]  # (T,H,K) -> (1,H,T,K)


@lru_cache(maxsize=4)
def packed(mask: BoundMask) -> Tensor:
    """Pack a mask (T, S) into bits, 1 if visible, eight to a byte; the first element of a byte is its lowest bit."""
    from flashinfer.quantization import packbits

    assert mask.visible is not None
    visible = mask.visible[0, 0].expand(mask.sizes[1:])  # (1,1,T,S) -> (T,S)
    bits: Tensor = packbits(visible.flatten(), bitorder="little")
    return bits


def unsupported(workload: Workload) -> str | None:
    """Return why the kernel cannot run a workload; None if it can."""
    if reason := missing_package("flashinfer") or only_on("cuda", workload, "flashinfer"):
        return reason
    if workload.direction != "inference":
        return "flashinfer has no gradients"
    if workload.batch_size != 1:
        return "this function of flashinfer takes one request: it needs batch_size=1"
    if workload.dtype not in {"bfloat16", "float16"}:
        return "flashinfer needs dtype bfloat16 or float16"
    if workload.value_dim != workload.head_dim or workload.head_dim not in HEAD_DIMS:
        return f"flashinfer needs value_dim == head_dim, one of {', '.join(map(str, HEAD_DIMS))}"
    if workload.mask_rule.changes_scores:
        return f"mask={workload.mask_rule.name} changes scores, and this implementation passes no change to flashinfer"
    if workload.mask_rule.has_empty_rows(1, workload.seq_len, workload.kv_len):
        return "flashinfer does not define the output of queries that see no key"
    return None
