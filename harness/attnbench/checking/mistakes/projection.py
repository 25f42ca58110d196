"""Mistakes before the scores: how x becomes query, key and value, and which key/value head a query head reads.

Mistakes of the projection can be made in scope `module` only.
"""

from collections.abc import Callable, Iterable
from itertools import permutations

import torch
from torch import Tensor

from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import has_several, mistake, project
from attnbench.contract import Weights, repeat_heads
from attnbench.workloads.workload import Workload

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
PARTS = ("query", "key", "value")


def packs_equal_heads(workload: Workload) -> bool:
    """Whether query, key and value have as many heads, of the same width."""
    return workload.num_heads == workload.num_kv_heads and workload.head_dim == workload.value_dim


def project_regrouped(
    x: Tensor, context: Tensor, weights: Weights, regroup: Callable[[list[Tensor]], Iterable[Tensor]]
) -> Triple:
    """Project with the rows (H, K, ...) of query, key and value regrouped: those of the weights and of the biases."""
    given = weights.tensors()
    named: dict[str, Tensor] = {}
    for kind in ("", "_bias") if weights.has_bias else ("",):
        names = [f"{part}{kind}" for part in PARTS]
        named |= dict(zip(names, regroup([given[name] for name in names]), strict=True))
    return project(x, context, Weights(**named))


@mistake("projection")
def no_input_biases(x: Tensor, context: Tensor, weights: Weights) -> Triple:
    """The biases of the input projections are dropped."""
    return project(x, context, Weights(query=weights.query, key=weights.key, value=weights.value))


@mistake("projection", has_several("num_heads", "seq_len"), needs_all_rows=True)
def projected_without_transpose(x: Tensor, context: Tensor, weights: Weights) -> Triple:
    """Heads are split by a view or reshape without a transpose: (B, T, H*K) read as (B, H, T, K)."""
    query, key, value = (made.transpose(1, 2).reshape(made.shape) for made in project(x, context, weights))
    return query, key, value


@mistake("projection", has_several("num_heads", "head_dim"))
def split_feature_by_feature(x: Tensor, context: Tensor, weights: Weights) -> Triple:
    """Heads are split in the wrong order: (K, H) instead of (H, K)."""

    def regroup(parts: list[Tensor]) -> Iterable[Tensor]:  # (H*K,) read as (K,H)
        return (part.flatten(0, 1).unflatten(0, (part.shape[1], part.shape[0])).transpose(0, 1) for part in parts)

    return project_regrouped(x, context, weights, regroup)


def wrong_orders(workload: Workload) -> dict[str, tuple[int, ...]]:
    """Every wrong order in which each part has weights of its own shape, as in "key, query and value": (1, 0, 2)."""
    groups, width, value = workload.num_kv_heads, workload.head_dim, workload.value_dim
    shapes = [(workload.num_heads, width), (groups, width), (groups, value)]
    orders = [order for order in permutations(range(3)) if [shapes[place] for place in order] == shapes]
    return {"{}, {} and {}".format(*(PARTS[place] for place in order)): order for order in orders[1:]}


@mistake("projection", choices=wrong_orders)
def projections_in_wrong_order(x: Tensor, context: Tensor, weights: Weights, choice: tuple[int, ...]) -> Triple:
    """Query, key and value are projected with the weights of {choice}, in that order."""
    return project_regrouped(x, context, weights, lambda parts: [parts[place] for place in choice])


@mistake("projection", has_several("num_heads"), packs_equal_heads)
def packed_read_head_by_head(x: Tensor, context: Tensor, weights: Weights) -> Triple:
    """Weights packed as all queries, all keys, all values are read head by head."""

    def regroup(parts: list[Tensor]) -> Iterable[Tensor]:
        num_heads, head_dim = parts[0].shape[:2]
        read = torch.cat([part.flatten(0, 1) for part in parts]).unflatten(0, (num_heads, 3, head_dim))
        return read[:, 0], read[:, 1], read[:, 2]

    return project_regrouped(x, context, weights, regroup)


@mistake("projection", has_several("num_heads"), packs_equal_heads)
def packed_read_in_thirds(x: Tensor, context: Tensor, weights: Weights) -> Triple:
    """Weights packed head by head are read as all queries, all keys, all values."""

    def regroup(parts: list[Tensor]) -> Iterable[Tensor]:
        packed = torch.stack(parts, dim=1).flatten(0, 2)  # (H,3,K,...) -> (H*3*K,...)
        return (part.unflatten(0, parts[0].shape[:2]) for part in packed.chunk(3))

    return project_regrouped(x, context, weights, regroup)


@mistake("heads", lambda workload: 1 < workload.num_kv_heads < workload.num_heads)
def kv_heads_interleaved(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """Query head h reads key/value head h % G instead of h // (H / G): repeat instead of repeat_interleave."""
    times = query.shape[1] // key.shape[1]
    return key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1)


@mistake("heads", has_several("num_kv_heads"))
def first_kv_head_for_all(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """Every query head reads key/value head 0."""
    shape = (-1, query.shape[1], -1, -1)
    return key[:, :1].expand(shape), value[:, :1].expand(shape)


@mistake("heads", has_several("num_kv_heads"))
def first_value_head_for_all(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """Every head mixes the values of head 0."""
    return repeat_heads(key, query.shape[1]), value[:, :1].expand(-1, query.shape[1], -1, -1)


@mistake("heads", has_several("kv_len"))
def value_of_next_key(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """Each key is answered with the value of the key after it."""
    return repeat_heads(key, query.shape[1]), repeat_heads(value.roll(-1, dims=2), query.shape[1])
