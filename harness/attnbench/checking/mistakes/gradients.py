"""Wrong backward passes after a right output: FlashAttention's backward pass with one step replaced.

The weights P are recomputed; dP = dO V^T; dS = P * (dP - D), where D is the row sum of P * dP; dQ = dS K, dK = dS^T Q
and dV = P^T dO. A constant times the right gradient is not included: the diagnosis measures it.
Source: https://arxiv.org/abs/2307.08691, algorithm 2.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.mistakes import parts
from attnbench.checking.mistakes.permutations import in_order, reordered, viewed
from attnbench.checking.mistakes.wrong_masks import ALIGNMENTS, Seen, distinct_masks
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake, hide, wrong
from attnbench.workloads.masks import Causal
from attnbench.workloads.workload import Workload

TILE_LENS = (16, 32, 64, 128, 256)
CLIPS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
OF_CONTEXT = {"incoming gradient", "value", "products", "weights of value", "gradient of value", "exchange"}
OF_WEIGHTS = {"recomputed", "recomputed for scores", "weights", "row sums", "scores"}
"""Changes in the backward pass of the weights; all others belong to that of the scores."""
Change = Callable[[Tensor], Tensor]
"""A function of a step's result; "recomputed" weights are a function of the scores and the mask instead."""


class _Written(torch.autograd.Function):
    """Attention with an explicit backward pass in which some steps are changed; it has no grouped heads."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - operands, and what is changed
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: RowMask,
        changes: Mapping[str, Callable[..., Tensor]],
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.mask, ctx.changes = mask, changes
        return steps.attend(query, key, value, mask)["context"]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        query, key, value, incoming = (each.to(wide) for each in (*ctx.saved_tensors, grads[0]))
        mask = ctx.mask

        def step(name: str, tensor: Tensor) -> Tensor:
            return ctx.changes[name](tensor) if name in ctx.changes else tensor

        def recomputed(name: str, right: Tensor) -> Tensor:
            return ctx.changes[name](mask.changed(scores), mask) if name in ctx.changes else right

        scale = mask.scale_for(query.shape[-1])
        scores = (query @ key.mT) * scale
        weights = step("weights", recomputed("recomputed", steps.weights(steps.masked_scores(scores, mask), mask)))
        incoming = step("incoming gradient", incoming)
        along = step("products", incoming @ step("value", value).mT)
        inner = recomputed("recomputed for scores", weights)
        sums = step("row sums", (inner * along).sum(dim=-1, keepdim=True))
        of_scores = step("scores", inner * (along - sums)) * mask.derivative(scores) * scale
        results = (
            step("gradient of query", step("scores of query", of_scores) @ step("key", key)),
            step("gradient of key", step("scores of key", of_scores).mT @ step("query", query)),
            step("gradient of value", step("weights of value", weights).mT @ incoming),
        )
        if "exchange" in ctx.changes:
            results = (results[0], results[2], results[1])
        return *(each.to(grads[0].dtype) for each in results), None, None


def backward(name: str, words: str, **changes: Callable[..., Tensor]) -> Mistake:
    """A mistake in some steps of the backward pass; in the keywords, `_` stands for a space."""
    named = {step.replace("_", " "): change for step, change in changes.items()}

    def whole(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Tensor:
        output: Tensor = _Written.apply(query, key, value, mask, named)  # type: ignore[no-untyped-call]
        return output

    step = "context" if named.keys() <= OF_CONTEXT else "weights" if named.keys() <= OF_WEIGHTS else "scores"
    flags = "is_gradient needs_all_rows"
    return replace(wrong(name, f"in the backward pass {words}", flags, whole=whole), step=step)


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round the tensor to another dtype and back."""
    return tensor.to(dtype).to(tensor.dtype)


def repeated(tensor: Tensor, first: int) -> Tensor:
    """Repeat the first rows: (..., R, n) -> (..., R, n)."""
    return tensor[..., torch.arange(tensor.shape[-2], device=tensor.device) % first, :]


