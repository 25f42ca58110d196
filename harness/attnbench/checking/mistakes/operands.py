"""Operands in the wrong order: heads, batch rows and positions; memory read in another layout; wrong projections."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnbench.checking import oracle
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake, after, before, product, with_bias, wrong
from attnbench.contract import Weights
from attnbench.workloads.workload import Workload

AXES = {"batch": "batch rows", "head": "heads", "position": "positions"}
OPERANDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "query": ("scores", (0,)),
    "key": ("heads", (1,)),
    "value": ("heads", (2,)),
    "keys_and_values": ("heads", (1, 2)),
    "output": ("context", ()),
}
"""The step that reads each operand, and the operand's places in its arguments; the step that returns the output."""
PARTS = ("query", "key", "value")


def orders(number: int) -> dict[str, list[int]]:
    """Distinct wrong orders of `number` things, by description."""
    things = list(range(number))
    known = {
        "in reverse": things[::-1],
        "one place early": things[1:] + things[:1],
        "one place late": things[-1:] + things[:-1],
        "those of the first alone": [0] * number,
    }
    for rows in (rows for rows in range(2, number) if number % rows == 0):
        words = f"grouped as ({number // rows}, {rows}) and read as ({rows}, {number // rows})"
        known[words] = [row + rows * column for row in range(rows) for column in range(number // rows)]
    distinct = {tuple(order): words for words, order in reversed(known.items())}
    return {words: list(order) for order, words in reversed(distinct.items()) if list(order) != things}


def in_order(axis: int, order: list[int]) -> Callable[[Tensor], Tensor]:
    """A function that reorders one axis of a tensor."""
    return lambda tensor: tensor[(slice(None),) * axis + (order,)]


def reordered(workload: Workload) -> Iterator[Mistake]:
    """Query, key, value, keys with their values, or the output in another order along one axis."""
    batch_size, of_query, of_key = workload.batch_size, workload.num_heads, workload.num_kv_heads
    for operand, (step, places) in OPERANDS.items():
        sizes = (batch_size, of_key, workload.kv_len) if step == "heads" else (batch_size, of_query, workload.seq_len)
        axes = 1 if operand == "query" else 3  # its other axes are as for keys and values, or the output
        for place, (axis, number) in enumerate(zip(AXES, sizes[:axes], strict=False)):
            for words, order in orders(number).items():
                if axis == "position" and words.startswith("grouped"):
                    continue
                change, text = (
                    in_order(place, order),
                    f"the {AXES[axis]} of the {operand.replace('_', ' ')} are {words}",
                )
                changes = {step: before(step, change, *places) if places else after(step, change)}
                flags = "needs_all_rows" * (operand == "output" and axis == "position")
                yield wrong(f"{operand}_{axis}_order", text, flags, **changes)
    times = of_query // of_key
    if min(times, of_key) > 1:
        words = "query head h reads key/value head h % G, not h // (H / G): repeat instead of repeat_interleave"
        repeated = lambda _, key, value, __: (key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1))  # noqa: E731
        yield wrong("kv_heads_interleaved", words, heads=repeated)
    for words, order in (
        orders(of_query).items() if any(part.is_additive for part in workload.mask_rule.changes) else ()
    ):
        other = with_bias(lambda bias, *_, order=order: bias[:, order])
        yield wrong("bias_head_order", f"the heads of the bias are {words}", masked_scores=other)


def viewed(tensor: Tensor) -> Tensor:
    """Read (B, T, H, K) as (B, H, T, K) by a view, without a transpose."""
    return tensor.transpose(1, 2).reshape(tensor.shape)


def across_heads(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """Attention among the heads of one position: (B, H, T, K) read as (B, T, H, K)."""
    scores = product(query.transpose(1, 2), key.permute(0, 2, 3, 1)) * mask.scale_for(query.shape[-1])  # (B,T,H,H)
    return product(scores.softmax(dim=-1), value.transpose(1, 2)).transpose(1, 2)


def layouts(workload: Workload) -> Iterator[Mistake]:
    """(B, H, T, K) read as (B, T, H, K), or the reverse."""
    if min(workload.num_heads, workload.seq_len) == 1:
        return
    if workload.seq_len == workload.kv_len:
        words = "query, key and value are read as (B, T, H, K), and are (B, H, T, K): attention runs over the heads"
        yield wrong("heads_for_positions", words, "needs_all_rows", whole=across_heads)
    words = "a view or reshape without a transpose makes (B, H, T, K) of (B, T, H, K)"
    every = {"scores": before("scores", viewed, 0), "heads": before("heads", viewed, 1, 2)}
    yield wrong("viewed_not_transposed", f"{words}, in query, key and value", "needs_all_rows", **every)
    for operand in PARTS:
        step, places = OPERANDS[operand]
        change = {step: before(step, viewed, *places)}
        yield wrong("viewed_not_transposed", f"{words}, in the {operand}", "needs_all_rows", **change)
    words = "heads and tokens of the output are exchanged by a view or reshape, without a transpose"
    yield wrong("output_viewed_not_transposed", words, "needs_all_rows", context=after("context", viewed))


def regrouped(regroup: Callable[[list[Tensor]], Iterable[Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    """A projection whose weights and biases (H, K, ...) of query, key and value are regrouped."""

    def projected(x: Tensor, context: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        tensors, named = weights.filled().tensors(), dict[str, Tensor]()
        for kind in ("", "_bias") if weights.has_bias else ("",):
            names = [f"{part}{kind}" for part in PARTS]
            named |= dict(zip(names, regroup([tensors[name] for name in names]), strict=True))
        return oracle.project(x, context, Weights(**named))

    return projected


def by_feature(parts: list[Tensor]) -> Iterable[Tensor]:
    """Read (H*K,) as (K, H)."""
    return (part.flatten(0, 1).unflatten(0, (part.shape[1], part.shape[0])).transpose(0, 1) for part in parts)


def by_head(parts: list[Tensor]) -> Iterable[Tensor]:
    """Read all queries, all keys, all values as head by head."""
    num_heads, head_dim = parts[0].shape[:2]
    packed = torch.cat([part.flatten(0, 1) for part in parts]).unflatten(0, (num_heads, 3, head_dim))
    return [packed[:, place] for place in range(3)]


def in_thirds(parts: list[Tensor]) -> Iterable[Tensor]:
    """Read head by head as all queries, all keys, all values."""
    packed = torch.stack(parts, dim=1).flatten(0, 2)  # (H,3,K,...) -> (H*3*K,...)
    return (part.unflatten(0, parts[0].shape[:2]) for part in packed.chunk(3))


def projections(workload: Workload) -> Iterator[Mistake]:
    """Mistakes of the projections, in scope `module`."""
    heads, groups, width, value = workload.num_heads, workload.num_kv_heads, workload.head_dim, workload.value_dim
    shapes, places = [(heads, width), (groups, width), (groups, value)], range(3)
    for order in itertools.permutations(places):
        if order != tuple(places) and [shapes[place] for place in order] == shapes:
            names = "{}, {} and {}".format(*(PARTS[at] for at in order))
            words = f"query, key and value are projected with the weights of {names}, in that order"
            change = regrouped(lambda parts, order=order: [parts[place] for place in order])  # type: ignore[misc]
            yield wrong("projections_in_wrong_order", words, projection=change)
    unbiased = before("projection", lambda weights: weights.biased("out"), 2)
    yield wrong("no_input_biases", "the biases of the input projections are dropped", projection=unbiased)
    words = "heads are split in the wrong order: (K, H) instead of (H, K)"
    yield wrong("split_feature_by_feature", words, projection=regrouped(by_feature))
    if heads == groups and width == value:
        words = "weights packed as all queries, keys, values are read head by head"
        yield wrong("packed_read_head_by_head", words, projection=regrouped(by_head))
        words = "weights packed head by head are read as all queries, keys, values"
        yield wrong("packed_read_in_thirds", words, projection=regrouped(in_thirds))
    words = "heads are merged feature by feature instead of head by head"
    by_features = before("output", lambda x: x.transpose(1, 3), 0)  # (B,H,R,V) -> (B,V,R,H)
    yield wrong("merged_feature_by_feature", words, output=by_features)
    words = "heads are merged by a view without a transpose"
    by_view = before("output", lambda x: x.reshape(x.shape[0], 1, x.shape[2], -1), 0)  # (B,H,R,V) read as (B,R,H*V)
    yield wrong("merged_without_transpose", words, "needs_all_rows", output=by_view)
    words = "the output projection's bias is dropped"
    yield wrong("no_output_bias", words, output=before("output", partial(replace, out_bias=None), 1))
    if heads * value == workload.embed_dim:
        words = "the output projection is left out"
        yield wrong("no_output_projection", words, output=before("output", partial(replace, out=None), 1))
        words = "the output projection's matrix is transposed"
        transposed = before("output", lambda weights: replace(weights, out=weights.out.T), 1)
        yield wrong("output_projection_transposed", words, output=transposed)


def wrong_operands(workload: Workload) -> Iterator[Mistake]:
    """Every operand in a wrong order or layout, and every wrong projection."""
    yield from reordered(workload)
    yield from layouts(workload)
    if workload.scope == "module":
        yield from projections(workload)
