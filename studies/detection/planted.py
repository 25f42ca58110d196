"""An implementation that makes a known mistake, for tests of the check."""

import torch
from torch import Tensor, nn

from attnbench.checking import steps
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake
from attnbench.contract import BoundMask, Implementation, Weights

BLOCK_SCORES = 2**24
"""Approximate number of scores in memory at a time, if queries can be computed in blocks."""


def implementation(mistake: Mistake) -> Implementation:
    """Build an implementation: the textbook form, in which the mistake replaces some steps."""

    class Mistaken(nn.Module):
        def __init__(self, weights: Weights) -> None:
            super().__init__()
            for name, tensor in weights.filled().tensors().items():
                self.register_parameter(name, nn.Parameter(tensor.clone()))

        def pack(self, weights: Weights) -> dict[str, Tensor]:
            return weights.tensors()

        def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
            num_scores = query.shape[0] * query.shape[1] * key.shape[2]
            block = query.shape[2] if mistake.needs_all_rows else max(1, BLOCK_SCORES // num_scores)
            every = torch.arange(query.shape[2], device=query.device).split(block)
            made = (steps.attend(query[:, :, at], key, value, at_rows(mask, at), mistake.changes) for at in every)
            return torch.cat([each["context"] for each in made], dim=2)

        def forward(self, x: Tensor, context: Tensor | None = None, *, mask: BoundMask) -> Tensor:
            weights = Weights(**dict(self.named_parameters()))
            step = {**steps.DEFAULTS, **mistake.changes}
            query, key, value = step["projection"](x, x if context is None else context, weights)
            made: Tensor = step["output"](self.attend(query, key, value, mask), weights)
            return made

    return Implementation(build=Mistaken, source=f"attnbench.checking.mistakes: {mistake.name}")


def at_rows(mask: BoundMask, rows: Tensor) -> RowMask:
    """Restrict the mask of a call to the query rows `rows` (R,)."""
    return RowMask(
        rule=mask.rule,
        sizes=mask.sizes,
        num_heads=mask.num_heads,
        rows=rows,
        device=rows.device,
        scale=mask.scale,
        inputs=mask.inputs,
    )