def repeats(workload: Workload) -> dict[str, Change]:
    """Reads of the first rows in place of all rows, as from a buffer of one tile."""
    lengths = [tile for tile in TILE_LENS if tile < workload.seq_len]
    return {f"those of the first {tile} queries again and again": partial(repeated, first=tile) for tile in lengths}


def row_sums(workload: Workload) -> Iterator[Mistake]:
    """Wrong or missing row sums in the softmax's gradient."""
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
    kinds |= {words.replace("those", "is that"): change for words, change in repeats(workload).items()}
    for words, change in kinds.items():
        yield backward("gradient_row_sums", f"the row sum of weights times their gradient {words}", row_sums=change)


def with_old_sums(scores: Tensor, mask: RowMask, masked: Tensor, sums: Change = lambda total: total) -> Tensor:
    """The exponentials of masked scores over the logsumexps of the right scores, as the forward pass kept them."""
    total = sums(hide(scores, mask.seen).logsumexp(dim=-1, keepdim=True))
    return (masked - total.clamp(min=torch.finfo(scores.dtype).min)).exp()


def with_new_sums(_: Tensor, __: RowMask, masked: Tensor) -> Tensor:
    """The softmax of masked scores."""
    return masked.softmax(dim=-1).nan_to_num(0.0)


WAYS: dict[str, Callable[..., Tensor]] = {"": with_old_sums, ", with a softmax of its own": with_new_sums}
"""Ways to recompute weights from other masked scores."""


def under(scores: Tensor, mask: RowMask, seen: Seen, way: Callable[..., Tensor]) -> Tensor:
    """The weights with other visible keys."""
    return way(scores, mask, hide(scores, seen(mask)))


def without_bias(scores: Tensor, mask: RowMask, way: Callable[..., Tensor]) -> Tensor:
    """The weights of scores without biases."""
    biases = [mask.bias(part).to(scores) for part in mask.rule.changes if part.is_additive]
    return way(scores, mask, hide(functools.reduce(torch.sub, biases, scores), mask.seen))


def weights(workload: Workload) -> Iterator[Mistake]:
    """Wrong recomputed weights: under another mask, without a bias, or with other sums."""
    name, half = "gradient_under_another_mask", workload.dtype in {"bfloat16", "float16"}
    for each in distinct_masks(workload):
        is_common = each.name in {*ALIGNMENTS, "mask_ignored", "padding_ignored", "causal_unasked"}
        for words, way in WAYS.items():
            if is_common or not words:
                yield backward(name, each.words + words, recomputed=partial(under, seen=each.seen, way=way))
        if is_common:
            change = partial(under, seen=each.seen, way=with_new_sums)
            words = f"{each.words}, in the gradients of query and key"
            yield backward(name, words, recomputed_for_scores=change)
    if workload.mask_rule.hides:

        def even(scores: Tensor, mask: RowMask) -> Tensor:
            right = steps.weights(hide(scores, mask.seen), mask)
            return right.where(mask.seen.any(dim=-1, keepdim=True), 1 / scores.shape[-1])

        yield backward(name, "a query that sees no key weighs all keys alike", recomputed=even)
    for words, way in WAYS.items() if workload.mask_rule.changes_scores else ():
        change = partial(without_bias, way=way)
        words = f"the scores are computed again without the bias{words}"  # noqa: PLW2901
        yield backward("gradient_without_bias", words, recomputed=change)
    sums: dict[str, Change] = repeats(workload) | {
        "those of head 0": lambda x: x[:, :1].expand_as(x),
        "rounded to bfloat16": partial(rounded, dtype=torch.bfloat16),
        "rounded to float16": partial(rounded, dtype=torch.float16),
    }
    for kind, changed in sums.items():
        words = f"the logsumexps that the weights are computed from are {kind}"
        again = lambda scores, mask, of=changed: with_old_sums(scores, mask, hide(scores, mask.seen), of)  # noqa: E731
        yield backward("gradient_logsumexp", words, recomputed=again)
    for dtype in () if half else (torch.bfloat16, torch.float16):
        again = lambda x, mask, dtype=dtype: steps.weights(hide(rounded(x, dtype), mask.seen), mask)  # noqa: E731
        words = f"the scores are computed again in {str(dtype).removeprefix('torch.')}"
        yield backward("recomputed_in_half", words, recomputed=again)
    words = "the weights of the value's gradient are not divided by their sum"
    most: Change = lambda x: x.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)  # noqa: E731
    yield backward("gradient_not_normalised", words, weights_of_value=lambda x: x / most(x))


