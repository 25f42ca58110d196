"""Mistakes in the backward pass: the output is right, and training goes wrong."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.mistakes.mistake import Mistake, mistake
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import product
from attnbench.workloads.workload import Workload

Pair = tuple[Tensor, Tensor]


def has_gradients(workload: Workload) -> bool:
    """Whether the backward pass is asked for."""
    return workload.direction != "inference"


def gradient_mistake(
    step: str, fits: Callable[[Workload], bool] = has_gradients, **details: bool
) -> Callable[[Callable[..., Any]], Mistake]:
    """Make a mistake of the backward pass."""
    return mistake(step, fits=fits, is_gradient=True, **details)


@gradient_mistake("heads")
def no_gradient_of_key(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """No gradient reaches the keys."""
    return steps.heads(query, key.detach(), value, mask)


@gradient_mistake("heads")
def no_gradient_of_value(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """No gradient reaches the values."""
    return steps.heads(query, key, value.detach(), mask)


@gradient_mistake("scores")
def no_gradient_of_query(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """No gradient reaches the queries."""
    return steps.scores(query.detach(), key, mask)


def with_gradient_times(tensor: Tensor, factor: float) -> Tensor:
    """The same values, with the gradient multiplied."""
    return tensor + (factor - 1) * (tensor - tensor.detach())


@gradient_mistake("scores")
def gradient_of_query_not_scaled(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The gradient of the queries lacks the factor 1/sqrt(K)."""
    return steps.scores(with_gradient_times(query, math.sqrt(query.shape[-1])), key, mask)


@gradient_mistake("scores")
def gradient_of_key_not_scaled(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The gradient of the keys lacks the factor 1/sqrt(K)."""
    return steps.scores(query, with_gradient_times(key, math.sqrt(query.shape[-1])), mask)


class SoftmaxWithoutCorrection(torch.autograd.Function):
    """The softmax with weights * grad as its gradient: the mean of each row is not subtracted."""

    @staticmethod
    def forward(ctx: Any, masked: Tensor) -> Tensor:  # noqa: ANN401, D102
        made = masked.softmax(dim=-1).nan_to_num(0.0)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ANN401, D102
        (made,) = ctx.saved_tensors
        grad_masked: Tensor = made * grads[0]
        return grad_masked


@gradient_mistake("weights")
def softmax_gradient_without_correction(masked: Tensor, mask: RowMask) -> Tensor:
    """The gradient through the softmax lacks its second term: weights * (grad - sum(weights * grad))."""
    made: Tensor = SoftmaxWithoutCorrection.apply(masked)  # type: ignore[no-untyped-call]
    return made


class ProductOfLaterHalf(torch.autograd.Function):
    """weights @ value; the gradient of value sums over the later half of the queries, as if a sum was overwritten."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor) -> Tensor:  # noqa: ANN401, D102
        ctx.save_for_backward(weights, value)
        return product(weights, value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401, D102
        weights, value = ctx.saved_tensors
        half = grads[0].shape[2] // 2
        later = grads[0].clone()
        later[:, :, :half] = 0
        return product(grads[0], value.transpose(-2, -1)), product(weights.transpose(-2, -1), later)


@gradient_mistake(
    "context", fits=lambda workload: has_gradients(workload) and workload.seq_len > 1, needs_all_rows=True
)
def gradient_of_value_partly_lost(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """The gradient of the values sums over the later half of the queries alone."""
    made: Tensor = ProductOfLaterHalf.apply(weights, value)  # type: ignore[no-untyped-call]
    return made


@gradient_mistake("heads", fits=lambda workload: has_gradients(workload) and workload.num_kv_heads < workload.num_heads)
def gradient_from_first_of_group(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """A shared key/value head receives the gradient of its group's first query head alone."""
    times = query.shape[1] // key.shape[1]

    def repeat(tensor: Tensor) -> Tensor:
        rest = tensor.detach()[:, :, None].expand(-1, -1, times - 1, -1, -1)
        return torch.cat([tensor[:, :, None], rest], dim=2).flatten(1, 2)

    return repeat(key), repeat(value)
