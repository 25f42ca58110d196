"""Operands in the wrong order: heads, batch rows and positions of query, key, value, output, bias and sinks."""

from collections.abc import Callable, Iterator

from torch import Tensor

from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake, after, before, hide, product, wrong
from attnbench.contract import softmax_with_sinks
from attnbench.workloads.workload import Workload

AXES = ("batch", "head", "position")
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


def viewed(tensor: Tensor) -> Tensor:
    """Read (B, T, H, K) as (B, H, T, K) by a view, without a transpose."""
    return tensor.transpose(1, 2).reshape(tensor.shape)


def across_heads(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """Attention among the heads of one position: (B, H, T, K) read as (B, T, H, K)."""
    scores = product(query.transpose(1, 2), key.permute(0, 2, 3, 1)) * mask.scale_for(query.shape[-1])  # (B,T,H,H)
    return product(scores.softmax(dim=-1), value.transpose(1, 2)).transpose(1, 2)


def of_operands(workload: Workload) -> Iterator[Mistake]:
    """Query, key, value, keys with their values, or the output in another order along one axis."""
    for operand, (step, places) in OPERANDS.items():
        is_output, what = operand == "output", operand.replace("_", " ")
        heads = workload.num_kv_heads if step == "heads" else workload.num_heads
        sizes = (workload.batch_size, heads, workload.kv_len if step == "heads" else workload.seq_len)
        for axis, number in enumerate(sizes):
            if operand == "query" and axis:
                continue  # same as for keys and values, or the output
            for words, order in orders(number).items():
                if AXES[axis] == "position" and words.startswith("grouped"):
                    continue
                change = in_order(axis, order)
                replaced = after(step, change) if is_output else before(step, change, *places)
                flags = "needs_all_rows" if is_output and AXES[axis] == "position" else ""
                text = f"the {AXES[axis]}s of the {what} are {words}".replace("batchs", "batch rows")
                yield wrong(f"{operand}_{AXES[axis]}_order", text, flags, **{step: replaced})
    times = workload.num_heads // workload.num_kv_heads
    if min(times, workload.num_kv_heads) > 1:
        words = "query head h reads key/value head h % G, not h // (H / G): repeat instead of repeat_interleave"
        repeated = lambda _, key, value, __: (key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1))  # noqa: E731
        yield wrong("kv_heads_interleaved", words, heads=repeated)


def biased(scores: Tensor, mask: RowMask, order: list[int]) -> Tensor:
    """The masked scores with biases in another order of heads."""
    for part in mask.rule.changes:
        if part.is_additive:
            scores = scores + mask.bias(part).expand(scores.shape)[:, order].to(scores.dtype)
        else:
            scores = mask.change(scores, part)
    return hide(scores, mask.seen)


def of_heads(workload: Workload) -> Iterator[Mistake]:
    """Biases and sinks of the wrong heads."""
    for words, order in orders(workload.num_heads).items():
        if any(part.is_additive for part in workload.mask_rule.changes):
            change = lambda scores, mask, order=order: biased(scores, mask, order)  # noqa: E731
            yield wrong("bias_head_order", f"the heads of the bias are {words}", masked_scores=change)
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
    views = {
        "query": before("scores", viewed, 0),
        "key": before("heads", viewed, 1),
        "value": before("heads", viewed, 2),
    }
    every = {"scores": views["query"], "heads": before("heads", viewed, 1, 2)}
    words = "a view or reshape without a transpose makes (B, H, T, K) of (B, T, H, K)"
    yield wrong("viewed_not_transposed", f"{words}, in query, key and value", "needs_all_rows", **every)
    for operand, change in views.items():
        step = OPERANDS[operand][0]
        yield wrong("viewed_not_transposed", f"{words}, in the {operand}", "needs_all_rows", **{step: change})
    words = "heads and tokens of the output are exchanged by a view or reshape, without a transpose"
    yield wrong("output_viewed_not_transposed", words, "needs_all_rows", context=after("context", viewed))


def permutations(workload: Workload) -> Iterator[Mistake]:
    """Every operand in a wrong order."""
    yield from of_operands(workload)
    yield from of_heads(workload)
    yield from of_layouts(workload)
