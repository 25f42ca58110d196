"""Operands in the wrong order: heads, batch rows and positions of query, key, value, output, bias and sinks."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake, hide, product, wrong
from attnbench.contract import softmax_with_sinks
from attnbench.workloads.workload import Workload

Order = list[int]
BATCH, HEAD, POSITION = 0, 1, 2
PARTS = {"query": ("query",), "key": ("key",), "value": ("value",), "keys and values": ("key", "value")}


def orders(number: int) -> dict[str, Order]:
    """Wrong orders of things by how they are described, none of them twice."""
    things = list(range(number))
    known = {"in reverse": things[::-1], "each in the place of the one before it": things[1:] + things[:1]}
    known["each in the place of the one after it"] = things[-1:] + things[:-1]
    for groups in range(2, number):
        if number % groups == 0:
            grouped = [row + groups * column for row in range(groups) for column in range(number // groups)]
            known[f"grouped as ({number // groups}, {groups}) and read as ({groups}, {number // groups})"] = grouped
    known["those of the first alone"] = [0] * number
    distinct = {tuple(order): words for words, order in reversed(known.items()) if order != things}
    return {words: list(order) for order, words in reversed(distinct.items())}


def key_heads(workload: Workload) -> dict[str, Order]:
    """The key/value head that each query head reads by mistake."""
    heads, groups = workload.num_heads, workload.num_kv_heads
    right = [head // (heads // groups) for head in range(heads)]
    known = {words: [order[group] for group in right] for words, order in orders(groups).items()}
    if 1 < groups < heads:
        known["read as head h % G by query head h: repeat instead of repeat_interleave"] = [
            head % groups for head in range(heads)
        ]
    return known


def taken(operands: tuple[str, ...], dim: int, order: Order, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, those of `operands` in another order."""
    named = dict(zip(("query", "key", "value"), tensors, strict=True))
    changed = (each[(slice(None),) * dim + (order,)] if name in operands else each for name, each in named.items())
    query, key, value = changed
    return query, key, value


def name_of(operand: str, axis: int, words: str) -> str:
    """The name of a mistake."""
    if words.startswith("read as head h %"):
        return "kv_heads_interleaved"
    return f"{operand.replace(' ', '_')}_{('batch', 'head', 'position')[axis]}_order"


def operands_permuted(workload: Workload) -> Iterator[Mistake]:
    """Query, key, value, or keys and values together, in another order of heads, batch rows or positions."""
    for operand, names in PARTS.items():
        for axis, number in ((BATCH, workload.batch_size), (POSITION, workload.kv_len)):
            if axis == POSITION and operand in {"query", "keys and values"}:
                continue  # rows of the output, or no change at all where every key is seen
            for words, order in orders(number).items() if number > 1 else ():
                if axis == POSITION and words.startswith(("grouped", "those")):
                    continue

                def attend(  # noqa: PLR0913, PLR0917 - the operands, then what is bound
                    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, names: tuple[str, ...], axis: int, order: Order
                ) -> Tensor:
                    return steps.attend(*taken(names, axis, order, query, key, value), mask)["context"]

                what = "batch rows" if axis == BATCH else "positions"
                change = partial(attend, names=names, axis=axis, order=order)
                yield wrong(name_of(operand, axis, words), f"the {what} of the {operand} are {words}", whole=change)
        if operand == "query":
            continue
        for words, order in key_heads(workload).items():

            def heads(
                query: Tensor, key: Tensor, value: Tensor, mask: RowMask, names: tuple[str, ...], order: Order
            ) -> tuple[Tensor, Tensor]:
                right = steps.heads(query, key, value, mask)
                return key[:, order] if "key" in names else right[0], value[:, order] if "value" in names else right[1]

            what = f"the heads of the {operand} are {words}"
            yield wrong(name_of(operand, HEAD, words), what, heads=partial(heads, names=names, order=order))


