"""Mistakes in the backward pass: the output is right, and training goes wrong."""

import math
from typing import Any

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.mistakes.kind import Mistake
from attnbench.checking.steps import Scene, product
from attnbench.workloads.workload import Workload

Pair = tuple[Tensor, Tensor]


def no_key(query: Tensor, key: Tensor, value: Tensor, scene: Scene) -> Pair:
    """No gradient reaches the keys."""
    return steps.heads(query, key.detach(), value, scene)


def no_value(query: Tensor, key: Tensor, value: Tensor, scene: Scene) -> Pair:
    """No gradient reaches the values."""
    return steps.heads(query, key, value.detach(), scene)


def no_query(query: Tensor, key: Tensor, scene: Scene) -> Tensor:
    """No gradient reaches the queries."""
    return steps.scores(query.detach(), key, scene)


def _times(tensor: Tensor, factor: float) -> Tensor:
    """The same values, with the gradient multiplied."""
    return tensor + (factor - 1) * (tensor - tensor.detach())


def query_not_scaled(query: Tensor, key: Tensor, scene: Scene) -> Tensor:
    """The queries' gradient lacks 1/sqrt(K)."""
    return steps.scores(_times(query, math.sqrt(query.shape[-1])), key, scene)


def key_not_scaled(query: Tensor, key: Tensor, scene: Scene) -> Tensor:
    """The keys' gradient lacks 1/sqrt(K)."""
    return steps.scores(query, _times(key, math.sqrt(query.shape[-1])), scene)


def first_of_group(query: Tensor, key: Tensor, value: Tensor, scene: Scene) -> Pair:
    """The gradient of a key/value head comes from the first query head of its group alone."""
    times = query.shape[1] // key.shape[1]

    def shared(tensor: Tensor) -> Tensor:
        rest = tensor.detach()[:, :, None].expand(-1, -1, times - 1, -1, -1)
        return torch.cat([tensor[:, :, None], rest], dim=2).flatten(1, 2)

    return shared(key), shared(value)


class _WithoutCorrection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, masked: Tensor) -> Tensor:  # noqa: ANN401
        made = masked.softmax(dim=-1).nan_to_num(0.0)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ANN401
        (made,) = ctx.saved_tensors
        grad_masked: Tensor = made * grads[0]
        return grad_masked


def no_correction(masked: Tensor, scene: Scene) -> Tensor:
    """The softmax's gradient is weights * grad, without taking away the rows' mean."""
    made: Tensor = _WithoutCorrection.apply(masked)  # type: ignore[no-untyped-call]
    return made


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(weights, value)
        return product(weights, value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        weights, value = ctx.saved_tensors
        half = grads[0].shape[2] // 2
        later = grads[0].clone()
        later[:, :, :half] = 0
        return product(grads[0], value.transpose(-2, -1)), product(weights.transpose(-2, -1), later)


def second_half_of_queries(weights: Tensor, value: Tensor, scene: Scene) -> Tensor:
    """The values' gradient sums over the later half of the queries alone: a partial sum was overwritten."""
    made: Tensor = _Halved.apply(weights, value)  # type: ignore[no-untyped-call]
    return made


def _has_gradients(workload: Workload) -> bool:
    return workload.direction != "inference"


def _is_grouped(workload: Workload) -> bool:
    return _has_gradients(workload) and workload.num_kv_heads < workload.num_heads


MISTAKES = (
    Mistake(
        name="no_gradient_of_key",
        words="no gradient reaches the keys",
        changes={"heads": no_key},
        fits=_has_gradients,
        is_gradient=True,
    ),
    Mistake(
        name="no_gradient_of_value",
        words="no gradient reaches the values",
        changes={"heads": no_value},
        fits=_has_gradients,
        is_gradient=True,
    ),
    Mistake(
        name="no_gradient_of_query",
        words="no gradient reaches the queries",
        changes={"scores": no_query},
        fits=_has_gradients,
        is_gradient=True,
    ),
    Mistake(
        name="gradient_of_query_not_scaled",
        words="the gradient of the queries lacks the factor 1/sqrt(K)",
        changes={"scores": query_not_scaled},
        fits=_has_gradients,
        is_gradient=True,
    ),
    Mistake(
        name="gradient_of_key_not_scaled",
        words="the gradient of the keys lacks the factor 1/sqrt(K)",
        changes={"scores": key_not_scaled},
        fits=_has_gradients,
        is_gradient=True,
    ),
    Mistake(
        name="softmax_gradient_without_correction",
        words="the gradient through the softmax lacks its second term: weights * (grad - sum(weights * grad))",
        changes={"weights": no_correction},
        fits=_has_gradients,
        is_gradient=True,
    ),
    Mistake(
        name="gradient_of_value_partly_lost",
        words="the gradient of the values sums over the later half of the queries alone",
        changes={"context": second_half_of_queries},
        fits=lambda workload: _has_gradients(workload) and workload.seq_len > 1,
        needs_all_rows=True,
        is_gradient=True,
    ),
    Mistake(
        name="gradient_from_first_of_group",
        words="a shared key/value head receives the gradient of its group's first query head alone",
        changes={"heads": first_of_group},
        fits=_is_grouped,
        is_gradient=True,
    ),
)
