"""Operands in the wrong order: heads, batch rows and positions of query, key, value, output, bias and sinks."""

from collections.abc import Callable, Iterator

from torch import Tensor

from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake, after, before, product, with_bias, wrong
from attnbench.contract import softmax_with_sinks
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


def orders(number: int) -> dict[str, list[int]]:
    """Distinct wrong orders of `number` things, by description."""
    things = list(range(number))
    known = {
        "in reverse": things[::-1],
        "one place early": things[1:] + things[:1],
        "one place late": [-1, *things[:-1]],
    }
    known |= {
        f"grouped as ({number // rows}, {rows}) and read as ({rows}, {number // rows})": [
            row + rows * column for row in range(rows) for column in range(number // rows)
        ]
        for rows in range(2, number)
        if number % rows == 0
    }
    known["those of the first alone"] = [0] * number
    distinct = {tuple(place % number for place in order): words for words, order in reversed(known.items())}
    return {words: list(order) for order, words in reversed(distinct.items()) if list(order) != things}


def in_order(axis: int, order: list[int]) -> Callable[[Tensor], Tensor]:
    """A function that reorders one axis of a tensor."""
    return lambda tensor: tensor[(slice(None),) * axis + (order,)]


def reordered(what: str, *sizes: int) -> Iterator[tuple[str, str, Callable[[Tensor], Tensor]]]:
    """Wrong orders of a tensor along its first axes, which have these sizes: the axis, the words, and the change."""
    for place, ((axis, plural), number) in enumerate(zip(AXES.items(), sizes, strict=False)):
        for words, order in orders(number).items():
            if axis != "position" or not words.startswith("grouped"):
                yield axis, f"the {plural} of the {what.replace('_', ' ')} are {words}", in_order(place, order)


def viewed(tensor: Tensor) -> Tensor:
    """Read (B, T, H, K) as (B, H, T, K) by a view, without a transpose."""
    return tensor.transpose(1, 2).reshape(tensor.shape)


def across_heads(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """Attention among the heads of one position: (B, H, T, K) read as (B, T, H, K)."""
    scores = product(query.transpose(1, 2), key.permute(0, 2, 3, 1)) * mask.scale_for(query.shape[-1])  # (B,T,H,H)
    return product(scores.softmax(dim=-1), value.transpose(1, 2)).transpose(1, 2)


def of_operands(workload: Workload) -> Iterator[Mistake]:
    """Query, key, value, keys with their values, or the output in another order along one axis."""
    batch_size, of_query, of_key = workload.batch_size, workload.num_heads, workload.num_kv_heads
    for operand, (step, places) in OPERANDS.items():
        sizes = (batch_size, of_key, workload.kv_len) if step == "heads" else (batch_size, of_query, workload.seq_len)
        axes = 1 if operand == "query" else 3  # its other axes are as for keys and values, or the output
        for axis, words, change in reordered(operand, *sizes[:axes]):
            flags = "needs_all_rows" * (operand == "output" and axis == "position")
            replaced = before(step, change, *places) if places else after(step, change)
            yield wrong(f"{operand}_{axis}_order", words, flags, **{step: replaced})
    times = of_query // of_key
    if min(times, of_key) > 1:
        words = "query head h reads key/value head h % G, not h // (H / G): repeat instead of repeat_interleave"
        repeated = lambda _, key, value, __: (key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1))  # noqa: E731
        yield wrong("kv_heads_interleaved", words, heads=repeated)


def of_heads(workload: Workload) -> Iterator[Mistake]:
    """Biases and sinks of the wrong heads."""
    has_bias = any(part.is_additive for part in workload.mask_rule.changes)
    for words, order in orders(workload.num_heads).items():
        if has_bias:
            other = with_bias(lambda bias, *_, order=order: bias[:, order])
            yield wrong("bias_head_order", f"the heads of the bias are {words}", masked_scores=other)
        if workload.sinks != "none":
            change = lambda masked, mask, order=order: softmax_with_sinks(masked, mask.sinks[order])  # noqa: E731
            yield wrong("sink_head_order", f"the heads of the sinks are {words}", weights=change)


def of_layouts(workload: Workload) -> Iterator[Mistake]:
    """(B, H, T, K) read as (B, T, H, K), or the reverse."""
    if min(workload.num_heads, workload.seq_len) == 1:
        return
    if workload.seq_len == workload.kv_len:
        words = "query, key and value are read as (B, T, H, K), and are (B, H, T, K): attention runs over the heads"
        yield wrong("heads_for_positions", words, "needs_all_rows", whole=across_heads)
    words = "a view or reshape without a transpose makes (B, H, T, K) of (B, T, H, K)"
    every = {"scores": before("scores", viewed, 0), "heads": before("heads", viewed, 1, 2)}
    yield wrong("viewed_not_transposed", f"{words}, in query, key and value", "needs_all_rows", **every)
    for operand in ("query", "key", "value"):
        step, places = OPERANDS[operand]
        change = before(step, viewed, *places)
        yield wrong("viewed_not_transposed", f"{words}, in the {operand}", "needs_all_rows", **{step: change})
    words = "heads and tokens of the output are exchanged by a view or reshape, without a transpose"
    yield wrong("output_viewed_not_transposed", words, "needs_all_rows", context=after("context", viewed))


def permutations(workload: Workload) -> Iterator[Mistake]:
    """Every operand in a wrong order."""
    yield from of_operands(workload)
    yield from of_heads(workload)
    yield from of_layouts(workload)
