"""Mistakes after attention: how heads are merged and projected. Scope `module` only."""

from torch import Tensor

from attnbench.checking.mistakes.kind import Mistake
from attnbench.checking.steps import product
from attnbench.contract import Weights
from attnbench.workloads.workload import Workload


def _projected(merged: Tensor, weights: Weights, *, has_bias: bool = True) -> Tensor:
    assert weights.out is not None
    made = product(merged, weights.out.T)
    return made if weights.out_bias is None or not has_bias else made + weights.out_bias


def not_transposed(context: Tensor, weights: Weights) -> Tensor:
    """(B, H, T, V) viewed as (B, T, H*V)."""
    batch_size, num_heads, num_rows, value_dim = context.shape
    return _projected(context.reshape(batch_size, num_rows, num_heads * value_dim), weights)


def interleaved(context: Tensor, weights: Weights) -> Tensor:
    """(B, T, V, H) flattened: the first feature of every head, then the second of every head."""
    return _projected(context.permute(0, 2, 3, 1).flatten(2), weights)


def reversed_heads(context: Tensor, weights: Weights) -> Tensor:
    """The last head first."""
    return _projected(context.flip(1).transpose(1, 2).flatten(2), weights)


def left_out(context: Tensor, weights: Weights) -> Tensor:
    """Heads side by side, and that is all."""
    return context.transpose(1, 2).flatten(2)


def without_bias(context: Tensor, weights: Weights) -> Tensor:
    """The output projection without its bias."""
    return _projected(context.transpose(1, 2).flatten(2), weights, has_bias=False)


def transposed(context: Tensor, weights: Weights) -> Tensor:
    """The output projection's matrix read as its transpose."""
    assert weights.out is not None
    merged = product(context.transpose(1, 2).flatten(2), weights.out)
    return merged if weights.out_bias is None else merged + weights.out_bias


def _is_module(workload: Workload) -> bool:
    return workload.scope == "module"


def _is_square(workload: Workload) -> bool:
    return _is_module(workload) and workload.num_heads * workload.value_dim == workload.embed_dim


def _has_heads(workload: Workload) -> bool:
    return _is_module(workload) and workload.num_heads > 1


MISTAKES = (
    Mistake(
        name="merged_without_transpose",
        words="heads are merged by a view without a transpose: tokens and heads are mixed up",
        changes={"output": not_transposed},
        fits=lambda workload: _has_heads(workload) and workload.seq_len > 1,
        needs_all_rows=True,
    ),
    Mistake(
        name="merged_feature_by_feature",
        words="heads are merged in the wrong order: feature by feature instead of head by head",
        changes={"output": interleaved},
        fits=lambda workload: _has_heads(workload) and workload.value_dim > 1,
    ),
    Mistake(
        name="merged_in_reverse",
        words="heads are merged in the wrong order: the last head first",
        changes={"output": reversed_heads},
        fits=_has_heads,
    ),
    Mistake(
        name="no_output_projection",
        words="the output projection is left out",
        changes={"output": left_out},
        fits=_is_square,
    ),
    Mistake(
        name="no_output_bias",
        words="the output projection's bias is dropped",
        changes={"output": without_bias},
        fits=_is_module,
    ),
    Mistake(
        name="output_projection_transposed",
        words="the output projection's matrix is transposed",
        changes={"output": transposed},
        fits=_is_square,
    ),
)