def read_as(tensor: Tensor) -> Tensor:
    """Read (B, H, T, K) as (B, T, H, K) by a view, without a transpose."""
    batch, heads, length, width = tensor.shape
    return tensor.reshape(batch, length, heads, width).transpose(1, 2)


def permuted(workload: Workload) -> Iterator[Mistake]:
    """Operands and results in another order of batch rows, heads or positions."""
    sizes = (workload.batch_size, workload.num_heads)
    for operand in ("incoming_gradient", "query", "key", "value", "row_sums", "weights"):
        for _, words, change in reordered(operand, *sizes):
            yield backward("gradient_operand_order", words, **{operand: change})
    lengths = {"query": workload.seq_len, "key": workload.kv_len, "value": workload.kv_len}
    for operand, length in lengths.items():
        for _, words, change in reordered(f"gradient of {operand}", *sizes, length):
            yield backward("gradient_order", words, **{f"gradient_of_{operand}": change})
    for read, words in ((viewed, "(B, H, T, K)"), (read_as, "(B, T, H, K)")):
        text = f"the incoming gradient lies in memory in another order, and is read as {words}"
        yield backward("gradient_operand_order", text, incoming_gradient=read)
    if workload.head_dim == workload.value_dim:
        words = "the gradients of key and value have changed places"
        yield backward("gradient_order", words, exchange=lambda x: x)
    if workload.seq_len == workload.kv_len:
        yield backward("gradient_order", "the gradient of the scores is transposed", scores=lambda x: x.mT)


