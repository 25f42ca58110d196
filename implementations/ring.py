"""Ring attention: each rank has one part of the tokens; keys and values circulate, and logsumexps merge the results.

Under a causal mask, a rank skips the keys after its queries: the last rank has the most work, and the others wait.

Source: https://arxiv.org/abs/2310.01889

Shapes: B batch, T tokens of all ranks, H heads, G key/value heads, K head width, V value width.
"""

from torch import Tensor

from attnbench.ranks import not_over_ranks as unsupported  # noqa: F401 - the harness reads it
from attnbench.ranks import over_ranks, ring_pass


def attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, num_kv_heads: int, world_size: int, is_causal: bool = False
) -> Tensor:
    """Compute attention over ranks: query (B, H, T, K), key (B, G, T, K), value (B, G, T, V) -> (B, H, T, V)."""
    return over_ranks(ring_pass, query, key, value, scale=scale, world_size=world_size, is_causal=is_causal)