def outputs_permuted(workload: Workload) -> Iterator[Mistake]:
    """The output in another order; that of the query's heads comes to the same as of the key's and value's."""
    sizes = (workload.batch_size, workload.num_heads, workload.seq_len)
    for axis, number in enumerate(sizes):
        for words, order in orders(number).items() if number > 1 else ():
            if axis == POSITION and words.startswith("grouped"):
                continue

            def context(weights: Tensor, value: Tensor, mask: RowMask, axis: int, order: Order) -> Tensor:
                return steps.context(weights, value, mask)[(slice(None),) * axis + (order,)]

            what = ("batch rows", "heads", "rows")[axis]
            yield wrong(
                name_of("output", axis, words),
                f"the {what} of the output are {words}",
                "needs_all_rows" if axis == POSITION else "",
                context=partial(context, axis=axis, order=order),
            )


def biases_permuted(workload: Workload) -> Iterator[Mistake]:
    """Biases, slopes and sinks of other heads."""
    if workload.num_heads == 1:
        return
    for words, order in orders(workload.num_heads).items():
        if workload.mask_rule.changes_scores:

            def masked(scores: Tensor, mask: RowMask, order: Order) -> Tensor:
                for part in mask.rule.changes:
                    bias = mask.bias(part).expand(*scores.shape[-3:]) if part.is_additive and not part.is_learned else None
                    if part.is_learned:
                        bias = mask.bias(part).expand_as(scores)
                    scores = mask.change(scores, part) if bias is None else scores + bias[..., order, :, :].to(scores.dtype)
                return hide(scores, mask.seen)

            change = partial(masked, order=order)
            yield wrong("bias_head_order", f"the heads of the bias are {words}", masked_scores=change)
        if workload.sinks != "none":

            def weights(masked: Tensor, mask: RowMask, order: Order) -> Tensor:
                assert mask.sinks is not None
                return softmax_with_sinks(masked, mask.sinks[order])

            yield wrong("sink_head_order", f"the heads of the sinks are {words}", weights=partial(weights, order=order))


def viewed(tensor: Tensor) -> Tensor:
    """(B, T, H, K) that should be (B, H, T, K) by a view, without a transpose."""
    return tensor.transpose(1, 2).reshape(tensor.shape)


def across_heads(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """Attention among the heads of one position: (B, H, T, K) taken for (B, T, H, K)."""
    scores = product(query.transpose(1, 2), key.permute(0, 2, 3, 1)) * mask.scale_for(query.shape[-1])  # (B,T,H,H)
    return product(scores.softmax(dim=-1), value.transpose(1, 2)).transpose(1, 2)


def layouts_confused(workload: Workload) -> Iterator[Mistake]:
    """(B, H, T, K) taken for (B, T, H, K), or the other way round."""
    if workload.num_heads == 1 or workload.seq_len == 1:
        return
    whole = "needs_all_rows"
    if workload.seq_len == workload.kv_len:
        words = "query, key and value are read as (B, T, H, K), and are (B, H, T, K): attention runs over the heads"
        yield wrong("heads_for_positions", words, whole, whole=across_heads)
    operands: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
        "query, key and value": lambda query, key, value: (viewed(query), viewed(key), viewed(value)),
        "query": lambda query, key, value: (viewed(query), key, value),
        "key": lambda query, key, value: (query, viewed(key), value),
        "value": lambda query, key, value: (query, key, viewed(value)),
    }
    for operand, change in operands.items():

        def attend(
            query: Tensor, key: Tensor, value: Tensor, mask: RowMask, change: Callable[..., tuple[Tensor, Tensor, Tensor]]
        ) -> Tensor:
            return steps.attend(*change(query, key, value), mask)["context"]

        words = f"the {operand} went from (B, T, H, K) to (B, H, T, K) by a view or reshape, without a transpose"
        yield wrong("viewed_not_transposed", words, whole, whole=partial(attend, change=change))
    words = "heads and tokens of the output are exchanged by a view or reshape, without a transpose"
    yield wrong(
        "output_viewed_not_transposed",
        words,
        whole,
        context=lambda weights, value, mask: viewed(steps.context(weights, value, mask)),
    )


def permutations(workload: Workload) -> Iterator[Mistake]:
    """Every operand in a wrong order."""
    yield from operands_permuted(workload)
    yield from outputs_permuted(workload)
    yield from biases_permuted(workload)
    yield from layouts_confused(workload)
