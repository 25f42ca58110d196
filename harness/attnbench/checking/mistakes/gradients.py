"""Mistakes in the backward pass, where the output is right and training goes wrong, and in the use of memory."""

import math

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import has_several, mistake, product

Pair = tuple[Tensor, Tensor]
STALE: dict[tuple[torch.Size, torch.dtype], Tensor] = {}


@mistake("heads", is_gradient=True)
def no_gradient_of_key(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """No gradient reaches the keys."""
    return steps.heads(query, key.detach(), value, mask)


@mistake("heads", is_gradient=True)
def no_gradient_of_value(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """No gradient reaches the values."""
    return steps.heads(query, key, value.detach(), mask)


@mistake("scores", is_gradient=True)
def no_gradient_of_query(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """No gradient reaches the queries."""
    return steps.scores(query.detach(), key, mask)


def with_gradient_times(tensor: Tensor, factor: float) -> Tensor:
    """The same values, with the gradient multiplied."""
    return tensor + (factor - 1) * (tensor - tensor.detach())


@mistake("scores", is_gradient=True)
def gradient_of_query_not_scaled(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The gradient of the queries lacks the factor 1/sqrt(K)."""
    return steps.scores(with_gradient_times(query, math.sqrt(query.shape[-1])), key, mask)


@mistake("scores", is_gradient=True)
def gradient_of_key_not_scaled(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The gradient of the keys lacks the factor 1/sqrt(K)."""
    return steps.scores(query, with_gradient_times(key, math.sqrt(query.shape[-1])), mask)


@mistake("weights", is_gradient=True)
def softmax_gradient_without_correction(masked: Tensor, mask: RowMask) -> Tensor:
    """The gradient through the softmax lacks its second term: weights * (grad - sum(weights * grad))."""
    made = masked.softmax(dim=-1).nan_to_num(0.0).detach()
    finite = masked.nan_to_num(0.0, 0.0, 0.0)
    return made * (finite - finite.detach() + 1)


@mistake("context", has_several("seq_len"), needs_all_rows=True, is_gradient=True)
def gradient_of_value_partly_lost(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """The gradient of the values sums over the later half of the queries alone."""
    half = weights.shape[2] // 2
    earlier, later = product(weights[:, :, :half], value.detach()), product(weights[:, :, half:], value)
    return torch.cat([earlier, later], dim=2)


@mistake("heads", lambda workload: workload.num_kv_heads < workload.num_heads, is_gradient=True)
def gradient_from_first_of_group(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """A shared key/value head receives the gradient of its group's first query head alone."""
    times = query.shape[1] // key.shape[1]

    def repeat(tensor: Tensor) -> Tensor:
        rest = tensor.detach()[:, :, None].expand(-1, -1, times - 1, -1, -1)
        return torch.cat([tensor[:, :, None], rest], dim=2).flatten(1, 2)

    return repeat(key), repeat(value)


def as_if_contiguous(tensor: Tensor) -> Tensor:
    """The tensor's memory, read row after row whatever its strides."""
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.is_contiguous() or room < tensor.numel():
        return tensor
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride(), 0)


@mistake("heads", has_several("num_kv_heads", "kv_len"), is_memory=True)
def read_as_contiguous(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """A tensor that is not contiguous is read as if it were."""
    return steps.heads(query, as_if_contiguous(key), as_if_contiguous(value), mask)


@mistake("context", lambda workload: workload.direction == "inference", is_memory=True)
def stale_output_buffer(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """An output buffer is reused: a later call overwrites the output of an earlier one."""
    made = steps.context(weights, value, mask)
    return STALE.setdefault((made.shape, made.dtype), made.detach().clone()).copy_(made)


@mistake("scores", has_several("head_dim"), is_memory=True)
def input_changed(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The call changes its input: the query is scaled in place."""
    query.data.div_(math.sqrt(query.shape[-1]))
    return product(query, key.transpose(-2, -1))
