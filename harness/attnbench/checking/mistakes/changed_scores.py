"""Mistakes in masks that change scores: biases such as ALiBi's, and the softcap."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from attnbench.checking.mistakes.kind import Mistake
from attnbench.checking.steps import Change, Changes, Scene, as_the_mask_says, changed, product
from attnbench.contract.bound_mask import on_device
from attnbench.workloads.masks import Additive, Alibi, AlibiBottomRight, Mask, Softcap
from attnbench.workloads.workload import Workload

BIASES = (Alibi, AlibiBottomRight, Additive)
Bias = Callable[[Tensor, Mask, Scene], Tensor]
"""Another bias (H, R, S) in place of the right one of a part of the mask."""


def changing(change: Change, *kinds: type[Mask]) -> Changes:
    """The masked scores with parts of these kinds at work in another way."""

    def masked(scores: Tensor, scene: Scene) -> Tensor:
        def each(scores: Tensor, part: Mask, scene: Scene) -> Tensor:
            return change(scores, part, scene) if type(part) in kinds else as_the_mask_says(scores, part, scene)

        return changed(scores, scene, each).masked_fill(~scene.seen, -math.inf)

    return {"masked scores": masked}


def adding(bias: Bias, *kinds: type[Mask]) -> Changes:
    """The same where what is added is another bias."""

    def change(scores: Tensor, part: Mask, scene: Scene) -> Tensor:
        return scores + bias(scene.bias(part), part, scene).to(scores.dtype)

    return changing(change, *(kinds or BIASES))


def ignored(scores: Tensor, part: Mask, scene: Scene) -> Tensor:
    """As they are."""
    return scores


def before_scale(query: Tensor, key: Tensor, scene: Scene) -> Tensor:
    """Changed, then divided by sqrt(K)."""
    return changed(product(query, key.transpose(-2, -1)), scene) / math.sqrt(query.shape[-1])


def only_hidden(scores: Tensor, scene: Scene) -> Tensor:
    """Not changed again."""
    return scores.masked_fill(~scene.seen, -math.inf)


def mask_first(scores: Tensor, scene: Scene) -> Tensor:
    """Hidden, then changed: the softcap brings -inf back to -x."""
    return changed(only_hidden(scores, scene), scene)


def other_order(scores: Tensor, scene: Scene) -> Tensor:
    """The last change first."""
    for part in reversed(scene.mask.rule.changes):
        scores = as_the_mask_says(scores, part, scene)
    return only_hidden(scores, scene)


def flipped(bias: Tensor, part: Mask, scene: Scene) -> Tensor:
    """With the other sign."""
    return -bias


def first_for_all(bias: Tensor, part: Mask, scene: Scene) -> Tensor:
    """Head 0's in every head."""
    return bias[:1].expand_as(bias)


def reversed_heads(bias: Tensor, part: Mask, scene: Scene) -> Tensor:
    """The last head's in the first."""
    return bias.flip(0)


def next_heads(bias: Tensor, part: Mask, scene: Scene) -> Tensor:
    """Head 1's in head 0."""
    return bias.roll(-1, 0)


def transposed(bias: Tensor, part: Mask, scene: Scene) -> Tensor:
    """The bias of query j with key i where that of query i with key j belongs."""
    per_head = on_device(part.per_head(len(bias)), scene.rows.device)[:, None, None]
    made: Tensor = part.bias(per_head, scene.keys, scene.queries, 0)
    return made


def slopes(make: Callable[[int], "np.ndarray[tuple[int], np.dtype[np.float64]]"]) -> Bias:
    """ALiBi with another slope for each head: what is added is proportional to it."""

    def bias(right: Tensor, part: Mask, scene: Scene) -> Tensor:
        ratio = make(len(right)) / part.per_head(len(right))
        return right * torch.from_numpy(ratio).to(right.device)[:, None, None]

    return bias


def aligned(part: Mask) -> Bias:
    """ALiBi with positions counted from the other end."""
    return lambda _, __, scene: scene.bias(part)


def not_multiplied(scores: Tensor, part: Mask, scene: Scene) -> Tensor:
    """The tanh alone, from -1 to 1."""
    return torch.tanh(scores / part.arguments[0])


def clamped(scores: Tensor, part: Mask, scene: Scene) -> Tensor:
    """Cut off at -x and x."""
    return scores.clamp(-part.arguments[0], part.arguments[0])


def straight_through(scores: Tensor, part: Mask, scene: Scene) -> Tensor:
    """The right scores with the gradient of those before."""
    made: Tensor = scores + (part.bend(scores) - scores).detach()
    return made


def _has(*kinds: type[Mask]) -> Callable[[Workload], bool]:
    return lambda workload: any(type(part) in kinds for part in workload.mask_rule.changes)


def _has_bias_of_heads(workload: Workload) -> bool:
    return workload.num_heads > 1 and _has(*BIASES)(workload)


