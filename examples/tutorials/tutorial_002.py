"""Attention of one token, then of all, with values wider than keys; then several heads, causal and cross-attention.

The title of the tutorial names the last three, but it prints no numbers for them; their inputs are drawn here.
"""

import torch
from torch import Tensor, nn

from attnbench.contract import Weights
from examples.tutorials.blocks import attend_tokens, output, seeded, unscaled

WORDS = "Life is short, eat dessert first".replace(",", "").split()
SECOND = 1
NUM_HEADS, NUM_OTHER_TOKENS = 4, 8


def token_ids() -> Tensor:
    """Return each word's position among the sorted words (T,)."""
    return torch.tensor([sorted(WORDS).index(word) for word in WORDS])


def draws() -> tuple[Tensor, Weights]:
    """Draw the vectors of the words (T, D) and the weights of one head."""
    with seeded(123):
        x = nn.Embedding(50_000, 3)(token_ids()).detach()
    with seeded(123):
        query, key, value = torch.rand(3, 2), torch.rand(3, 2), torch.rand(3, 4)  # (D,K) (D,K) (D,V)
    return x, Weights(query=query.T[None], key=key.T[None], value=value.T[None])


def more_draws() -> tuple[Weights, Tensor]:
    """Draw the weights of several heads with values of width 1, and another sequence (S, D) to attend to."""
    with seeded(123):
        query, key, value = (torch.rand(NUM_HEADS, width, 3) for width in (2, 2, 1))
        other = torch.rand(NUM_OTHER_TOKENS, 3)
    return Weights(query=query, key=key, value=value), other


def tables() -> dict[str, Tensor]:
    """Compute every table, by name; scores are before the division by sqrt(K)."""
    x, weights = draws()
    several, other = more_draws()
    made = attend_tokens(x, weights)
    causal = attend_tokens(x, weights, mask="causal")
    crossed = attend_tokens(x, weights, context=other)
    return {
        "token_ids": token_ids(),
        "embedded": x,
        "scores_second_token": unscaled(made)[0, SECOND],
        "weights_second_token": made["weights"][0, SECOND],
        "context_second_token": made["context"][0, SECOND],
        "scores_all_tokens": unscaled(made)[0],
        "weights_all_tokens": made["weights"][0],
        "context_all_tokens": output("naive_loop", weights, x[None])[0],
        "weights_multi_head": attend_tokens(x, several)["weights"],
        "output_multi_head": output("module_list", several, x[None])[0],
        "scores_causal": causal["masked scores"][0],
        "weights_causal": causal["weights"][0],
        "context_causal": output("einsum", weights, x[None], mask="causal")[0],
        "weights_cross": crossed["weights"][0],
        "context_cross": output("einsum", weights, x[None], context=other[None])[0],
    }