def lost(workload: Workload) -> Iterator[Mistake]:
    """Tiles of queries or keys that are missing from a sum, or counted with the wrong sign."""
    name, length = "gradient_tile_lost", workload.seq_len
    sums = {
        "key": ("scores_of_key",),
        "value": ("weights_of_value",),
        "key and value": ("scores_of_key", "weights_of_value"),
    }
    starts = sorted({(length - 1) // tile * tile for tile in parts.TILE_LENS if tile < length})
    last = [("all but the last tile", range(start)) for start in starts]
    for what, places in (*parts.tiles_of(length), *last):
        where = f"{what} is left out: queries {places.start} to {places.stop - 1}"
        for operand, names in sums.items():
            changes = dict.fromkeys(names, partial(parts.unwritten, places=places, dim=-2))
            yield backward(name, f"of the sum over the queries of the {operand} {where}", **changes)
    for what, places in parts.tiles_of(workload.kv_len):
        where = f"{what} is left out: keys {places.start} to {places.stop - 1}"
        change = partial(parts.unwritten, places=places, dim=-1)
        yield backward(name, f"of the sum over the keys of the query {where}", scores_of_query=change)
        yield backward(name, f"{where}, in all gradients", weights=change)
    is_causal = any(isinstance(each, Causal) for each in workload.mask_rule.parts)
    steps_of = {"scores": "all", "scores_of_query": "that of the query", "scores_of_key": "that of the key"}
    tiles = [tile for tile in TILE_LENS if is_causal and tile < length]
    for tile, (step, which) in itertools.product(tiles, steps_of.items()):
        words = f"tiles of {tile} queries and {tile} keys on the diagonal are left out of {which}"
        yield backward(name, words, **{step: partial(off_diagonal, tile=tile)})
    factors = {} if workload.mask_rule.hides else {"have the wrong sign": -1.0, "have no gradient": 0.0}
    for (step, which), (kind, factor) in itertools.product(steps_of.items(), factors.items()):
        words = f"scores above the diagonal {kind} in {which}"
        yield backward("gradient_above_diagonal", words, **{step: partial(above_diagonal, factor=factor)})


def places(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The places of the queries (T, 1) and of the keys (S,) of scores (B, H, T, S)."""
    query, key = (torch.arange(scores.shape[axis], device=scores.device) for axis in (-2, -1))
    return query[:, None], key


def off_diagonal(of_scores: Tensor, tile: int) -> Tensor:
    """The gradients of the scores for keys outside the query's own tile."""
    query, key = places(of_scores)
    return of_scores.where(key // tile != query // tile, 0.0)


def above_diagonal(of_scores: Tensor, factor: float) -> Tensor:
    """The gradients of the scores with those above the diagonal times a factor."""
    query, key = places(of_scores)
    return of_scores.where(key <= query, factor * of_scores)


def multiplied(tensor: Tensor, factors: Tensor) -> Tensor:
    """The tensor times factors that broadcast to it."""
    return tensor * factors.to(tensor)


def grouped(workload: Workload) -> Iterator[Mistake]:
    """Wrong sums over the query heads that share a key."""
    times = workload.num_heads // workload.num_kv_heads
    if times == 1:
        return
    is_first = (torch.arange(workload.num_heads) % times == 0)[:, None, None]
    groups, heads = workload.num_kv_heads, range(workload.num_heads)
    interleaved = [head // groups + head % groups * times for head in heads]
    kinds: dict[str, Change] = {
        "is that of the first query head of the group alone": partial(multiplied, factors=is_first),
        "is that of the last query head of the group alone": partial(multiplied, factors=is_first.flip(0)),
        "is a mean over the group's query heads, not their sum": lambda x: x / times,
        "is summed over every G-th query head instead of those of its group": in_order(1, interleaved),
    }
    for words, change in kinds.items():
        for names in (("key",), ("value",), ("key", "value")):
            text = f"the gradient of {' and '.join(names)} {words}"
            yield backward("gradient_of_group", text, **{f"gradient_of_{name}": change for name in names})


def roundings(workload: Workload) -> Iterator[Mistake]:
    """Rounding, truncating or clipping only in the backward pass."""
    is_half = workload.dtype in {"bfloat16", "float16"}
    dtypes = {} if is_half else {"bfloat16": torch.bfloat16, "float16": torch.float16}
    dtypes |= {"8 bits (e5m2)": torch.float8_e5m2, "8 bits (e4m3)": torch.float8_e4m3fn}
    for words, dtype in dtypes.items():
        for operand in ("incoming_gradient", "weights", "query", "key", "value", "scores", "weights_of_value"):
            text = f"the {operand.replace('_', ' ')} are rounded to {words}"
            yield backward("gradient_rounded", text, **{operand: partial(rounded, dtype=dtype)})
    operands = dict.fromkeys(("query", "key", "value"), partial(rounded, dtype=torch.bfloat16))
    if not is_half:
        yield backward("gradient_rounded", "query, key and value are rounded to bfloat16", **operands)
        operands["incoming_gradient"] = operands["query"]
        yield backward("gradient_rounded", "all operands are rounded to bfloat16", **operands)
    for most in CLIPS:
        words = f"the products of incoming gradient and value are clipped at {most:g}"
        yield backward("gradient_clipped", words, products=partial(torch.clamp, min=-most, max=most))
    for width in (2**power for power in range(8)):
        if width < workload.value_dim:
            words = f"only the first {width} of {workload.value_dim} numbers of a value count"
            cut = partial(parts.unwritten, places=range(width, workload.value_dim), dim=-1)
            yield backward("gradient_width_cut", words, value=cut)


def wrong_gradients(workload: Workload) -> Iterator[Mistake]:
    """Every mistake of the backward pass alone; none if other operands have gradients."""
    if workload.operands or workload.direction == "inference":
        return
    for kind in (row_sums, weights, permuted, lost, grouped, roundings):
        yield from kind(workload)