def _fills_up(workload: Workload) -> bool:
    """Whether the number of heads is no power of 2, so that slopes of two rows are mixed."""
    return bool(workload.num_heads & (workload.num_heads - 1)) and _has(Alibi, AlibiBottomRight)(workload)


def _counts_otherwise(workload: Workload) -> bool:
    return workload.seq_len != workload.kv_len


def _has_softcap_over_hidden(workload: Workload) -> bool:
    return _has(Softcap)(workload) and workload.mask_rule.hides


def _has_order(workload: Workload) -> bool:
    return _has(Softcap)(workload) and len(workload.mask_rule.changes) > 1


MISTAKES = (
    Mistake(
        name="changed_before_scale",
        words="the scores are given their bias, or capped, before the division by sqrt(K) instead of after it",
        changes={"scores": before_scale, "masked scores": only_hidden},
        fits=lambda workload: workload.mask_rule.changes_scores and workload.head_dim > 1,
    ),
    Mistake(
        name="changes_in_other_order",
        words="the mask's changes of the scores are made in the opposite order: they run from left to right",
        changes={"masked scores": other_order},
        fits=_has_order,
    ),
    Mistake(
        name="bias_ignored",
        words="the bias that the mask asks for is never added to the scores",
        changes=changing(ignored, *BIASES),
        fits=_has(*BIASES),
    ),
    Mistake(
        name="bias_sign_flipped",
        words="the bias has the wrong sign: what should be taken from a score is added to it",
        changes=adding(flipped),
        fits=_has(*BIASES),
    ),
    Mistake(
        name="bias_of_first_head_for_all",
        words="the bias of head 0 is used in every head",
        changes=adding(first_for_all),
        fits=_has_bias_of_heads,
    ),
    Mistake(
        name="bias_heads_reversed",
        words="each head has the bias of another: they are in the opposite order",
        changes=adding(reversed_heads),
        fits=_has_bias_of_heads,
    ),
    Mistake(
        name="bias_of_next_head",
        words="each head has the bias of the next one, and the last that of head 0",
        changes=adding(next_heads),
        fits=lambda workload: workload.num_heads > 2 and _has_bias_of_heads(workload),  # noqa: PLR2004 - two: reversed
    ),
    Mistake(
        name="bias_transposed",
        words="query and key have changed places in the bias",
        changes=adding(transposed, Additive),
        fits=lambda workload: not _counts_otherwise(workload) and _has(Additive)(workload),
    ),
    Mistake(
        name="alibi_slopes_from_one",
        words="the slopes of ALiBi are counted from head 0, so that they begin with 1 instead of 2^(-8/H)",
        changes=adding(slopes(lambda heads: np.exp2(-8 * np.arange(heads) / heads)), Alibi, AlibiBottomRight),
        fits=lambda workload: not _fills_up(workload) and _has(Alibi, AlibiBottomRight)(workload),
    ),
    Mistake(
        name="alibi_slopes_not_filled_up",
        words="the slopes of ALiBi are 2^(-8h/H) for a number of heads that is no power of 2",
        changes=adding(slopes(lambda heads: np.exp2(-8 * np.arange(1, heads + 1) / heads)), Alibi, AlibiBottomRight),
        fits=_fills_up,
    ),
    Mistake(
        name="alibi_aligned_at_end",
        words="ALiBi counts distances from the end (bottom-right) instead of the start (top-left)",
        changes=adding(aligned(AlibiBottomRight()), Alibi),
        fits=lambda workload: _counts_otherwise(workload) and _has(Alibi)(workload),
    ),
    Mistake(
        name="alibi_aligned_at_start",
        words="ALiBi counts distances from the start (top-left) instead of the end (bottom-right)",
        changes=adding(aligned(Alibi()), AlibiBottomRight),
        fits=lambda workload: _counts_otherwise(workload) and _has(AlibiBottomRight)(workload),
    ),
    Mistake(
        name="softcap_ignored",
        words="the scores are never capped",
        changes=changing(ignored, Softcap),
        fits=_has(Softcap),
    ),
    Mistake(
        name="softcap_after_mask",
        words="the scores are capped after the mask: a hidden key has the score -x of softcap(x) instead of -inf",
        changes={"masked scores": mask_first},
        fits=_has_softcap_over_hidden,
    ),
    Mistake(
        name="softcap_not_multiplied",
        words="the softcap lacks its last factor: tanh(score / x) without x",
        changes=changing(not_multiplied, Softcap),
        fits=lambda workload: any(
            part.arguments[0] > 1 for part in workload.mask_rule.changes if type(part) is Softcap
        ),
    ),
    Mistake(
        name="softcap_clamped",
        words="the scores are cut off at -x and x instead of squashed by tanh",
        changes=changing(clamped, Softcap),
        fits=_has(Softcap),
    ),
    Mistake(
        name="softcap_without_derivative",
        words="the gradient through the softcap lacks its derivative, 1 - tanh^2",
        changes=changing(straight_through, Softcap),
        fits=lambda workload: workload.direction != "inference" and _has(Softcap)(workload),
        is_gradient=True,
    ),
)
