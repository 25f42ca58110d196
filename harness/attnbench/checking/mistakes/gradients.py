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
from attnbench.checking.mistakes.forms import tiles_of
from attnbench.checking.mistakes.wrong_masks import ALIGNMENTS, distinct_masks
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Changes, Mistake, hide, with_bias, with_change, wrong
from attnbench.workloads import masks
from attnbench.workloads.masks import Mask
from attnbench.workloads.workload import Workload

COMMON_MASKS = {*ALIGNMENTS, "mask_ignored", "padding_ignored", "causal_unasked", "mask_part_ignored"}
Names = tuple[str, ...]
SUMMED: tuple[Names, ...] = (("key",), ("value",), ("key", "value"))
"""Operands whose gradients are sums over queries, and over the query heads of a group."""
Attend = Callable[..., Tensor]
"""A form of attention without grouped heads: (B, H, R, K), (B, H, S, K), (B, H, S, V) -> (B, H, R, V)."""


def with_gradient(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
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
) -> Tensor:
    """The form whose gradient is FlashAttention's for other visible keys, with row sums multiplied by a factor.

    The logsumexps and the row sums are those of the right forward pass, without a gradient.
    """
    scores = mask.changed(steps.scores(query, key, mask))
    total = hide(scores, mask.seen).logsumexp(dim=-1, keepdim=True).detach()
    weights = (hide(scores, seen(mask)) - total.clamp(min=torch.finfo(scores.dtype).min)).exp()
    row_sums = factor * right(query, key, value, mask).detach()
    return steps.product(weights, value) - weights.sum(dim=-1, keepdim=True) * row_sums


def weights(workload: Workload) -> Iterator[Mistake]:
    """Wrong row sums of weights times their gradient, and weights computed again under another mask or without bias."""
    factors = {
        "is left out": 0.0,
        "is a mean over the keys": 1 / workload.kv_len,
        "is added instead of taken away": -1.0,
        "is twice what it should be": 2.0,
    }
    for words, factor in factors.items():
        text = f"the row sum of weights times their gradient {words}"
        yield only_backward("gradient_row_sums", text, partial(flash, factor=factor), "weights")
    for each in (each for each in distinct_masks(workload) if each.name in COMMON_MASKS):
        own_softmax = partial(right, changes={"masked scores": each.masked})
        forms: dict[str, Attend] = {"": partial(flash, seen=each.seen), ", with a softmax of its own": own_softmax}
        for more, form in forms.items():
            yield only_backward("gradient_under_another_mask", each.words + more, form, "weights")
    if workload.mask_rule.changes_scores:
        plain = partial(right, changes={"masked scores": with_bias(lambda bias, *_: 0 * bias)})
        words = "the scores are computed again without the bias"
        yield only_backward("gradient_without_bias", words, plain, "weights")


def some_queries(  # noqa: PLR0913 - operands, and what is changed
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, *, lost: range, names: Names
) -> Tensor:
    """The right form, except that the queries of `lost` pass no gradient to these operands."""
    chosen = torch.zeros(query.shape[-2], 1, dtype=torch.bool, device=query.device)
    chosen[lost.start : lost.stop] = True
    of_key, of_value = (x.detach() if name in names else x for name, x in (("key", key), ("value", value)))
    return right(query, of_key, of_value, mask).where(chosen, right(query, key, value, mask))


def some_heads(  # noqa: PLR0913 - operands, and what is changed
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, *, kept: Tensor, names: Names
) -> Tensor:
    """The right form, except that the gradients of these operands come from the heads `kept` (H, 1, 1) alone."""
    of_key, of_value = (
        with_gradient(x, lambda grad: grad * kept.to(grad)) if name in names else x
        for name, x in (("key", key), ("value", value))
    )
    return right(query, of_key, of_value, mask)


def sums(workload: Workload) -> Iterator[Mistake]:
    """Queries, or heads of a group, that are missing from the sums for keys or values."""
    length, times = workload.seq_len, workload.num_heads // workload.num_kv_heads
    tiles = [*tiles_of(length)]
    late = [("all but the first tile", range(lost.stop, length)) for _, lost in tiles if not lost.start]
    for (what, lost), names in itertools.product((*tiles, *late), SUMMED):
        where = f"{what} is left out: queries {lost.start} to {lost.stop - 1}"
        words = f"of the sum over the queries of the {' and the '.join(names)} {where}"
        yield only_backward("gradient_tile_lost", words, partial(some_queries, lost=lost, names=names))
    is_first = (torch.arange(workload.num_heads) % times == 0)[:, None, None]
    kinds = {"first": is_first, "last": is_first.flip(0)} if times > 1 else {}
    for (place, kept), names in itertools.product(kinds.items(), SUMMED):
        words = f"the gradient of the {' and the '.join(names)} is that of the {place} query head of the group alone"
        yield only_backward("gradient_of_group", words, partial(some_heads, kept=kept, names=names))


def of_scores(workload: Workload) -> Iterator[Mistake]:
    """Gradients of learned biases, and through the softcap."""
    rule = workload.mask_rule
    is_shared = all(shape[0] != workload.batch_size for shape in workload.operands.values())
    if rule.is_learned and workload.batch_size > 1 and is_shared:  # otherwise the others' gradients are 0
        of_first = with_bias(lambda bias, *_: torch.cat([bias[:1], bias[1:].detach()]))
        yield wrong("bias_gradient_of_first_row", flags="is_gradient", masked_scores=of_first)
    if any(isinstance(part, masks.Softcap) for part in rule.changes):

        def straight(scores: Tensor, _: RowMask, part: Mask) -> Tensor | None:
            return scores + (part.transform(scores) - scores).detach() if isinstance(part, masks.Softcap) else None

        yield wrong("softcap_without_derivative", flags="is_gradient", masked_scores=with_change(straight))


def wrong_gradients(workload: Workload) -> Iterator[Mistake]:
    """Every mistake in only the backward pass."""
    if workload.direction != "inference":
        for kind in (weights, sums, of_scores):
            yield from kind(workload)
