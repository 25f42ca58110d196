"""Wrong backward passes after a right output: FlashAttention's backward pass with one step replaced.

The weights P are recomputed; dP = dO V^T; dS = P * (dP - D), where D is the row sum of P * dP; dQ = dS K, dK = dS^T Q
and dV = P^T dO. A constant times the right gradient is not included: the diagnosis measures it.
Source: https://arxiv.org/abs/2307.08691, algorithm 2.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.mistakes import parts
from attnbench.checking.mistakes.permutations import AXES, in_order, orders, viewed
from attnbench.checking.mistakes.wrong_masks import ALIGNMENTS, Seen, distinct_masks
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake, hide, wrong
from attnbench.workloads.masks import Causal
from attnbench.workloads.workload import Workload

TILE_LENS = (16, 32, 64, 128, 256)
CLIPS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
OF_CONTEXT = {"incoming gradient", "value", "products", "weights of value", "gradient of value", "exchange"}
OF_WEIGHTS = {"weights", "weights of scores", "row sums", "scores"}
"""Changes in the backward pass of the weights; all others belong to that of the scores."""
Change = Callable[..., Tensor]
"""A function of a step's result; for weights and row sums, also of the scores and the mask."""


class _Written(torch.autograd.Function):
    """Attention with an explicit backward pass in which some steps are changed; it has no grouped heads."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - operands, and what is changed
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: RowMask,
        changes: Mapping[str, Change],
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.mask, ctx.changes = mask, changes
        return steps.attend(query, key, value, mask)["context"]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        query, key, value, incoming = (each.to(wide) for each in (*ctx.saved_tensors, grads[0]))
        mask = ctx.mask

        def step(name: str, tensor: Tensor, *more: object) -> Tensor:
            return ctx.changes[name](tensor, *more) if name in ctx.changes else tensor

        scale = mask.scale_for(query.shape[-1])
        scores = (query @ key.mT) * scale
        weights = step("weights", steps.weights(steps.masked_scores(scores, mask), mask), mask.changed(scores), mask)
        incoming = step("incoming gradient", incoming)
        along = step("products", incoming @ step("value", value).mT)
        inner = step("weights of scores", weights, mask.changed(scores), mask)
        sums = step("row sums", (inner * along).sum(dim=-1, keepdim=True))
        of_scores = step("scores", inner * (along - sums), mask) * mask.derivative(scores) * scale
        made = (
            step("gradient of query", step("scores of query", of_scores, mask) @ step("key", key)),
            step("gradient of key", step("scores of key", of_scores, mask).mT @ step("query", query)),
            step("gradient of value", step("weights of value", weights).mT @ incoming),
        )
        if "exchange" in ctx.changes:
            made = (made[0], made[2], made[1])
        return *(each.to(grads[0].dtype) for each in made), None, None


def backward(name: str, words: str, **changes: Change) -> Mistake:
    """A mistake in some steps of the backward pass; in the keywords, `_` stands for a space."""
    named = {step.replace("_", " "): change for step, change in changes.items()}

    def whole(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Tensor:
        made: Tensor = _Written.apply(query, key, value, mask, named)  # type: ignore[no-untyped-call]
        return made

    step = "context" if named.keys() <= OF_CONTEXT else "weights" if named.keys() <= OF_WEIGHTS else "scores"
    flags = "is_gradient needs_all_rows"
    return replace(wrong(name, f"in the backward pass {words}", flags, whole=whole), step=step)


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round the tensor to another dtype and back."""
    return tensor.to(dtype).to(tensor.dtype)


def repeated(tensor: Tensor, first: int) -> Tensor:
    """Repeat the first rows: (..., R, n) -> (..., R, n)."""
    return tensor[..., torch.arange(tensor.shape[-2], device=tensor.device) % first, :]


