"""Mistakes after the softmax: how values are mixed and the result is written, how heads are merged and projected.

Mistakes of the output projection can be made in scope `module` only.
"""

from dataclasses import replace

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.mistakes.mistake import has_module_heads, is_module, mistake
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import product
from attnbench.contract import Weights
from attnbench.workloads.workload import Workload

LONG = 1024


def has_square_projection(workload: Workload) -> bool:
    """Whether the output projection may be left out or transposed: it has as many rows as columns."""
    return is_module(workload) and workload.num_heads * workload.value_dim == workload.embed_dim


@mistake("context")
def query_and_key_ignored(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """Query and key play no part: each output is the plain mean of the values that the query sees."""
    seen = mask.seen.to(value.dtype)
    return product(seen / seen.sum(dim=-1, keepdim=True).clamp(min=1), value)


@mistake(
    "context",
    # In float16 the rounding is 4 times coarser, which is within what honest forms do to their scores.
    fits=lambda workload: workload.dtype in {"float32", "float64"},
    is_rounding=True,
)
def bfloat16_inside(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """Weights and values are rounded to bfloat16 on the way, which is coarser than the inputs' dtype."""
    return steps.context(weights.bfloat16(), value.bfloat16(), mask).to(value.dtype)


@mistake("context", fits=lambda workload: workload.dtype != "bfloat16" or workload.kv_len >= LONG, is_rounding=True)
def bfloat16_sums(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """The sum over the keys is accumulated in bfloat16."""
    total = torch.zeros(*weights.shape[:-1], value.shape[-1], dtype=torch.bfloat16, device=value.device)
    for share, mixed in zip(weights.unbind(dim=-1), value.unbind(dim=-2), strict=True):
        total = (total + share[..., None] * mixed[..., None, :]).bfloat16()
    return total.to(value.dtype)


@mistake("context", fits=lambda workload: workload.batch_size > 1)
def first_batch_row_only(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """The output is written for the first batch row only; the other rows are 0."""
    made = steps.context(weights, value, mask)
    return torch.cat([made[:1], torch.zeros_like(made[1:])])


@mistake("context", fits=lambda workload: workload.batch_size > 1)
def first_batch_row_for_all(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """Every batch row is given the output of the first."""
    made = steps.context(weights, value, mask)
    return made[:1].expand_as(made)


@mistake("context", fits=lambda workload: workload.num_heads > 1 and workload.seq_len > 1, needs_all_rows=True)
def output_viewed_not_transposed(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """Heads and tokens of the output are exchanged by a view or reshape without a transpose."""
    made = steps.context(weights, value, mask)
    return made.transpose(1, 2).reshape(made.shape)  # (B,H,T,V) -> (B,T,H,V), read as (B,H,T,V)


@mistake("output", fits=lambda workload: has_module_heads(workload) and workload.seq_len > 1, needs_all_rows=True)
def merged_without_transpose(context: Tensor, weights: Weights) -> Tensor:
    """Heads are merged by a view without a transpose: tokens and heads are mixed up."""
    batch_size, _, num_rows, _ = context.shape
    return steps.output(context.reshape(batch_size, 1, num_rows, -1), weights)  # (B,H,R,V) read as (B,R,H*V)


@mistake("output", fits=lambda workload: has_module_heads(workload) and workload.value_dim > 1)
def merged_feature_by_feature(context: Tensor, weights: Weights) -> Tensor:
    """Heads are merged in the wrong order: feature by feature instead of head by head."""
    return steps.output(context.transpose(1, 3), weights)  # (B,H,R,V) -> (B,V,R,H)


@mistake("output", fits=has_module_heads)
def merged_in_reverse(context: Tensor, weights: Weights) -> Tensor:
    """Heads are merged in the wrong order: the last head first."""
    return steps.output(context.flip(1), weights)


@mistake("output", fits=has_square_projection)
def no_output_projection(context: Tensor, weights: Weights) -> Tensor:
    """The output projection is left out."""
    return steps.output(context, replace(weights, out=None))


@mistake("output", fits=is_module)
def no_output_bias(context: Tensor, weights: Weights) -> Tensor:
    """The output projection's bias is dropped."""
    return steps.output(context, replace(weights, out_bias=None))


@mistake("output", fits=has_square_projection)
def output_projection_transposed(context: Tensor, weights: Weights) -> Tensor:
    """The output projection's matrix is transposed."""
    assert weights.out is not None
    return steps.output(context, replace(weights, out=weights.out.T))
