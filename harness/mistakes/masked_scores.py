"""Mistakes in the mask: which keys are hidden, and how."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from harness.mask import Causal, CausalBottomRight, Mask, Padding, SlidingWindow
from harness.mistakes.kind import Mistake
from harness.records import Workload
from harness.steps import Changes, Scene

Rule = Callable[[Scene], Tensor]


def seen_by(rule: Rule) -> Changes:
    """The masked scores under another rule, which gives (B, 1, R, S), or what can be made so."""

    def masked(scores: Tensor, scene: Scene) -> Tensor:
        return scores.masked_fill(~rule(scene), -math.inf)

    return {"masked scores": masked}


def not_masked(scores: Tensor, scene: Scene) -> Tensor:
    """As they are."""
    return scores


def hidden_after(masked: Tensor, scene: Scene) -> Tensor:
    """Softmax over all keys, then 0 for the hidden ones: the rest no longer adds up to 1."""
    return masked.softmax(dim=-1).masked_fill(~scene.seen, 0.0)


def added_as_number(scores: Tensor, scene: Scene) -> Tensor:
    """The boolean mask added: +1 where visible."""
    return scores + scene.seen.to(scores.dtype)


def multiplied(scores: Tensor, scene: Scene) -> Tensor:
    """The boolean mask multiplied: score 0 where hidden."""
    return scores * scene.seen.to(scores.dtype)


def hidden_by_little(scores: Tensor, scene: Scene) -> Tensor:
    """Hidden keys get a score of -10, which a large score outweighs."""
    return scores.masked_fill(~scene.seen, -10.0)


def _window(change: int) -> Rule:
    def rule(scene: Scene) -> Tensor:
        length = scene.mask.rule.arguments[0] + change
        return scene.seen_under(SlidingWindow(length)) if length > 0 else torch.zeros_like(scene.seen)

    return rule


def _lengths(change: int) -> Rule:
    def rule(scene: Scene) -> Tensor:
        table = scene.mask.rule.table(*scene.mask.sizes)
        assert table is not None
        lengths = torch.from_numpy(table).to(scene.rows.device) + change
        return scene.keys < lengths[:, None, None, None]

    return rule


def _padding_of_queries(scene: Scene) -> Tensor:
    table = scene.mask.rule.table(*scene.mask.sizes)
    assert table is not None
    return (scene.queries < torch.from_numpy(table).to(scene.rows.device)[:, None, None, None]).expand_as(scene.seen)


def _is(*kinds: type[Mask], square: bool | None = None) -> Callable[[Workload], bool]:
    """Whether a workload's mask is of these kinds and, where that is asked, T == S or not."""

    def fits(workload: Workload) -> bool:
        right = type(workload.mask_rule) in kinds
        return right and square in {None, workload.seq_len == workload.kv_len}

    return fits


def _has_mask(workload: Workload) -> bool:
    return type(workload.mask_rule) is not Mask


def _has_other_mask(workload: Workload) -> bool:
    return _has_mask(workload) and type(workload.mask_rule) is not Padding


def _differs_in_batch(workload: Workload) -> bool:
    return isinstance(workload.mask_rule, Padding) and workload.batch_size > 1


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
        changes={"masked scores": not_masked},
        fits=_is(Padding),
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
        changes=seen_by(lambda scene: ~scene.seen),
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
        changes=seen_by(lambda scene: scene.keys >= scene.queries),
        fits=_is(Causal, CausalBottomRight, SlidingWindow, square=True),
    ),
    Mistake(
        name="causal_sees_next",
        words="the causal mask is off by one: a query sees the key after its own as well",
        changes=seen_by(lambda scene: scene.keys <= scene.queries + 1),
        fits=_is(Causal),
    ),
    Mistake(
        name="causal_misses_own",
        words="the causal mask is off by one: a query does not see its own key",
        changes=seen_by(lambda scene: scene.keys < scene.queries),
        fits=_is(Causal),
    ),
    Mistake(
        name="bottom_right_for_top_left",
        words="the causal mask is aligned at the end (bottom-right) instead of the start (top-left)",
        changes=seen_by(lambda scene: scene.seen_under(CausalBottomRight())),
        fits=_is(Causal, square=False),
    ),
    Mistake(
        name="top_left_for_bottom_right",
        words="the causal mask is aligned at the start (top-left) instead of the end (bottom-right)",
        changes=seen_by(lambda scene: scene.seen_under(Causal())),
        fits=_is(CausalBottomRight, square=False),
    ),
    Mistake(
        name="window_one_short",
        words="the window is one key too short",
        changes=seen_by(_window(-1)),
        fits=_is(SlidingWindow),
    ),
    Mistake(
        name="window_one_long",
        words="the window is one key too long",
        changes=seen_by(_window(1)),
        fits=_is(SlidingWindow),
    ),
    Mistake(
        name="padding_one_short",
        words="each row's last true key is taken for padding",
        changes=seen_by(_lengths(-1)),
        fits=_is(Padding),
    ),
    Mistake(
        name="padding_one_long",
        words="each row's first padded key is taken for a true one",
        changes=seen_by(_lengths(1)),
        fits=_is(Padding),
    ),
    Mistake(
        name="padding_of_queries",
        words="the padding is applied to the queries instead of the keys",
        changes=seen_by(_padding_of_queries),
        fits=_is(Padding, square=True),
    ),
    Mistake(
        name="first_rows_mask_for_all",
        words="the mask of batch row 0 is used for every row",
        changes=seen_by(lambda scene: scene.seen[:1]),
        fits=_differs_in_batch,
    ),
)
