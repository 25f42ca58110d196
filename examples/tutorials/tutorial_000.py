"""Self-attention with one head, then with three heads by batched products, on eight words.

Its matrix examples take the softmax over dimension 0. That is the query axis for one head (T, S), and the head axis for
several heads (H, T, S); the keys are the last axis. The tables with such weights have `dim0` in their names, except
`context_single_head`.
"""

import torch
from torch import Tensor, nn

from attnbench.contract import Weights
from attnbench.workloads.workload import Workload
from examples.tutorials.blocks import attend_tokens, output, planted, seeded, unscaled

WORDS = ["life", "is", "short", "eat", "dessert", "first", "is", "life"]
SINGLE = Workload(seq_len=len(WORDS), num_heads=1, head_dim=24, value_dim=28, embed_dim=16, scope="module")
MULTI = Workload(seq_len=len(WORDS), num_heads=3, head_dim=24, value_dim=28, embed_dim=16, scope="module")


def token_ids() -> Tensor:
    """Return each word's last position among the sorted words (T,)."""
    last = {word: position for position, word in enumerate(sorted(WORDS))}
    return torch.tensor([last[word] for word in WORDS])


def draws() -> tuple[Tensor, Weights, Weights]:
    """Draw the vectors of the words (T, D), the weights of one head, and those of three heads."""
    with seeded(42):
        x = nn.Embedding(8, 16)(token_ids()).detach()
        single = [torch.rand(24, 16), torch.rand(24, 16), torch.rand(28, 16)]
        multi = [torch.rand(3, 24, 16), torch.rand(3, 24, 16), torch.rand(3, 28, 16)]
    query, key, value = (part[None] for part in single)
    return x, Weights(query=query, key=key, value=value), Weights(query=multi[0], key=multi[1], value=multi[2])


def tables() -> dict[str, Tensor]:
    """Compute every table, by name; scores are before the division by sqrt(K)."""
    x, single, multi = draws()
    one = attend_tokens(x, single)
    one_dim0 = attend_tokens(x, single, changes=planted("softmax_over_queries", SINGLE))
    three = attend_tokens(x, multi)
    three_dim0 = attend_tokens(x, multi, changes=planted("softmax_over_heads", MULTI))
    return {
        "token_ids": token_ids(),
        "scores_single_head": unscaled(one)[0],
        "weights_first_word": one["weights"][0, 0],
        "context_first_word": one["context"][0, 0],
        "weights_single_head_dim0": one_dim0["weights"][0],
        "context_single_head": one_dim0["context"][0],
        "weights_single_head_over_keys": one["weights"][0],
        "context_single_head_over_keys": output("naive_loop", single, x[None])[0],
        "scores_multi_head": unscaled(three),
        "weights_multi_head_dim0": three_dim0["weights"],
        "context_multi_head_dim0": three_dim0["context"],
        "weights_multi_head_over_keys": three["weights"],
        "context_multi_head_over_keys": three["context"],
        "output_multi_head_over_keys": output("bmm", multi, x[None])[0],
    }
