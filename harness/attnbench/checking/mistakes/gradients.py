"""Mistakes in the backward pass only: the output is right, and its gradients are those of wrong weights or row sums.

They change the backward pass of FlashAttention, which computes the weights again from the scores and the right
logsumexps (`oracle.with_gradient_of`).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.mistakes import forms
from attnbench.checking.mistakes.wrong_masks import COMMON, wrong_masks
from attnbench.checking.oracle import RowMask, with_gradient_of
from attnbench.checking.steps import Changes, Mistake, wrong
from attnbench.workloads.workload import Workload

RECOMPUTED = {"scores", "masked scores"}  # the steps that a backward pass computes again


def flash(  # noqa: PLR0913 - operands, and what is changed
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, *, changes: Changes | None = None, factor: float = 1.0
) -> Tensor:
    """The right context with FlashAttention's gradient, of changed scores, and with row sums times a factor."""
    right, other = (steps.attend(query, key, value, mask, each) for each in (None, changes))
    total = right["masked scores"].logsumexp(dim=-1, keepdim=True).detach()
    weights = (other["masked scores"] - total.clamp(min=torch.finfo(total.dtype).min)).exp()
    along = weights.sum(dim=-1, keepdim=True) * factor
    return with_gradient_of(steps.product(weights, value) - along * right["context"].detach(), right["context"])


def only_backward(workload: Workload) -> Iterator[Mistake]:
    """Wrong row sums of weights times their gradient, and weights of other scores than those of the forward pass."""
    factors = {"left out": 0.0, "a mean over the keys": 1 / workload.kv_len, "of the wrong sign": -1.0, "doubled": 2.0}
    every = [("gradient_row_sums", f"it is {words}", partial(flash, factor=each)) for words, each in factors.items()]
    masks = [each for each in wrong_masks(workload) if each.name in COMMON]
    for each in (*masks, *forms.scales(workload), *forms.biases(workload), *forms.singles(workload)):
        if each.changes.keys() <= RECOMPUTED:
            name = "gradient_under_another_mask" if each in masks else "gradient_of_other_scores"
            every.append((name, each.words, partial(flash, changes=each.changes)))
    for name, detail, form in every:
        yield replace(wrong(name, detail, "is_gradient needs_all_rows", whole=form), step="weights")
