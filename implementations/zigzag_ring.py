"""Ring attention with a balanced causal mask: each rank has one early and one late part of the tokens.

With W ranks there are 2W parts; rank r has the parts r and 2W - 1 - r, so that all ranks have about equally many
visible pairs of query and key. All else is as in `ring`.

Source: https://github.com/zhuzilin/ring-flash-attention

Shapes: B batch, T tokens of all ranks, H heads, G key/value heads, K head width, V value width.
"""

from torch import Tensor

from attnbench.ranks import not_over_ranks as unsupported  # noqa: F401 - the harness reads it
from attnbench.ranks import over_ranks, ring_pass


def attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, num_kv_heads: int, world_size: int, is_causal: bool = False
) -> Tensor:
    """Compute attention over ranks: query (B, H, T, K), key (B, G, T, K), value (B, G, T, V) -> (B, H, T, V)."""
    return over_ranks(
        ring_pass, query, key, value, scale=scale, world_size=world_size, is_causal=is_causal, order="zigzag"
    )
