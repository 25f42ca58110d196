"""One head, a list of heads, fused heads, and fused heads with a causal mask, on nine tokens twice in a batch.

The text declares a dropout that its forward never applies. In evaluation it would change nothing, which the last table
shows.
"""

import torch
from torch import Tensor, nn

from attnbench.checking import steps
from attnbench.checking.oracle import RowMask
from attnbench.contract import Weights
from examples.tutorials.blocks import attend_tokens, output, seeded

INPUT = (
    (0.43, 0.15, 0.89),
    (0.55, 0.87, 0.66),
    (0.57, 0.85, 0.64),
    (0.22, 0.58, 0.33),
    (0.77, 0.25, 0.1),
    (0.05, 0.8, 0.55),
    (0.02, 0.3, 0.47),
    (0.47, 0.67, 0.64),
    (0.77, 0.33, 0.7),
)
LOGITS = ((20.0, 21.5, 22.0), (20.0, 21.5, 26.0))
DROPOUT = 0.5


def separate(num_heads: int) -> Weights:
    """Heads of width 2, each with linear layers of its own: query, key, value, then the next head's."""
    with seeded(123):
        layers = [[nn.Linear(3, 2, bias=False).weight.detach() for _ in range(3)] for _ in range(num_heads)]
    query, key, value = (torch.stack(part) for part in zip(*layers, strict=True))
    return Weights(query=query, key=key, value=value)


def fused() -> Weights:
    """Two heads of width 1 from one linear layer, whose rows are keys, queries, values; then an output projection."""
    with seeded(123):
        rows, out = nn.Linear(3, 6, bias=False).weight.detach(), nn.Linear(2, 2)
    key, query, value = rows.view(3, 2, 1, 3)  # (3*H*K,D) -> 3 x (H,K,D)
    return Weights(query=query, key=key, value=value, out=out.weight.detach(), out_bias=out.bias.detach())


def dropping_in_evaluation() -> steps.Changes:
    """The weights through a dropout layer that knows that it is not training."""
    dropout = nn.Dropout(DROPOUT).eval()

    def weights(masked: Tensor, mask: RowMask) -> Tensor:
        dropped: Tensor = dropout(steps.weights(masked, mask))
        return dropped

    return {"weights": weights}


def tables() -> dict[str, Tensor]:
    """Every table by its name; both rows of the batch are the same, and the first is shown."""
    x = torch.tensor(INPUT)
    batch = torch.stack([x, x])  # (B,T,D)
    return {
        "input": x,
        "scores_of_input_with_itself": steps.product(x, x.T),
        "softmax_examples": torch.tensor(LOGITS).softmax(dim=-1),
        "simple": output("fused", separate(1), batch)[0],
        "module_list": output("module_list", separate(2), batch)[0],
        "fused": output("fused", fused(), batch)[0],
        "fused_causal": output("fused", fused(), batch, mask="causal")[0],
        "fused_causal_with_dropout_in_evaluation": attend_tokens(
            x, fused(), mask="causal", changes=dropping_in_evaluation()
        )["output"],
    }
