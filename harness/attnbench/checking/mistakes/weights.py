"""Mistakes in the softmax."""

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.mistakes.mistake import mistake
from attnbench.checking.oracle import RowMask

DROPPED = 0.5


def softmax_over(dims: tuple[int, ...], masked: Tensor) -> Tensor:
    """The softmax over some axes; hidden keys have no share."""
    powers = (masked - masked.amax(dims, keepdim=True)).exp().nan_to_num(0.0)
    return powers / powers.sum(dims, keepdim=True).clamp(min=torch.finfo(powers.dtype).tiny)


@mistake("weights", needs_all_rows=True)
def softmax_over_queries(masked: Tensor, mask: RowMask) -> Tensor:
    """The softmax runs over the queries instead of the keys."""
    return softmax_over((-2,), masked)


@mistake("weights")
def softmax_over_heads(masked: Tensor, mask: RowMask) -> Tensor:
    """The softmax runs over the heads instead of the keys."""
    return softmax_over((1,), masked)


@mistake("weights")
def softmax_over_batch(masked: Tensor, mask: RowMask) -> Tensor:
    """The softmax runs over the batch instead of the keys."""
    return softmax_over((0,), masked)


@mistake("weights", needs_all_rows=True)
def softmax_over_queries_and_keys(masked: Tensor, mask: RowMask) -> Tensor:
    """One softmax runs over queries and keys together instead of one for each query."""
    return softmax_over((-2, -1), masked)


@mistake("weights")
def no_maximum(masked: Tensor, mask: RowMask) -> Tensor:
    """The maximum is not subtracted before the exponential, which overflows where scores are large."""
    powers = masked.exp()
    return powers / powers.sum(dim=-1, keepdim=True)


@mistake("weights")
def not_normalised(masked: Tensor, mask: RowMask) -> Tensor:
    """The exponentials are not divided by their sum."""
    return (masked - masked.amax(dim=-1, keepdim=True)).exp()


@mistake("weights")
def one_more_in_the_sum(masked: Tensor, mask: RowMask) -> Tensor:
    """The softmax's sum has one term too many, as if there were one more key with score 0."""
    return torch.cat([masked, torch.zeros_like(masked[..., :1])], dim=-1).softmax(dim=-1)[..., :-1]


@mistake("weights", fits=lambda workload: workload.num_heads > 1)
def first_heads_weights_for_all(masked: Tensor, mask: RowMask) -> Tensor:
    """The weights of head 0 are used in every head."""
    return steps.weights(masked, mask)[:, :1].expand_as(masked)


@mistake("weights", fits=lambda workload: 1 < workload.seq_len == workload.kv_len, needs_all_rows=True)
def weights_transposed(masked: Tensor, mask: RowMask) -> Tensor:
    """The weights are transposed: rows and columns have changed places."""
    return steps.weights(masked, mask).transpose(-2, -1)


@mistake(
    "weights",
    fits=lambda workload: workload.mask_rule.has_empty_rows(workload.batch_size, workload.seq_len, workload.kv_len),
)
def nan_where_nothing_is_seen(masked: Tensor, mask: RowMask) -> Tensor:
    """A query that sees no key gives NaN, the softmax of nothing, where it must give 0."""
    return masked.softmax(dim=-1)


def some_dropped(masked: Tensor, mask: RowMask) -> Tensor:
    """The weights, some of them 0."""
    kept = torch.rand(masked.shape, device=masked.device) >= DROPPED
    return steps.weights(masked, mask) * kept


@mistake("weights", is_random=True)
def dropout_in_evaluation(masked: Tensor, mask: RowMask) -> Tensor:
    """Dropout is active in evaluation: some weights are 0 and the others scaled up."""
    return some_dropped(masked, mask) / (1 - DROPPED)


@mistake("weights", is_random=True)
def dropout_without_rescaling(masked: Tensor, mask: RowMask) -> Tensor:
    """Dropout is active in evaluation, and without rescaling: some weights are 0, the others as they were."""
    return some_dropped(masked, mask)
