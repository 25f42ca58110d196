"""The implementation that this machine's policy chooses; `attnbench fastest --sweep NAME --policy FILE` learns one.

The policy is the file that ATTNBENCH_POLICY names, else results/policy.json. Calls are dispatched by
`attnbench.attention`, and the dispatch is part of the measured time.

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width.
"""

from torch import Tensor

from attnbench.contract import dispatch
from attnbench.contract.dispatch import reason_against as unsupported  # noqa: F401 - a plug's reasons


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V): one lookup and one call."""
    return dispatch.attention(query, key, value, mask=mask, is_causal=is_causal, scale=scale)
