"""Mistakes in the mask: which keys are hidden, and how."""

import functools
import operator
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from attnbench.checking.mistakes.mistake import is_square, mistake
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import changed, hide
from attnbench.workloads.masks import (
    Boolean,
    Causal,
    CausalBottomRight,
    Mask,
    Padding,
    PaddingToNothing,
    SlidingWindow,
    SlidingWindowBottomRight,
)
from attnbench.workloads.workload import Workload

Seen = Callable[[Mask], Tensor]
"""f(part): which keys each query sees under a part of the mask, (B, 1, R, S) or broadcastable to it."""
WINDOWS = (SlidingWindow, SlidingWindowBottomRight)
AT_THE_END: dict[type[Mask], type[Mask]] = {Causal: CausalBottomRight, SlidingWindow: SlidingWindowBottomRight}
AT_THE_START = {end: start for start, end in AT_THE_END.items()}


def has(*kinds: type[Mask], square: bool | None = None) -> Callable[[Workload], bool]:
    """Whether a part of a workload's mask is of these kinds and, where `square` is given, whether T == S is as well."""

    def fits(workload: Workload) -> bool:
        is_of_kind = any(type(part) in kinds for part in workload.mask_rule.parts)
        return is_of_kind and square in {None, is_square(workload)}

    return fits


def hides(workload: Workload) -> bool:
    """Whether the mask hides keys."""
    return workload.mask_rule.hides


def showing(scores: Tensor, mask: RowMask, seen: Seen, *kinds: type[Mask]) -> Tensor:
    """The masked scores where the parts of these kinds show `seen(part)` instead, while the others stay."""
    parts = [part for part in mask.rule.parts if part.hides]
    shown = (seen(part) if type(part) in kinds else mask.seen_under(part) for part in parts)
    return hide(changed(scores, mask), functools.reduce(operator.and_, shown))


@mistake("masked scores", fits=lambda workload: hides(workload) and type(workload.mask_rule) is not Padding)
def mask_ignored(scores: Tensor, mask: RowMask) -> Tensor:
    """The mask never reaches the softmax: hidden keys get weight."""
    return changed(scores, mask)


@mistake("masked scores", fits=has(Padding))
def padding_ignored(scores: Tensor, mask: RowMask) -> Tensor:
    """Padding is ignored: the keys past each row's length get weight."""
    return showing(scores, mask, lambda _: torch.ones_like(mask.seen), Padding)


def parts_to_ignore(workload: Workload) -> Iterable[str]:
    """The parts of which one alone may be forgotten, but for padding, which has a mistake of its own."""
    parts = [part for part in workload.mask_rule.parts if part.hides]
    return [str(part) for part in parts if type(part) is not Padding] if len(parts) > 1 else []


@mistake("masked scores", choices=parts_to_ignore)
def mask_part_ignored(scores: Tensor, mask: RowMask, choice: str) -> Tensor:
    """A part of the mask is ignored, {choice}: what it alone hides gets weight."""
    others = (part for part in mask.rule.parts if part.hides and str(part) != choice)
    return hide(changed(scores, mask), functools.reduce(operator.and_, map(mask.seen_under, others)))


def zero_where_hidden(masked: Tensor, mask: RowMask) -> Tensor:
    """Softmax over all keys, then 0 for the hidden ones."""
    return masked.softmax(dim=-1).masked_fill(~mask.seen, 0.0)


@mistake("masked scores", also={"weights": zero_where_hidden}, fits=hides)
def mask_after_softmax(scores: Tensor, mask: RowMask) -> Tensor:
    """The mask is applied after the softmax, so that the weights of the visible keys do not add up to 1."""
    return changed(scores, mask)


@mistake("masked scores", fits=hides)
def mask_inverted(scores: Tensor, mask: RowMask) -> Tensor:
    """The mask is inverted: visible keys are hidden, hidden ones visible (True means visible)."""
    return hide(changed(scores, mask), ~mask.seen)


@mistake("masked scores", fits=hides)
def mask_added_as_number(scores: Tensor, mask: RowMask) -> Tensor:
    """The boolean mask is added to the scores as 0 and 1 instead of hiding keys."""
    return changed(scores, mask) + mask.seen.to(scores.dtype)


@mistake("masked scores", fits=hides)
def mask_multiplied(scores: Tensor, mask: RowMask) -> Tensor:
    """The scores are multiplied by the mask: a hidden key has score 0 instead of minus infinity."""
    return changed(scores, mask) * mask.seen.to(scores.dtype)


