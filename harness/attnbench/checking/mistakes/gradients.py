"""Mistakes in the backward pass only: the output is right, its gradients are those of a mistaken form.

`flash` is the backward pass of FlashAttention: with weights P, dP = dO V^T and D = rowsum(dO * O), the gradient of the
scores is P * (dP - D), whatever P is. Source: https://arxiv.org/abs/2307.08691, algorithm 2.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.mistakes import forms
from attnbench.checking.mistakes.wrong_masks import COMMON, wrong_masks
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Changes, Mistake, wrong
from attnbench.workloads.workload import Workload

SUMMED = (("key",), ("value",), ("key", "value"))
"""Operands whose gradients are sums over queries, and over the query heads of a group."""
RECOMPUTED = {"scores", "masked scores"}  # the steps that a backward pass computes again


def only_backward(name: str, detail: str, form: Callable[..., Tensor], step: str = "scores") -> Mistake:
    """A mistake with the right output, and the gradients of a form without grouped heads."""

    def whole(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Tensor:
        right, mistaken = steps.attend(query, key, value, mask)["context"], form(query, key, value, mask)
        return right.detach() + (mistaken - mistaken.detach()).nan_to_num(0.0)

    return replace(wrong(name, detail, "is_gradient needs_all_rows", whole=whole), step=step)


def flash(  # noqa: PLR0913 - operands, and what is changed
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, *, changes: Changes | None = None, factor: float = 1.0
) -> Tensor:
    """The form whose gradient is FlashAttention's with changed scores, and row sums multiplied by a factor.

    The logsumexps and the row sums are those of the right forward pass, without a gradient.
    """
    right, other = (steps.attend(query, key, value, mask, each) for each in (None, changes))
    total = right["masked scores"].logsumexp(dim=-1, keepdim=True).detach()
    weights = (other["masked scores"] - total.clamp(min=torch.finfo(total.dtype).min)).exp()
    return steps.product(weights, value) - weights.sum(dim=-1, keepdim=True) * factor * right["context"].detach()


def weights(workload: Workload) -> Iterator[Mistake]:
    """Wrong row sums of weights times their gradient, and weights of other scores than those of the forward pass."""
    factors = {"left out": 0.0, "a mean over the keys": 1 / workload.kv_len, "of the wrong sign": -1.0, "doubled": 2.0}
    for detail, factor in factors.items():
        yield only_backward("gradient_row_sums", f"it is {detail}", partial(flash, factor=factor), "weights")
    masks = [each for each in wrong_masks(workload) if each.name in COMMON]
    for each in (*masks, *forms.scales(workload), *forms.biases(workload), *forms.singles(workload)):
        if each.changes.keys() <= RECOMPUTED:
            name = "gradient_under_another_mask" if each in masks else "gradient_of_other_scores"
            yield only_backward(name, each.words, partial(flash, changes=each.changes), "weights")


def without(  # noqa: PLR0913 - operands, and what is changed
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, *, lost: Tensor, names: tuple[str, ...]
) -> Tensor:
    """The right context, but the queries or heads in `lost` pass no gradient to the operands in `names`.

    `lost` (H or 1, R or 1, 1) is True at these queries or heads.
    """
    of_key, of_value = (x.detach() if name in names else x for name, x in (("key", key), ("value", value)))
    right = steps.attend(query, key, value, mask)["context"]
    return steps.attend(query, of_key, of_value, mask)["context"].where(lost, right)


def sums(workload: Workload) -> Iterator[Mistake]:
    """Queries, or heads of a group, that are missing from the sums for keys or values."""
    queries, heads = torch.arange(workload.seq_len)[:, None], torch.arange(workload.num_heads)[:, None, None]
    times = workload.num_heads // workload.num_kv_heads
    tiles = [*forms.tiles_of(workload.seq_len)]
    tiles += [("all but the first tile", range(tile.stop, workload.seq_len)) for _, tile in tiles if not tile.start]
    for (what, tile), names in itertools.product(tiles, SUMMED):
        detail = f"{what}, queries {tile.start} to {tile.stop - 1}, for the {' and the '.join(names)}"
        lost = (tile.start <= queries) & (queries < tile.stop)
        yield only_backward("gradient_tile_lost", detail, partial(without, lost=lost, names=names))
    places = {"first": 0, "last": times - 1} if times > 1 else {}
    for (which, place), names in itertools.product(places.items(), SUMMED):
        detail = f"the {which} head alone counts for the {' and the '.join(names)}"
        yield only_backward("gradient_of_group", detail, partial(without, lost=heads % times != place, names=names))


KINDS = (weights, sums)
