"""Mistakes in the backward pass only: the output is right, its gradients are wrong.

`only_backward` combines the right output with the gradients of a mistaken form. `flash` is the backward pass of
FlashAttention: with weights P, dP = dO V^T and D = rowsum(dO * O), the gradient of the scores is P * (dP - D), whatever
P is. Source: https://arxiv.org/abs/2307.08691, algorithm 2.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.case import QKV
from attnbench.checking.mistakes.forms import WIDE, in_order, orders, tiles_of
from attnbench.checking.mistakes.wrong_masks import ALIGNMENTS, distinct_masks
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Changes, Mistake, hide, with_bias, with_change, wrong
from attnbench.workloads import masks
from attnbench.workloads.masks import Mask
from attnbench.workloads.workload import Workload

COMMON_MASKS = {*ALIGNMENTS, "mask_ignored", "padding_ignored", "causal_unasked", "mask_part_ignored"}
ROUNDED = (torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)
Names = tuple[str, ...]
SUMMED: tuple[Names, ...] = (("key",), ("value",), ("key", "value"))
"""Operands whose gradients are sums over queries, and over the query heads of a group."""
Attend = Callable[..., Tensor]
"""A form of attention without grouped heads: (B, H, R, K), (B, H, S, K), (B, H, S, V) -> (B, H, R, V)."""
Change = Callable[[Tensor], Tensor]


def with_gradient(tensor: Tensor, change: Change) -> Tensor:
    """The tensor, with `change` applied to its gradient."""
    copy = tensor.view_as(tensor)
    if copy.requires_grad:
        copy.register_hook(change)
    return copy


def right(query: Tensor, key: Tensor, value: Tensor, mask: RowMask, changes: Changes | None = None) -> Tensor:
    """The output of the textbook form, with some steps replaced by `changes`."""
    return steps.attend(query, key, value, mask, changes)["context"]


def only_backward(name: str, words: str, form: Attend, step: str = "scores") -> Mistake:
    """A mistake with the right output, and the gradients of another form."""

    def whole(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Tensor:
        mistaken = form(query, key, value, mask)
        return right(query, key, value, mask).detach() + (mistaken - mistaken.detach()).nan_to_num(0.0)

    mistake = wrong(name, f"in the backward pass {words}", "is_gradient needs_all_rows", whole=whole)
    return replace(mistake, step=step)


def flash(  # noqa: PLR0913 - operands, and what is changed
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: RowMask,
    *,
    seen: Callable[[RowMask], Tensor] = lambda mask: mask.seen,
    factor: float = 1.0,
    is_own: bool = False,
) -> Tensor:
    """The form whose gradient is FlashAttention's for other visible keys, with row sums multiplied by a factor.

    The logsumexps of the rows are those of the right forward pass, without a gradient. The row sums are those of the
    right output or, if `is_own`, of the changed weights.
    """
    scores = mask.changed(steps.scores(query, key, mask))
    total = hide(scores, mask.seen).logsumexp(dim=-1, keepdim=True).detach()
    weights = (hide(scores, seen(mask)) - total.clamp(min=torch.finfo(scores.dtype).min)).exp()
    output = steps.product(weights, value)
    summed = output if is_own else right(query, key, value, mask)
    return output - weights.sum(dim=-1, keepdim=True) * factor * summed.detach()


def row_sums(workload: Workload) -> Iterator[Mistake]:
    """Wrong or missing row sums of weights times their gradient."""
    factors = {
        "is left out": 0.0,
        "is a mean over the keys": 1 / workload.kv_len,
        "is added instead of taken away": -1.0,
        "is twice what it should be": 2.0,
    }
    for words, factor in factors.items():
        text = f"the row sum of weights times their gradient {words}"
        yield only_backward("gradient_row_sums", text, partial(flash, factor=factor), "weights")


def weights(workload: Workload) -> Iterator[Mistake]:
    """Weights that are computed again under another mask, or without a bias."""
    for each in (each for each in distinct_masks(workload) if each.name in COMMON_MASKS):
        changes = {"masked scores": each.masked}
        forms: dict[str, Attend] = {
            "": partial(flash, seen=each.seen),
            ", and so are its row sums": partial(flash, seen=each.seen, is_own=True),
            ", with a softmax of its own": partial(right, changes=changes),
        }
        for more, form in forms.items():
            yield only_backward("gradient_under_another_mask", each.words + more, form, "weights")
    if workload.mask_rule.changes_scores:
        plain = {"masked scores": with_bias(lambda bias, *_: 0 * bias)}
        form = partial(right, changes=plain)
        words = "the scores are computed again without the bias"
        yield only_backward("gradient_without_bias", words, form, "weights")


def without_graph(  # noqa: PLR0913 - operands, and what is changed
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, *, places: range, names: Names
) -> Tensor:
    """The right form, except that some queries pass no gradient to key or value."""
    chosen = torch.zeros(query.shape[-2], 1, dtype=torch.bool, device=query.device)
    chosen[places.start : places.stop] = True
    of_key, of_value = (x.detach() if name in names else x for name, x in (("key", key), ("value", value)))
    return right(query, of_key, of_value, mask).where(chosen, right(query, key, value, mask))


def lost(workload: Workload) -> Iterator[Mistake]:
    """Tiles of queries that are missing from the sums for keys or values."""
    length = workload.seq_len
    late = [
        ("all but the first tile", range(places.stop, length)) for _, places in tiles_of(length) if not places.start
    ]
    for what, places in (*tiles_of(length), *late):
        for names in SUMMED:
            form = partial(without_graph, places=places, names=names)
            where = f"{what} is left out: queries {places.start} to {places.stop - 1}"
            words = f"of the sum over the queries of the {' and the '.join(names)} {where}"
            yield only_backward("gradient_tile_lost", words, form)


def changed(name: str, words: str, operands: Names, change: Change) -> Mistake:
    """A mistake that changes the gradients of these operands, or the incoming one of the output."""

    def form(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Tensor:
        tensors = {"query": query, "key": key, "value": value}
        tensors |= {name: with_gradient(tensors[name], change) for name in operands if name in tensors}
        output = right(tensors["query"], tensors["key"], tensors["value"], mask)
        return with_gradient(output, change) if "output" in operands else output

    return only_backward(name, f"the gradient of the {' and the '.join(operands)} {words}", form)


def changes(workload: Workload) -> Iterator[Mistake]:
    """Gradients in another order of heads, wrongly summed over a group's query heads, or rounded."""
    heads, times = workload.num_heads, workload.num_heads // workload.num_kv_heads
    operands: list[Names] = [(part,) for part in (*QKV, "output")]
    for (words, order), names in itertools.product(orders(heads).items(), operands):
        yield changed("gradient_order", f"has its heads {words}", names, in_order(1, order))
    if times > 1:
        is_first = (torch.arange(heads) % times == 0)[:, None, None]
        kinds: dict[str, Change] = {
            "is that of the first query head of the group alone": lambda x: x * is_first.to(x),
            "is that of the last query head of the group alone": lambda x: x * is_first.flip(0).to(x),
        }
        for (words, change), names in itertools.product(kinds.items(), SUMMED):
            yield changed("gradient_of_group", words, names, change)
    for dtype in ROUNDED if workload.dtype in WIDE else ():
        words = f"is rounded to {str(dtype).removeprefix('torch.')}"
        for names in (*operands, QKV):
            yield changed("gradient_rounded", words, names, partial(rounded, dtype=dtype))


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round the tensor to another dtype and back."""
    return tensor.to(dtype).to(tensor.dtype)


def of_scores(workload: Workload) -> Iterator[Mistake]:
    """Gradients of learned biases, and through the softcap."""
    rule = workload.mask_rule
    is_shared = all(shape[0] != workload.batch_size for shape in workload.operands.values())
    if rule.is_learned and workload.batch_size > 1 and is_shared:  # otherwise the others' gradients are 0
        words = "the gradient of the bias is that of the first batch row alone, not the sum over all"
        of_first = with_bias(lambda bias, *_: torch.cat([bias[:1], bias[1:].detach()]))
        yield wrong("bias_gradient_of_first_row", words, "is_gradient", masked_scores=of_first)
    if any(isinstance(part, masks.Softcap) for part in rule.changes):

        def straight(scores: Tensor, _: RowMask, part: Mask) -> Tensor | None:
            return scores + (part.transform(scores) - scores).detach() if isinstance(part, masks.Softcap) else None

        words = "the gradient through the softcap lacks its derivative, 1 - tanh^2"
        yield wrong("softcap_without_derivative", words, "is_gradient", masked_scores=with_change(straight))


def wrong_gradients(workload: Workload) -> Iterator[Mistake]:
    """Every mistake in only the backward pass."""
    if workload.direction != "inference":
        for kind in (row_sums, weights, lost, changes, of_scores):
            yield from kind(workload)