def row_sums(workload: Workload) -> Iterator[Mistake]:
    """Wrong or missing row sums in the softmax's gradient."""
    name = "gradient_row_sums"
    kinds: dict[str, Change] = {
        "is left out": lambda x: 0 * x,
        "is a mean over the keys": lambda x: x / workload.kv_len,
        "is added instead of taken away": lambda x: -x,
        "is twice what it should be": lambda x: 2 * x,
        "is half of what it should be": lambda x: x / 2,
        "is that of the query before": lambda x: x.roll(1, -2),
        "is that of the next query": lambda x: x.roll(-1, -2),
        "is the mean over the queries": lambda x: x.mean(dim=-2, keepdim=True).expand_as(x),
    }
    kinds |= {
        f"is that of the first {first} queries again and again": partial(repeated, first=first)
        for first in TILE_LENS
        if first < workload.seq_len
    }
    for words, change in kinds.items():
        yield backward(name, f"the row sum of weights times their gradient {words}", row_sums=change)


def under(_: Tensor, scores: Tensor, mask: RowMask, seen: Seen, *, is_anew: bool = False) -> Tensor:
    """The weights with other visible keys, divided by the sums of the forward pass or by new ones."""
    masked = hide(scores, seen(mask))
    if is_anew:
        return masked.softmax(dim=-1).nan_to_num(0.0)
    return (masked - sums_of(scores, mask)).exp()


def sums_of(scores: Tensor, mask: RowMask) -> Tensor:
    """The logsumexp of each row in the forward pass."""
    return hide(scores, mask.seen).logsumexp(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)


