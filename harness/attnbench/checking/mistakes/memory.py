"""Mistakes with memory: how tensors lie there, and what stays from earlier calls."""

import math

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.mistakes.mistake import mistake
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import product

STALE: dict[tuple[torch.Size, torch.dtype], Tensor] = {}


def as_if_contiguous(tensor: Tensor) -> Tensor:
    """The tensor's memory, read row after row whatever its strides."""
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.is_contiguous() or room < tensor.numel():
        return tensor
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride(), 0)


@mistake(
    "heads",
    fits=lambda workload: workload.scope == "attention" and workload.num_kv_heads > 1 and workload.kv_len > 1,
    is_memory=True,
)
def read_as_contiguous(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> tuple[Tensor, Tensor]:
    """A tensor that is not contiguous is read as if it were."""
    return steps.heads(query, as_if_contiguous(key), as_if_contiguous(value), mask)


@mistake(
    "context", fits=lambda workload: workload.scope == "attention" and workload.direction == "inference", is_memory=True
)
def stale_output_buffer(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """An output buffer is reused: a later call overwrites the output of an earlier one."""
    made = steps.context(weights, value, mask)
    return STALE.setdefault((made.shape, made.dtype), made.detach().clone()).copy_(made)


@mistake("scores", fits=lambda workload: workload.scope == "attention" and workload.head_dim > 1, is_memory=True)
def input_changed(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The call changes its input: the query is scaled in place."""
    query.data.div_(math.sqrt(query.shape[-1]))
    return product(query, key.transpose(-2, -1))
