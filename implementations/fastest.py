"""The implementation that this machine's policy chooses; `attnbench fastest --sweep NAME --policy FILE` learns one.

The policy is the file that ATTNBENCH_POLICY names, else results/policy.json. Calls are dispatched by
`attnbench.attention`, and the dispatch is part of the measured time.

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from torch import Tensor

from attnbench.contract import Attention, BoundMask, Implementation
from attnbench.contract.dispatch import attend_by_policy, reason_against


class Fastest(Attention):
    """One lookup and one call."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        return attend_by_policy(query, key, value, mask)


IMPLEMENTATION = Implementation(
    build=Fastest,
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html, "
    "with the choice of a policy in place of PyTorch's",
    unsupported=reason_against,
    features=("scale",),
)
