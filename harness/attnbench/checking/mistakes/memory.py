"""Mistakes with memory: how tensors lie there, and what stays from earlier calls."""

import math

import torch
from torch import Tensor

from attnbench.checking.mistakes.kind import Mistake
from attnbench.checking.steps import Scene, product
from attnbench.checking.steps import context as right
from attnbench.checking.steps import heads as right_heads

STALE: dict[tuple[torch.Size, torch.dtype], Tensor] = {}


def read_as_contiguous(query: Tensor, key: Tensor, value: Tensor, scene: Scene) -> tuple[Tensor, Tensor]:
    """Keys and values taken from memory as if each tensor lay there row after row."""
    return right_heads(query, _as_if_contiguous(key), _as_if_contiguous(value), scene)


def _as_if_contiguous(tensor: Tensor) -> Tensor:
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.is_contiguous() or room < tensor.numel():
        return tensor
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride(), 0)


def one_buffer(weights: Tensor, value: Tensor, scene: Scene) -> Tensor:
    """Every answer of one shape lies in the same memory."""
    made = right(weights, value, scene)
    return STALE.setdefault((made.shape, made.dtype), made.detach().clone()).copy_(made)


def scaled_in_place(query: Tensor, key: Tensor, scene: Scene) -> Tensor:
    """The query is scaled where it lies, and stays so."""
    query.data.div_(math.sqrt(query.shape[-1]))
    return product(query, key.transpose(-2, -1))


MISTAKES = (
    Mistake(
        name="read_as_contiguous",
        words="a tensor that is not contiguous is read as if it were",
        changes={"heads": read_as_contiguous},
        fits=lambda workload: workload.scope == "attention" and workload.num_kv_heads > 1 and workload.kv_len > 1,
        is_memory=True,
    ),
    Mistake(
        name="stale_output_buffer",
        words="an output buffer is reused: a later call overwrites the output of an earlier one",
        changes={"context": one_buffer},
        fits=lambda workload: workload.scope == "attention" and workload.direction == "inference",
        is_memory=True,
    ),
    Mistake(
        name="input_changed",
        words="the call changes its input: the query is scaled in place",
        changes={"scores": scaled_in_place},
        fits=lambda workload: workload.scope == "attention" and workload.head_dim > 1,
        is_memory=True,
    ),
)
