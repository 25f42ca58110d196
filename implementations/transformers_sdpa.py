"""The attention function `sdpa` of the package transformers, the default of most models on its hub.

If `is_causal` can express the mask, no mask is created, as in the package's own masking.

Source: https://github.com/huggingface/transformers, src/transformers/integrations/sdpa_attention.py

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from attnbench.contract import Workload, missing_package


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    num_kv_heads: int,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Compute attention: query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V).

    `mask` is broadcastable to (B, H, T, S): boolean, True where visible, or additive.
    """
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // num_kv_heads, is_causal=False, training=False)
    attended: Tensor = kernel()(module, query, key, value, mask, scaling=scale, is_causal=is_causal)[0]
    return attended.transpose(1, 2)  # (B,T,H,V) -> (B,H,T,V)


@cache
def kernel() -> Any:  # noqa: ANN401 - the package's
    """Return the function that the package's models call."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS["sdpa"]


def unsupported(workload: Workload) -> str | None:
    """Return why the function cannot run a workload; None if it can."""
    if workload.mask == "causal" and workload.seq_len == 1 < workload.kv_len:
        return "the function shows every key to a single query, even under is_causal"
    return missing_package("transformers")
