"""Mistakes in mixing the values, and in writing the result."""

import torch
from torch import Tensor

from attnbench.checking.mistakes.kind import Mistake
from attnbench.checking.steps import Scene, product
from attnbench.checking.steps import context as right
from attnbench.workloads.workload import Workload

LONG = 1024


def bfloat16_inside(weights: Tensor, value: Tensor, scene: Scene) -> Tensor:
    """Weights and values rounded to bfloat16."""
    return right(weights.bfloat16(), value.bfloat16(), scene).to(value.dtype)


def bfloat16_sums(weights: Tensor, value: Tensor, scene: Scene) -> Tensor:
    """The sum over the keys kept in bfloat16, rounded after every key."""
    total = torch.zeros(*weights.shape[:-1], value.shape[-1], dtype=torch.bfloat16, device=value.device)
    for share, mixed in zip(weights.unbind(dim=-1), value.unbind(dim=-2), strict=True):
        total = (total + share[..., None] * mixed[..., None, :]).bfloat16()
    return total.to(value.dtype)


def first_row_only(weights: Tensor, value: Tensor, scene: Scene) -> Tensor:
    """Batch rows past the first stay 0."""
    made = right(weights, value, scene)
    return torch.cat([made[:1], torch.zeros_like(made[1:])])


def first_row_for_all(weights: Tensor, value: Tensor, scene: Scene) -> Tensor:
    """Batch row 0 in place of every row."""
    made = right(weights, value, scene)
    return made[:1].expand_as(made)


def viewed(weights: Tensor, value: Tensor, scene: Scene) -> Tensor:
    """(B, T, H, V) read as (B, H, T, V) without a transpose."""
    made = right(weights, value, scene)
    return made.transpose(1, 2).reshape(made.shape)


def summed_only(weights: Tensor, value: Tensor, scene: Scene) -> Tensor:
    """The plain mean of the values that a query sees: query and key play no part."""
    seen = scene.seen.to(value.dtype)
    return product(seen / seen.sum(dim=-1, keepdim=True).clamp(min=1), value)


def _is_single_or_double(workload: Workload) -> bool:
    """In float16 a rounding to bfloat16 is 4 times coarser, which is within what honest forms do to their scores."""
    return workload.dtype in {"float32", "float64"}


def _shows_rounded_sums(workload: Workload) -> bool:
    return workload.dtype != "bfloat16" or workload.kv_len >= LONG


MISTAKES = (
    Mistake(
        name="query_and_key_ignored",
        words="query and key play no part: each output is the plain mean of the values that the query sees",
        changes={"context": summed_only},
    ),
    Mistake(
        name="bfloat16_inside",
        words="weights and values are rounded to bfloat16 on the way, which is coarser than the inputs' dtype",
        changes={"context": bfloat16_inside},
        fits=_is_single_or_double,
        is_rounding=True,
    ),
    Mistake(
        name="bfloat16_sums",
        words="the sum over the keys is accumulated in bfloat16",
        changes={"context": bfloat16_sums},
        fits=_shows_rounded_sums,
        is_rounding=True,
    ),
    Mistake(
        name="first_batch_row_only",
        words="the output is written for the first batch row only; the other rows are 0",
        changes={"context": first_row_only},
        fits=lambda workload: workload.batch_size > 1,
    ),
    Mistake(
        name="first_batch_row_for_all",
        words="every batch row is given the output of the first",
        changes={"context": first_row_for_all},
        fits=lambda workload: workload.batch_size > 1,
    ),
    Mistake(
        name="output_viewed_not_transposed",
        words="heads and tokens of the output are exchanged by a view or reshape without a transpose",
        changes={"context": viewed},
        fits=lambda workload: workload.num_heads > 1 and workload.seq_len > 1,
        needs_all_rows=True,
    ),
)
