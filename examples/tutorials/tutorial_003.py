"""One head, a list of heads, fused heads, and fused heads with a causal mask, on two equal batch rows of nine tokens.

The tutorial's module has a dropout layer that its `forward` never applies. The last table shows that the layer would
change nothing in evaluation mode.
"""

import torch
from torch import Tensor, nn

from attnbench.checking import oracle, steps
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
    """Draw heads of width 2, one after the other: the linear layers for query, key and value of each head."""
    with seeded(123):
        layers = [[nn.Linear(3, 2, bias=False).weight.detach() for _ in range(3)] for _ in range(num_heads)]
    query, key, value = (torch.stack(part) for part in zip(*layers, strict=True))
    return Weights(query=query, key=key, value=value)


def fused() -> Weights:
    """Draw two heads of width 1: one linear layer (rows: keys, queries, values), and then an output projection."""
    with seeded(123):
        rows, out = nn.Linear(3, 6, bias=False).weight.detach(), nn.Linear(2, 2)
    key, query, value = rows.view(3, 2, 1, 3)  # (3*H*K,D) -> 3 x (H,K,D)
    return Weights(query=query, key=key, value=value, out=out.weight.detach(), out_bias=out.bias.detach())


def dropping_in_evaluation() -> steps.Changes:
    """Return a change of the step `weights` that adds a dropout layer in evaluation mode."""
    dropout = nn.Dropout(DROPOUT).eval()

    def weights(masked: Tensor, mask: RowMask) -> Tensor:
        dropped: Tensor = dropout(steps.weights(masked, mask))
        return dropped

    return {"weights": weights}


def tables() -> dict[str, Tensor]:
    """Compute every table, by name; both batch rows are equal, and the first is returned."""
    x = torch.tensor(INPUT)
    batch = torch.stack([x, x])  # (B,T,D)
    return {
        "input": x,
        "scores_of_input_with_itself": oracle.product(x, x.T),
        "softmax_examples": torch.tensor(LOGITS).softmax(dim=-1),
        "simple": output("fused", separate(1), batch)[0],
        "module_list": output("module_list", separate(2), batch)[0],
        "fused": output("fused", fused(), batch)[0],
        "fused_causal": output("fused", fused(), batch, mask="causal")[0],
        "fused_causal_with_dropout_in_evaluation": attend_tokens(
            x, fused(), mask="causal", changes=dropping_in_evaluation()
        )["output"],
    }
