"""Mistakes in the softmax."""

from collections.abc import Callable

import torch
from torch import Tensor

from attnbench.checking.mistakes.kind import Mistake
from attnbench.checking.steps import Changes, Scene
from attnbench.checking.steps import weights as right

DROPPED = 0.5


def over(*dims: int) -> Changes:
    """The softmax over other axes than the keys, (-1,); hidden keys have no share."""

    def softmax(masked: Tensor, scene: Scene) -> Tensor:
        powers = (masked - masked.amax(dims, keepdim=True)).exp().nan_to_num(0.0)
        return powers / powers.sum(dims, keepdim=True).clamp(min=torch.finfo(powers.dtype).tiny)

    return {"weights": softmax}


def no_maximum(masked: Tensor, scene: Scene) -> Tensor:
    """exp(score) / sum, which overflows where scores are large."""
    powers = masked.exp()
    return powers / powers.sum(dim=-1, keepdim=True)


def one_more(masked: Tensor, scene: Scene) -> Tensor:
    """The sum has one term more, exp(0)."""
    return torch.cat([masked, torch.zeros_like(masked[..., :1])], dim=-1).softmax(dim=-1)[..., :-1]


def first_head_for_all(masked: Tensor, scene: Scene) -> Tensor:
    """Head 0's weights in every head."""
    return right(masked, scene)[:, :1].expand_as(masked)


def not_normalised(masked: Tensor, scene: Scene) -> Tensor:
    """exp(score - maximum), never divided by the sum."""
    return (masked - masked.amax(dim=-1, keepdim=True)).exp()


def nothing_seen(masked: Tensor, scene: Scene) -> Tensor:
    """The softmax of minus infinity alone, which is NaN."""
    return masked.softmax(dim=-1)


def transposed(masked: Tensor, scene: Scene) -> Tensor:
    """The weight of query j on key i where that of query i on key j belongs."""
    return right(masked, scene).transpose(-2, -1)


def dropping(factor: float) -> Callable[[Tensor, Scene], Tensor]:
    """Some weights lost, the others multiplied by `factor`."""

    def weights(masked: Tensor, scene: Scene) -> Tensor:
        kept = torch.rand(masked.shape, device=masked.device) >= DROPPED
        return right(masked, scene) * kept * factor

    return weights


MISTAKES = (
    Mistake(
        name="softmax_over_queries",
        words="the softmax runs over the queries instead of the keys",
        changes=over(-2),
        needs_all_rows=True,
    ),
    Mistake(
        name="softmax_over_heads",
        words="the softmax runs over the heads instead of the keys",
        changes=over(1),
    ),
    Mistake(
        name="softmax_over_batch",
        words="the softmax runs over the batch instead of the keys",
        changes=over(0),
    ),
    Mistake(
        name="softmax_over_queries_and_keys",
        words="one softmax runs over queries and keys together instead of one for each query",
        changes=over(-2, -1),
        needs_all_rows=True,
    ),
    Mistake(
        name="no_maximum",
        words="the maximum is not subtracted before the exponential, which overflows where scores are large",
        changes={"weights": no_maximum},
    ),
    Mistake(
        name="not_normalised",
        words="the exponentials are not divided by their sum",
        changes={"weights": not_normalised},
    ),
    Mistake(
        name="one_more_in_the_sum",
        words="the softmax's sum has one term too many, as if there were one more key with score 0",
        changes={"weights": one_more},
    ),
    Mistake(
        name="first_heads_weights_for_all",
        words="the weights of head 0 are used in every head",
        changes={"weights": first_head_for_all},
        fits=lambda workload: workload.num_heads > 1,
    ),
    Mistake(
        name="weights_transposed",
        words="the weights are transposed: rows and columns have changed places",
        changes={"weights": transposed},
        fits=lambda workload: 1 < workload.seq_len == workload.kv_len,
        needs_all_rows=True,
    ),
    Mistake(
        name="nan_where_nothing_is_seen",
        words="a query that sees no key gives NaN, the softmax of nothing, where it must give 0",
        changes={"weights": nothing_seen},
        fits=lambda workload: workload.mask_rule.has_empty_rows(workload.batch_size, workload.seq_len, workload.kv_len),
    ),
    Mistake(
        name="dropout_in_evaluation",
        words="dropout is active in evaluation: some weights are 0 and the others scaled up",
        changes={"weights": dropping(1 / (1 - DROPPED))},
        is_random=True,
    ),
    Mistake(
        name="dropout_without_rescaling",
        words="dropout is active in evaluation, and without rescaling: some weights are 0, the others as they were",
        changes={"weights": dropping(1.0)},
        is_random=True,
    ),
)