@mistake("masked scores", fits=hides)
def mask_too_weak(scores: Tensor, mask: RowMask) -> Tensor:
    """Hidden keys get a score of about -10 instead of minus infinity."""
    return changed(scores, mask).masked_fill(~mask.seen, -10.0)


@mistake("masked scores", fits=has(Causal, CausalBottomRight, *WINDOWS, square=True))
def causal_flipped(scores: Tensor, mask: RowMask) -> Tensor:
    """The causal triangle is flipped: a query sees itself and what comes after it."""
    return showing(scores, mask, lambda _: mask.keys >= mask.queries, Causal, CausalBottomRight, *WINDOWS)


@mistake("masked scores", fits=has(Causal))
def causal_sees_next(scores: Tensor, mask: RowMask) -> Tensor:
    """The causal mask is off by one: a query sees the key after its own as well."""
    return showing(scores, mask, lambda _: mask.keys <= mask.queries + 1, Causal)


@mistake("masked scores", fits=has(Causal))
def causal_misses_own(scores: Tensor, mask: RowMask) -> Tensor:
    """The causal mask is off by one: a query does not see its own key."""
    return showing(scores, mask, lambda _: mask.keys < mask.queries, Causal)


def aligned(mask: RowMask, other: dict[type[Mask], type[Mask]]) -> Seen:
    """The same mask aligned at the other end."""
    return lambda part: mask.seen_under(other[type(part)](*part.arguments))


@mistake("masked scores", fits=has(*AT_THE_END, square=False))
def bottom_right_for_top_left(scores: Tensor, mask: RowMask) -> Tensor:
    """The causal mask or window is aligned at the end (bottom-right) instead of the start (top-left)."""
    return showing(scores, mask, aligned(mask, AT_THE_END), *AT_THE_END)


@mistake("masked scores", fits=has(*AT_THE_START, square=False))
def top_left_for_bottom_right(scores: Tensor, mask: RowMask) -> Tensor:
    """The causal mask or window is aligned at the start (top-left) instead of the end (bottom-right)."""
    return showing(scores, mask, aligned(mask, AT_THE_START), *AT_THE_START)


@mistake("masked scores", fits=has(*WINDOWS))
def window_one_short(scores: Tensor, mask: RowMask) -> Tensor:
    """The window is one key too short."""

    def seen(part: Mask) -> Tensor:
        length = part.arguments[0] - 1
        return mask.seen_under(type(part)(length)) if length > 0 else torch.zeros_like(mask.seen)

    return showing(scores, mask, seen, *WINDOWS)


@mistake("masked scores", fits=has(*WINDOWS))
def window_one_long(scores: Tensor, mask: RowMask) -> Tensor:
    """The window is one key too long."""
    return showing(scores, mask, lambda part: mask.seen_under(type(part)(part.arguments[0] + 1)), *WINDOWS)


def row_lengths(part: Mask, mask: RowMask) -> Tensor:
    """The number of keys of each batch row that are no padding (B, 1, 1, 1)."""
    return torch.from_numpy(part.table(*mask.sizes))[:, None, None, None].to(mask.device)


@mistake("masked scores", fits=has(Padding))
def padding_one_short(scores: Tensor, mask: RowMask) -> Tensor:
    """Each row's last true key is taken for padding."""
    return showing(scores, mask, lambda part: mask.keys < row_lengths(part, mask) - 1, Padding)


@mistake("masked scores", fits=has(Padding))
def padding_one_long(scores: Tensor, mask: RowMask) -> Tensor:
    """Each row's first padded key is taken for a true one."""
    return showing(scores, mask, lambda part: mask.keys < row_lengths(part, mask) + 1, Padding)


@mistake("masked scores", fits=has(Padding, square=True))
def padding_of_queries(scores: Tensor, mask: RowMask) -> Tensor:
    """The padding is applied to the queries instead of the keys."""
    return showing(scores, mask, lambda part: mask.queries < row_lengths(part, mask), Padding)


@mistake(
    "masked scores",
    fits=lambda workload: workload.batch_size > 1 and has(Padding, PaddingToNothing, Boolean)(workload),
)
def first_rows_mask_for_all(scores: Tensor, mask: RowMask) -> Tensor:
    """The mask of batch row 0 is used for every row."""
    return hide(changed(scores, mask), mask.seen[:1])
