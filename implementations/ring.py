"""Ring attention: each rank holds one part of the tokens; keys and values circulate and results merge by logsumexp.

Under a causal mask a rank skips the keys after its queries. The last rank has the most work and the others wait for it.

Source: https://arxiv.org/abs/2310.01889. Shapes as in contract/__init__.py; t, s: the tokens of one rank.
"""

from torch import Tensor

from attnbench.contract import Attention, BoundMask, Implementation
from attnbench.ranks import not_over_ranks, over_ranks, ring_pass


class Ring(Attention):
    """A ring of ranks, each with one part of the tokens."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, T, K), value (B, G, T, V) -> (B, H, T, V)."""
        return over_ranks(ring_pass, query, key, value, mask)


IMPLEMENTATION = Implementation(
    build=Ring,
    source="https://arxiv.org/abs/2310.01889",
    unsupported=not_over_ranks,
    distributes=True,
    features=("scale",),
)
