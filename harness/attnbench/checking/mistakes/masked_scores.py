"""Mistakes in the mask: which keys are hidden, and how."""

import functools
import math
import operator
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from attnbench.checking.mistakes.kind import Mistake
from attnbench.checking.steps import Changes, Scene, changed
from attnbench.contract.bound_mask import on_device
from attnbench.workloads.masks import (
    Boolean,
    Causal,
    CausalBottomRight,
    Mask,
    Padding,
    SlidingWindow,
    SlidingWindowBottomRight,
)
from attnbench.workloads.workload import Workload

Rule = Callable[[Scene, Mask], Tensor]
"""Which keys each query sees under a mask, or a part of one, (B, 1, R, S), or what can be made so."""
WINDOWS = (SlidingWindow, SlidingWindowBottomRight)
AT_THE_END: dict[type[Mask], type[Mask]] = {Causal: CausalBottomRight, SlidingWindow: SlidingWindowBottomRight}
AT_THE_START = {end: start for start, end in AT_THE_END.items()}


def seen_by(rule: Rule, *kinds: type[Mask]) -> Changes:
    """The masked scores under another rule for the mask, or for its parts of these kinds while the others stay."""

    def seen(scene: Scene) -> Tensor:
        if not kinds:
            return rule(scene, scene.mask.rule)
        parts = [part for part in scene.mask.rule.parts if part.hides]
        each = (rule(scene, part) if type(part) in kinds else scene.seen_under(part) for part in parts)
        return functools.reduce(operator.and_, each)

    def masked(scores: Tensor, scene: Scene) -> Tensor:
        return changed(scores, scene).masked_fill(~seen(scene), -math.inf)

    return {"masked scores": masked}


def not_masked(scores: Tensor, scene: Scene) -> Tensor:
    """Changed as they should be, and none hidden."""
    return changed(scores, scene)


def hidden_after(masked: Tensor, scene: Scene) -> Tensor:
    """Softmax over all keys, then 0 for the hidden ones: the rest no longer adds up to 1."""
    return masked.softmax(dim=-1).masked_fill(~scene.seen, 0.0)


def added_as_number(scores: Tensor, scene: Scene) -> Tensor:
    """The boolean mask added: +1 where visible."""
    return changed(scores, scene) + scene.seen.to(scores.dtype)


def multiplied(scores: Tensor, scene: Scene) -> Tensor:
    """The boolean mask multiplied: score 0 where hidden."""
    return changed(scores, scene) * scene.seen.to(scores.dtype)


def hidden_by_little(scores: Tensor, scene: Scene) -> Tensor:
    """Hidden keys get a score of -10, which a large score outweighs."""
    return changed(scores, scene).masked_fill(~scene.seen, -10.0)


def ignoring(name: str) -> Changes:
    """One part of the mask hides nothing."""

    def masked(scores: Tensor, scene: Scene) -> Tensor:
        others = (part for part in scene.mask.rule.parts if part.hides and str(part) != name)
        seen = functools.reduce(operator.and_, map(scene.seen_under, others))
        return changed(scores, scene).masked_fill(~seen, -math.inf)

    return {"masked scores": masked}


def _everything(scene: Scene, part: Mask) -> Tensor:
    return torch.ones_like(scene.seen)


def _window(change: int) -> Rule:
    def rule(scene: Scene, part: Mask) -> Tensor:
        length = part.arguments[0] + change
        return scene.seen_under(type(part)(length)) if length > 0 else torch.zeros_like(scene.seen)

    return rule


def _aligned(other: dict[type[Mask], type[Mask]]) -> Rule:
    return lambda scene, part: scene.seen_under(other[type(part)](*part.arguments))


def _lengths(change: int) -> Rule:
    def rule(scene: Scene, part: Mask) -> Tensor:
        lengths: Tensor = on_device(part.table(*scene.mask.sizes), scene.rows.device) + change
        return scene.keys < lengths[:, None, None, None]

    return rule


def _padding_of_queries(scene: Scene, part: Mask) -> Tensor:
    lengths: Tensor = on_device(part.table(*scene.mask.sizes), scene.rows.device)
    return (scene.queries < lengths[:, None, None, None]).expand_as(scene.seen)


def _is(*kinds: type[Mask], square: bool | None = None) -> Callable[[Workload], bool]:
    """Whether a part of a workload's mask is of these kinds and, where that is asked, T == S or not."""

    def fits(workload: Workload) -> bool:
        right = any(type(part) in kinds for part in workload.mask_rule.parts)
        return right and square in {None, workload.seq_len == workload.kv_len}

    return fits


def _has_mask(workload: Workload) -> bool:
    return workload.mask_rule.hides


def _has_other_mask(workload: Workload) -> bool:
    return _has_mask(workload) and type(workload.mask_rule) is not Padding


