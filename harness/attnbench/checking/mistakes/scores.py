"""Mistakes in the scores: the product and its scale, then the changes that a mask makes (ALiBi, biases, softcap)."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnbench.checking.mistakes.mistake import is_square, mistake
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import change_by_part, changed, hide, product
from attnbench.workloads.masks import Additive, Alibi, AlibiBottomRight, Mask, Softcap
from attnbench.workloads.workload import Workload

ALIBI = (Alibi, AlibiBottomRight)
BIASES = (*ALIBI, Additive)
Kinds = tuple[type[Mask], ...]


def divided_by(divisor: float, query: Tensor, key: Tensor) -> Tensor:
    """Query @ key / divisor."""
    return product(query, key.transpose(-2, -1)) / divisor


@mistake("scores")
def no_scale(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The scores are not divided by sqrt(K)."""
    return product(query, key.transpose(-2, -1))


@mistake("scores")
def scaled_by_width(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The scores are divided by K, or twice by sqrt(K), instead of once by sqrt(K)."""
    return divided_by(query.shape[-1], query, key)


@mistake("scores")
def scaled_by_embedding(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The scores are divided by the root of all heads' width, sqrt(H*K), instead of one head's, sqrt(K)."""
    return divided_by(math.sqrt(query.shape[1] * query.shape[-1]), query, key)


@mistake("scores")
def multiplied_by_root(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The scores are multiplied by sqrt(K) instead of divided."""
    return divided_by(1 / math.sqrt(query.shape[-1]), query, key)


@mistake("scores", fits=is_square, needs_all_rows=True)
def query_key_swapped(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """Query and key have changed places in the scores: entry (i, j) holds the score of query j with key i."""
    return divided_by(math.sqrt(query.shape[-1]), key, query)


def has(*kinds: type[Mask]) -> Callable[[Workload], bool]:
    """Whether a part of the workload's mask that changes scores is of these kinds."""
    return lambda workload: any(type(part) in kinds for part in workload.mask_rule.changes)


def has_bias_and_heads(workload: Workload) -> bool:
    """Whether the mask adds a bias to several heads."""
    return workload.num_heads > 1 and has(*BIASES)(workload)


def mixes_slopes(workload: Workload) -> bool:
    """Whether ALiBi takes its slopes from two rows, since the number of heads is no power of 2."""
    return bool(workload.num_heads & (workload.num_heads - 1)) and has(*ALIBI)(workload)


def changing(scores: Tensor, mask: RowMask, kinds: Kinds, change: Callable[[Tensor, Mask], Tensor]) -> Tensor:
    """The masked scores where parts of these kinds change the scores by `change(scores, part)` instead."""

    def each(scores: Tensor, part: Mask, mask: RowMask) -> Tensor:
        return change(scores, part) if type(part) in kinds else change_by_part(scores, part, mask)

    return hide(changed(scores, mask, each), mask.seen)


def adding(scores: Tensor, mask: RowMask, bias: Callable[[Tensor, Mask], Tensor], kinds: Kinds = BIASES) -> Tensor:
    """The masked scores where parts of these kinds add `bias(right, part)` instead of the right bias (H, R, S)."""

    def change(scores: Tensor, part: Mask) -> Tensor:
        return scores + bias(mask.bias(part), part).to(scores.dtype)

    return changing(scores, mask, kinds, change)


def only_hidden(scores: Tensor, mask: RowMask) -> Tensor:
    """Hide keys, change no scores."""
    return hide(scores, mask.seen)


@mistake(
    "scores",
    also={"masked scores": only_hidden},
    fits=lambda workload: workload.mask_rule.changes_scores and workload.head_dim > 1,
)
def changed_before_scale(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The scores are given their bias, or capped, before the division by sqrt(K) instead of after it."""
    return changed(product(query, key.transpose(-2, -1)), mask) / math.sqrt(query.shape[-1])


@mistake("masked scores", fits=lambda workload: has(Softcap)(workload) and len(workload.mask_rule.changes) > 1)
def changes_in_other_order(scores: Tensor, mask: RowMask) -> Tensor:
    """The mask's changes of the scores are made in the opposite order: they run from left to right."""
    for part in reversed(mask.rule.changes):
        scores = change_by_part(scores, part, mask)
    return only_hidden(scores, mask)


@mistake("masked scores", fits=has(*BIASES))
def bias_ignored(scores: Tensor, mask: RowMask) -> Tensor:
    """The bias that the mask asks for is never added to the scores."""
    return changing(scores, mask, BIASES, lambda scores, _: scores)


@mistake("masked scores", fits=has(*BIASES))
def bias_sign_flipped(scores: Tensor, mask: RowMask) -> Tensor:
    """The bias has the wrong sign: what should be taken from a score is added to it."""
    return adding(scores, mask, lambda bias, _: -bias)


@mistake("masked scores", fits=has_bias_and_heads)
def bias_of_first_head_for_all(scores: Tensor, mask: RowMask) -> Tensor:
    """The bias of head 0 is used in every head."""
    return adding(scores, mask, lambda bias, _: bias[:1].expand_as(bias))


@mistake("masked scores", fits=has_bias_and_heads)
def bias_heads_reversed(scores: Tensor, mask: RowMask) -> Tensor:
    """Each head has the bias of another: they are in the opposite order."""
    return adding(scores, mask, lambda bias, _: bias.flip(0))


@mistake(
    "masked scores",
    fits=lambda workload: workload.num_heads > 2 and has_bias_and_heads(workload),  # noqa: PLR2004 - two: reversed
)
def bias_of_next_head(scores: Tensor, mask: RowMask) -> Tensor:
    """Each head has the bias of the next one, and the last that of head 0."""
    return adding(scores, mask, lambda bias, _: bias.roll(-1, 0))


@mistake("masked scores", fits=lambda workload: is_square(workload) and has(Additive)(workload))
def bias_transposed(scores: Tensor, mask: RowMask) -> Tensor:
    """Query and key have changed places in the bias."""

    def bias(right: Tensor, part: Mask) -> Tensor:
        per_head = torch.from_numpy(part.per_head(len(right)))[:, None, None].to(right.device)
        swapped: Tensor = part.bias(per_head, mask.keys, mask.queries, 0)
        return swapped

    return adding(scores, mask, bias, (Additive,))


def with_slopes(scores: Tensor, mask: RowMask, slopes: npt.NDArray[np.float64]) -> Tensor:
    """ALiBi with other slopes (H,): what it adds is proportional to them."""

    def bias(right: Tensor, part: Mask) -> Tensor:
        return right * torch.from_numpy(slopes / part.per_head(len(right))).to(right.device)[:, None, None]

    return adding(scores, mask, bias, ALIBI)


@mistake("masked scores", fits=lambda workload: has(*ALIBI)(workload) and not mixes_slopes(workload))
def alibi_slopes_from_one(scores: Tensor, mask: RowMask) -> Tensor:
    """The slopes of ALiBi are counted from head 0, so that they begin with 1 instead of 2^(-8/H)."""
    return with_slopes(scores, mask, np.exp2(-8 * np.arange(mask.num_heads) / mask.num_heads))


@mistake("masked scores", fits=mixes_slopes)
def alibi_slopes_not_filled_up(scores: Tensor, mask: RowMask) -> Tensor:
    """The slopes of ALiBi are 2^(-8h/H) for a number of heads that is no power of 2."""
    return with_slopes(scores, mask, np.exp2(-8 * np.arange(1, mask.num_heads + 1) / mask.num_heads))


@mistake("masked scores", fits=lambda workload: not is_square(workload) and has(Alibi)(workload))
def alibi_aligned_at_end(scores: Tensor, mask: RowMask) -> Tensor:
    """The distances of ALiBi are counted from the end (bottom-right) instead of the start (top-left)."""
    return adding(scores, mask, lambda *_: mask.bias(AlibiBottomRight()), (Alibi,))


@mistake("masked scores", fits=lambda workload: not is_square(workload) and has(AlibiBottomRight)(workload))
def alibi_aligned_at_start(scores: Tensor, mask: RowMask) -> Tensor:
    """The distances of ALiBi are counted from the start (top-left) instead of the end (bottom-right)."""
    return adding(scores, mask, lambda *_: mask.bias(Alibi()), (AlibiBottomRight,))


@mistake("masked scores", fits=has(Softcap))
def softcap_ignored(scores: Tensor, mask: RowMask) -> Tensor:
    """The scores are never capped."""
    return changing(scores, mask, (Softcap,), lambda scores, _: scores)


@mistake("masked scores", fits=lambda workload: has(Softcap)(workload) and workload.mask_rule.hides)
def softcap_after_mask(scores: Tensor, mask: RowMask) -> Tensor:
    """The scores are capped after the mask: a hidden key has the score -x of softcap(x) instead of -inf."""
    return changed(only_hidden(scores, mask), mask)


@mistake(
    "masked scores",
    fits=lambda workload: any(part.arguments[0] > 1 for part in workload.mask_rule.changes if type(part) is Softcap),
)
def softcap_not_multiplied(scores: Tensor, mask: RowMask) -> Tensor:
    """The softcap lacks its last factor: tanh(score / x) without x."""
    return changing(scores, mask, (Softcap,), lambda scores, part: torch.tanh(scores / part.arguments[0]))


@mistake("masked scores", fits=has(Softcap))
def softcap_clamped(scores: Tensor, mask: RowMask) -> Tensor:
    """The scores are cut off at -x and x instead of squashed by tanh."""
    return changing(scores, mask, (Softcap,), lambda scores, part: scores.clamp(-part.arguments[0], part.arguments[0]))


@mistake(
    "masked scores",
    fits=lambda workload: workload.direction != "inference" and has(Softcap)(workload),
    is_gradient=True,
)
def softcap_without_derivative(scores: Tensor, mask: RowMask) -> Tensor:
    """The gradient through the softcap lacks its derivative, 1 - tanh^2."""
    return changing(scores, mask, (Softcap,), lambda scores, part: scores + (part.transform(scores) - scores).detach())
