"""The function `eager_attention_forward` of Llama in the package transformers: two products and a softmax.

The softmax is in float32 for every dtype. The mask is additive, and can have gradients.

Source: https://github.com/huggingface/transformers, src/transformers/models/llama/modeling_llama.py

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from attnbench.contract import Workload, missing_package


def attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, num_kv_heads: int, bias: Tensor | None = None
) -> Tensor:
    """Compute attention: query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V).

    `bias` is an additive mask, broadcastable to (B, H, T, S).
    """
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // num_kv_heads, training=False)
    attended: Tensor = kernel()(module, query, key, value, bias, scaling=scale)[0]
    return attended.transpose(1, 2)  # (B,T,H,V) -> (B,H,T,V)


@cache
def kernel() -> Any:  # noqa: ANN401 - the package's
    """Return the function that the package's models call."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    return eager_attention_forward


def unsupported(workload: Workload) -> str | None:
    """Return why the function cannot run a workload; None if it can."""
    if missing := missing_package("transformers"):
        return missing
    if workload.dtype == "float64":
        return "the function computes its softmax in float32: half of the digits of float64 would be lost"
    if workload.mask_rule.has_empty_rows(workload.batch_size, workload.seq_len, workload.kv_len):
        return "the function gives NaN to a query that sees no key"
    return None