def _differs_in_batch(workload: Workload) -> bool:
    return workload.batch_size > 1 and any(isinstance(part, Padding | Boolean) for part in workload.mask_rule.parts)


def _parts(workload: Workload) -> Iterable[str]:
    """The parts of which one alone may be forgotten, but for padding, which has a mistake of its own."""
    hiding = [part for part in workload.mask_rule.parts if part.hides]
    return [str(part) for part in hiding if type(part) is not Padding] if len(hiding) > 1 else []


MISTAKES = (
    Mistake(
        name="mask_ignored",
        words="the mask never reaches the softmax: hidden keys get weight",
        changes={"masked scores": not_masked},
        fits=_has_other_mask,
    ),
    Mistake(
        name="padding_ignored",
        words="padding is ignored: the keys past each row's length get weight",
        changes=seen_by(_everything, Padding),
        fits=_is(Padding),
    ),
    Mistake(
        name="mask_part_ignored",
        words="a part of the mask is ignored, {choice}: what it alone hides gets weight",
        changes=ignoring,
        choices=_parts,
    ),
    Mistake(
        name="mask_after_softmax",
        words="the mask is applied after the softmax, so that the weights of the visible keys do not add up to 1",
        changes={"masked scores": not_masked, "weights": hidden_after},
        fits=_has_mask,
    ),
    Mistake(
        name="mask_inverted",
        words="the mask is inverted: visible keys are hidden, hidden ones visible (True means visible)",
        changes=seen_by(lambda scene, _: ~scene.seen),
        fits=_has_mask,
    ),
    Mistake(
        name="mask_added_as_number",
        words="the boolean mask is added to the scores as 0 and 1 instead of hiding keys",
        changes={"masked scores": added_as_number},
        fits=_has_mask,
    ),
    Mistake(
        name="mask_multiplied",
        words="the scores are multiplied by the mask: a hidden key has score 0 instead of minus infinity",
        changes={"masked scores": multiplied},
        fits=_has_mask,
    ),
    Mistake(
        name="mask_too_weak",
        words="hidden keys get a score of about -10 instead of minus infinity",
        changes={"masked scores": hidden_by_little},
        fits=_has_mask,
    ),
    Mistake(
        name="causal_flipped",
        words="the causal triangle is flipped: a query sees itself and what comes after it",
        changes=seen_by(lambda scene, _: scene.keys >= scene.queries, Causal, CausalBottomRight, *WINDOWS),
        fits=_is(Causal, CausalBottomRight, *WINDOWS, square=True),
    ),
    Mistake(
        name="causal_sees_next",
        words="the causal mask is off by one: a query sees the key after its own as well",
        changes=seen_by(lambda scene, _: scene.keys <= scene.queries + 1, Causal),
        fits=_is(Causal),
    ),
    Mistake(
        name="causal_misses_own",
        words="the causal mask is off by one: a query does not see its own key",
        changes=seen_by(lambda scene, _: scene.keys < scene.queries, Causal),
        fits=_is(Causal),
    ),
    Mistake(
        name="bottom_right_for_top_left",
        words="the causal mask or window is aligned at the end (bottom-right) instead of the start (top-left)",
        changes=seen_by(_aligned(AT_THE_END), *AT_THE_END),
        fits=_is(*AT_THE_END, square=False),
    ),
    Mistake(
        name="top_left_for_bottom_right",
        words="the causal mask or window is aligned at the start (top-left) instead of the end (bottom-right)",
        changes=seen_by(_aligned(AT_THE_START), *AT_THE_START),
        fits=_is(*AT_THE_START, square=False),
    ),
    Mistake(
        name="window_one_short",
        words="the window is one key too short",
        changes=seen_by(_window(-1), *WINDOWS),
        fits=_is(*WINDOWS),
    ),
    Mistake(
        name="window_one_long",
        words="the window is one key too long",
        changes=seen_by(_window(1), *WINDOWS),
        fits=_is(*WINDOWS),
    ),
    Mistake(
        name="padding_one_short",
        words="each row's last true key is taken for padding",
        changes=seen_by(_lengths(-1), Padding),
        fits=_is(Padding),
    ),
    Mistake(
        name="padding_one_long",
        words="each row's first padded key is taken for a true one",
        changes=seen_by(_lengths(1), Padding),
        fits=_is(Padding),
    ),
    Mistake(
        name="padding_of_queries",
        words="the padding is applied to the queries instead of the keys",
        changes=seen_by(_padding_of_queries, Padding),
        fits=_is(Padding, square=True),
    ),
    Mistake(
        name="first_rows_mask_for_all",
        words="the mask of batch row 0 is used for every row",
        changes=seen_by(lambda scene, _: scene.seen[:1]),
        fits=_differs_in_batch,
    ),
)
