"""Ring attention with a balanced causal mask: each rank holds one early and one late part of the tokens.

With W ranks there are 2W parts; rank r holds parts r and 2W - 1 - r, so that all ranks see equally many pairs.
Otherwise it is the same as `ring`.

Source: https://github.com/zhuzilin/ring-flash-attention. Shapes as in contract/__init__.py.
"""

from torch import Tensor

from attnbench.contract import Attention, BoundMask, Implementation
from attnbench.ranks import not_over_ranks, over_ranks, ring_pass


class ZigzagRing(Attention):
    """A ring of ranks, each with two parts of the tokens."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, T, K), value (B, G, T, V) -> (B, H, T, V)."""
        return over_ranks(ring_pass, query, key, value, mask, order="zigzag")


IMPLEMENTATION = Implementation(
    build=ZigzagRing,
    source="https://github.com/zhuzilin/ring-flash-attention",
    unsupported=not_over_ranks,
    distributes=True,
    features=("scale",),
)
