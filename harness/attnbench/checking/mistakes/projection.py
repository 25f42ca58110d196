"""Mistakes before attention: how x becomes query, key and value. Scope `module` only."""

from collections.abc import Iterator
from itertools import permutations

import torch
from torch import Tensor

from attnbench.checking.mistakes.kind import Mistake
from attnbench.checking.steps import Changes, product, project
from attnbench.contract import Weights
from attnbench.workloads.workload import Workload

Three = tuple[Tensor, Tensor, Tensor]
PARTS = ("query", "key", "value")


def without_biases(x: Tensor, context: Tensor, weights: Weights) -> Three:
    """The input projections without their biases."""
    return project(x, context, Weights(query=weights.query, key=weights.key, value=weights.value))


def viewed(x: Tensor, context: Tensor, weights: Weights) -> Three:
    """(B, T, H*K) viewed as (B, H, T, K) without a transpose, and key and value likewise."""
    query, key, value = (
        made.transpose(1, 2).reshape(made.shape)  # (B,H,T,K) -> (B,T,H,K), read as (B,H,T,K)
        for made in project(x, context, weights)
    )
    return query, key, value


def in_order(order: tuple[str, str, str]) -> Changes:
    """Query, key and value are given one another's weights."""

    def projected(x: Tensor, context: Tensor, weights: Weights) -> Three:
        named = weights.tensors()
        pairs = list(zip(PARTS, order, strict=True))
        mixed = {part: named[taken] for part, taken in pairs}
        mixed |= {f"{part}_bias": named[f"{taken}_bias"] for part, taken in pairs if f"{taken}_bias" in named}
        return project(x, context, Weights(**mixed))

    return {"projection": projected}


def _regrouped(rows: tuple[Tensor, Tensor, Tensor], *, is_per_head: bool) -> Three:
    """Rows packed one way, (H, K, ...) each, and read the other way."""
    num_heads, head_dim = rows[0].shape[:2]
    if is_per_head:  # packed all queries, all keys, all values; read head by head
        read = torch.unflatten(torch.cat([part.flatten(0, 1) for part in rows]), 0, (num_heads, 3, head_dim))
        return read[:, 0], read[:, 1], read[:, 2]
    packed = torch.stack(rows, dim=1).flatten(0, 2)  # packed head by head; read in three thirds
    query, key, value = (torch.unflatten(part, 0, (num_heads, head_dim)) for part in packed.chunk(3))
    return query, key, value


def misread(*, is_per_head: bool) -> Changes:
    """A packed projection read in another layout than it was packed in."""

    def projected(x: Tensor, context: Tensor, weights: Weights) -> Three:
        rows = _regrouped((weights.query, weights.key, weights.value), is_per_head=is_per_head)
        named = dict(zip(PARTS, rows, strict=True))
        if weights.query_bias is not None and weights.key_bias is not None and weights.value_bias is not None:
            biases = _regrouped((weights.query_bias, weights.key_bias, weights.value_bias), is_per_head=is_per_head)
            named |= {f"{part}_bias": bias for part, bias in zip(PARTS, biases, strict=True)}
        return project(x, context, Weights(**named))

    return {"projection": projected}


def feature_by_feature(x: Tensor, context: Tensor, weights: Weights) -> Three:
    """(B, T, H*K) split as (K, H) instead of (H, K)."""

    def split(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        num_heads, width = weight.shape[:2]
        flat = product(tokens, weight.flatten(0, 1).T) + (0.0 if bias is None else bias.flatten())
        return torch.unflatten(flat, -1, (width, num_heads)).permute(0, 3, 1, 2)

    return (
        split(x, weights.query, weights.query_bias),
        split(context, weights.key, weights.key_bias),
        split(context, weights.value, weights.value_bias),
    )


class Order(tuple[str, str, str]):
    """Whose weights query, key and value are given."""

    __slots__ = ()

    def __str__(self) -> str:
        """As a person says it."""
        return f"{self[0]}, {self[1]} and {self[2]}"


def _orders(workload: Workload) -> Iterator[Order]:
    """Every wrong order whose parts have the shapes that they are taken for."""
    groups, width, value = workload.num_kv_heads, workload.head_dim, workload.value_dim
    shapes = {"query": (workload.num_heads, width), "key": (groups, width), "value": (groups, value)}
    for order in permutations(PARTS):
        if order != PARTS and all(shapes[part] == shapes[taken] for part, taken in zip(PARTS, order, strict=True)):
            yield Order(order)


def _is_module(workload: Workload) -> bool:
    return workload.scope == "module"


def _is_uniform(workload: Workload) -> bool:
    alike = workload.num_heads == workload.num_kv_heads and workload.head_dim == workload.value_dim
    return _is_module(workload) and alike and workload.num_heads > 1


MISTAKES = (
    Mistake(
        name="no_input_biases",
        words="the biases of the input projections are dropped",
        changes={"projection": without_biases},
        fits=_is_module,
    ),
    Mistake(
        name="projected_without_transpose",
        words="heads are split by a view or reshape without a transpose: (B, T, H*K) read as (B, H, T, K)",
        changes={"projection": viewed},
        fits=lambda workload: _is_module(workload) and workload.num_heads > 1 and workload.seq_len > 1,
        needs_all_rows=True,
    ),
    Mistake(
        name="split_feature_by_feature",
        words="heads are split in the wrong order: (K, H) instead of (H, K)",
        changes={"projection": feature_by_feature},
        fits=lambda workload: _is_module(workload) and workload.num_heads > 1 and workload.head_dim > 1,
    ),
    Mistake(
        name="projections_in_wrong_order",
        words="query, key and value are projected with the weights of {choice}, in that order",
        changes=in_order,
        fits=lambda workload: _is_module(workload) and any(_orders(workload)),
        choices=_orders,
    ),
    Mistake(
        name="packed_read_head_by_head",
        words="weights packed as all queries, all keys, all values are read head by head",
        changes=misread(is_per_head=True),
        fits=_is_uniform,
    ),
    Mistake(
        name="packed_read_in_thirds",
        words="weights packed head by head are read as all queries, all keys, all values",
        changes=misread(is_per_head=False),
        fits=_is_uniform,
    ),
)