def with_sums(_: Tensor, scores: Tensor, mask: RowMask, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The weights with changed logsumexps."""
    total = hide(scores, mask.seen).logsumexp(dim=-1, keepdim=True)
    return (hide(scores, mask.seen) - change(total)).exp().nan_to_num(0.0)


def unnormalised(weights: Tensor) -> Tensor:
    """The exponentials, not divided by their sum."""
    return weights / weights.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def weights(workload: Workload) -> Iterator[Mistake]:
    """Wrong recomputed weights: under another mask, or with other sums."""
    name = "gradient_under_another_mask"
    for each in distinct_masks(workload):
        yield backward(name, each.words, weights=partial(under, seen=each.seen))
        if each.name in {*ALIGNMENTS, "mask_ignored", "padding_ignored", "causal_unasked"}:
            anew = partial(under, seen=each.seen, is_anew=True)
            yield backward(name, f"{each.words}, with a softmax of its own", weights=anew)
            words = f"{each.words}, in the gradients of query and key"
            yield backward(name, words, weights_of_scores=anew)
    if workload.mask_rule.hides:
        even: Change = lambda x, _, mask: x.where(mask.seen.any(dim=-1, keepdim=True), 1 / x.shape[-1])  # noqa: E731
        yield backward(name, "a query that sees no key weighs all keys alike", weights=even)
    for is_anew in (False, True) if workload.mask_rule.changes_scores else ():
        words = "the scores are computed again without the bias" + ", with a softmax of its own" * is_anew
        yield backward("gradient_without_bias", words, weights=partial(without_bias, is_anew=is_anew))
    sums: dict[str, Callable[[Tensor], Tensor]] = {
        f"those of the first {first} queries again and again": partial(repeated, first=first)
        for first in TILE_LENS
        if first < workload.seq_len
    }
    sums["those of head 0"] = lambda x: x[:, :1].expand_as(x)
    sums["rounded to bfloat16"] = partial(rounded, dtype=torch.bfloat16)
    sums["rounded to float16"] = partial(rounded, dtype=torch.float16)
    for words, change in sums.items():
        text = f"the logsumexps that the weights are computed from are {words}"
        yield backward("gradient_logsumexp", text, weights=partial(with_sums, change=change))
    for dtype in (torch.bfloat16, torch.float16) if workload.dtype in {"float32", "float64"} else ():
        again: Change = lambda _, x, mask, dtype=dtype: steps.weights(hide(rounded(x, dtype), mask.seen), mask)  # noqa: E731
        words = f"the scores are computed again in {str(dtype).removeprefix('torch.')}"
        yield backward("recomputed_in_half", words, weights=again)
    words = "the weights of the value's gradient are not divided by their sum"
    yield backward("gradient_not_normalised", words, weights_of_value=unnormalised)


def without_bias(_: Tensor, changed: Tensor, mask: RowMask, *, is_anew: bool) -> Tensor:
    """The weights of scores without biases, divided by the sums of the forward pass or by new ones."""
    added = [mask.bias(part).to(changed) for part in mask.rule.changes if part.is_additive]
    masked = hide(functools.reduce(torch.sub, added, changed), mask.seen)
    return masked.softmax(dim=-1).nan_to_num(0.0) if is_anew else (masked - sums_of(changed, mask)).exp()


def read_as(tensor: Tensor) -> Tensor:
    """Read (B, H, T, K) as (B, T, H, K) by a view, without a transpose."""
    batch, heads, length, width = tensor.shape
    return tensor.reshape(batch, length, heads, width).transpose(1, 2)


def permuted(workload: Workload) -> Iterator[Mistake]:
    """Operands and results in another order of batch rows, heads or positions."""
    sizes = (workload.batch_size, workload.num_heads)
    for operand in ("incoming_gradient", "query", "key", "value", "row_sums", "weights"):
        for axis, number in enumerate(sizes):
            for words, order in orders(number).items():
                change = in_order(axis, order)
                text = f"the {AXES[axis]}s of the {operand.replace('_', ' ')} are {words}"
                text = text.replace("batchs", "batch rows")
                more: Change = lambda x, *_, change=change: change(x)  # noqa: E731
                yield backward("gradient_operand_order", text, **{operand: more})
    lengths = {"query": workload.seq_len, "key": workload.kv_len, "value": workload.kv_len}
    for operand, length in lengths.items():
        for axis, number in enumerate((*sizes, length)):
            for words, order in orders(number).items():
                if AXES[axis] == "position" and words.startswith("grouped"):
                    continue
                text = f"the {AXES[axis]}s of the gradient of {operand} are {words}".replace("batchs", "batch rows")
                yield backward("gradient_order", text, **{f"gradient_of_{operand}": in_order(axis, order)})
    for read, words in ((viewed, "(B, H, T, K)"), (read_as, "(B, T, H, K)")):
        text = f"the incoming gradient lies in memory in another order, and is read as {words}"
        yield backward("gradient_operand_order", text, incoming_gradient=read)
    if workload.head_dim == workload.value_dim:
        words = "the gradients of key and value have changed places"
        yield backward("gradient_order", words, exchange=lambda x: x)
    if workload.seq_len == workload.kv_len:
        words = "the gradient of the scores is transposed"
        yield backward("gradient_order", words, scores=lambda x, _: x.mT)


def zeroed(tensor: Tensor, *_: object, places: range, dim: int) -> Tensor:
    """The tensor with these rows or columns set to 0."""
    return tensor.index_fill(dim, torch.arange(places.start, places.stop, device=tensor.device), 0.0)


def lost(workload: Workload) -> Iterator[Mistake]:
    """Tiles of queries or keys that are missing from a sum, or counted with the wrong sign."""
    sums = {
        "key": ("scores_of_key",),
        "value": ("weights_of_value",),
        "key and value": ("scores_of_key", "weights_of_value"),
    }
    length = workload.seq_len
    starts = sorted({(length - 1) // tile * tile for tile in parts.TILE_LENS if tile < length})
    last = [("all but the last tile", range(start)) for start in starts]
    for what, places in (*parts.tiles_of(length), *last):
        where = f"{what} is left out: queries {places.start} to {places.stop - 1}"
        for operand, names in sums.items():
            changes = dict.fromkeys(names, partial(zeroed, places=places, dim=-2))
            yield backward("gradient_tile_lost", f"of the sum over the queries of the {operand} {where}", **changes)
    for what, places in parts.tiles_of(workload.kv_len):
        where = f"{what} is left out: keys {places.start} to {places.stop - 1}"
        change = partial(zeroed, places=places, dim=-1)
        yield backward("gradient_tile_lost", f"of the sum over the keys of the query {where}", scores_of_query=change)
        words = f"{where}, in all gradients"
        both: Change = lambda x, *_, change=change: change(x)  # noqa: E731
        yield backward("gradient_tile_lost", words, weights=both)
    steps_of = {"scores": "all", "scores_of_query": "that of the query", "scores_of_key": "that of the key"}
    for tile in TILE_LENS if any(isinstance(each, Causal) for each in workload.mask_rule.parts) else ():
        for step, which in steps_of.items() if tile < length else ():
            words = f"tiles of {tile} queries and {tile} keys on the diagonal are left out of {which}"
            yield backward("gradient_tile_lost", words, **{step: partial(off_diagonal, tile=tile)})
    for step, which in steps_of.items() if not workload.mask_rule.hides else ():
        for words, factor in (("have the wrong sign", -1.0), ("have no gradient", 0.0)):
            text = f"scores above the diagonal {words} in {which}"
            yield backward("gradient_above_diagonal", text, **{step: partial(above_diagonal, factor=factor)})


def above_diagonal(of_scores: Tensor, mask: RowMask, factor: float) -> Tensor:
    """The gradients of the scores with those above the diagonal times a factor."""
    return of_scores.where(mask.keys <= mask.queries, factor * of_scores)


def off_diagonal(of_scores: Tensor, mask: RowMask, tile: int) -> Tensor:
    """The gradients of the scores for keys outside the query's own tile."""
    return of_scores.where(mask.keys // tile != mask.queries // tile, 0.0)


def grouped(workload: Workload) -> Iterator[Mistake]:
    """Wrong sums over the query heads that share a key."""
    times = workload.num_heads // workload.num_kv_heads
    if times == 1:
        return
    is_first = (torch.arange(workload.num_heads) % times == 0)[:, None, None]
    groups, heads = workload.num_kv_heads, range(workload.num_heads)
    interleaved = [head // groups + head % groups * times for head in heads]
    kinds: dict[str, Change] = {
        "is that of the first query head of the group alone": lambda x: x * is_first.to(x),
        "is that of the last query head of the group alone": lambda x: x * is_first.flip(0).to(x),
        "is a mean over the group's query heads, not their sum": lambda x: x / times,
        "is summed over every G-th query head instead of those of its group": in_order(1, interleaved),
    }
    for words, change in kinds.items():
        for names in (("key",), ("value",), ("key", "value")):
            text = f"the gradient of {' and '.join(names)} {words}"
            yield backward("gradient_of_group", text, **{f"gradient_of_{name}": change for name in names})


def roundings(workload: Workload) -> Iterator[Mistake]:
    """Rounding, truncating or clipping only in the backward pass."""
    halves = {"bfloat16": torch.bfloat16, "float16": torch.float16} if workload.dtype.startswith("float") else {}
    eights = {"8 bits (e5m2)": torch.float8_e5m2, "8 bits (e4m3)": torch.float8_e4m3fn}
    for words, dtype in (halves | eights).items():
        for operand in ("incoming_gradient", "weights", "query", "key", "value", "scores", "weights_of_value"):
            if dtype.itemsize == 1 or workload.dtype in {"float32", "float64"}:
                change: Change = lambda x, *_, dtype=dtype: rounded(x, dtype)  # noqa: E731
                text = f"the {operand.replace('_', ' ')} are rounded to {words}"
                yield backward("gradient_rounded", text, **{operand: change})
    inputs: dict[str, Change] = dict.fromkeys(("query", "key", "value"), partial(rounded, dtype=torch.bfloat16))
    if workload.dtype in {"float32", "float64"}:
        yield backward("gradient_rounded", "query, key and value are rounded to bfloat16", **inputs)
        every = inputs | {"incoming_gradient": inputs["query"]}
        yield backward("gradient_rounded", "all operands are rounded to bfloat16", **every)
    for most in CLIPS:
        words = f"the products of incoming gradient and value are clipped at {most:g}"
        yield backward("gradient_clipped", words, products=partial(torch.clamp, min=-most, max=most))
    for width in (2**power for power in range(8)):
        if width < workload.value_dim:
            words = f"only the first {width} of {workload.value_dim} numbers of a value count"
            cut = partial(zeroed, places=range(width, workload.value_dim), dim=-1)
            yield backward("gradient_width_cut", words, value=cut)


def wrong_gradients(workload: Workload) -> Iterator[Mistake]:
    """Every mistake of the backward pass alone; none if other operands have gradients."""
    if workload.operands or workload.direction == "inference":
        return
    for kind in (row_sums, weights, permuted, lost, grouped, roundings):
        yield from kind(workload)
