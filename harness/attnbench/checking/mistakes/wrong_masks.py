"""Wrong masks: neighbours of the workload's mask, and other ways to hide or show keys."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial, reduce
from operator import and_

import torch
from torch import Tensor

from attnbench.checking.oracle import RowMask, row_mask
from attnbench.checking.steps import Mistake, hide, wrong
from attnbench.workloads import masks
from attnbench.workloads.masks import Mask
from attnbench.workloads.workload import Workload

Seen = Callable[[RowMask], Tensor]
"""Visible keys (B, 1, R, S), or a tensor that broadcasts to (B, H, R, S)."""
WrongMask = tuple[str, str, Seen]  # the mistake's name, a detail, and the keys that are visible
AT_END = "_bottom_right"
ALIGNED = ("bottom_right_for_top_left", "top_left_for_bottom_right")
CAUSAL: dict[type[Mask], str] = {
    masks.Causal: "aligned at the start (top-left)",
    masks.CausalBottomRight: "aligned at the end (bottom-right)",
}
DRAWN = (masks.Boolean, masks.Document, masks.PaddingToNothing)
"""Masks that do not occur by mistake."""
MOVES = (-1, 1, -2, 2, -3, 3)
MOST_ROWS = 256
"""Masks that show the same keys to the first queries, up to this number, count as equal."""


def seen_with(other: Mask, others: tuple[Mask, ...], mask: RowMask) -> Tensor:
    """The keys that are visible under a mask and under all of `others`."""
    return reduce(and_, map(mask.seen_under, (other, *others)))


def arguments_nearby(numbers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Similar arguments: one or all of them off by one or more, doubled or halved; or their order reversed."""
    for place, number in enumerate(numbers):
        for other in sorted({number + move for move in MOVES} | {2 * number, number // 2}):
            yield (*numbers[:place], other, *numbers[place + 1 :])
    if len(numbers) > 1:
        yield from (tuple(number + move for number in numbers) for move in MOVES)
        yield from (numbers[::-1], (numbers[0],) * len(numbers), (max(numbers),) * len(numbers))


def neighbours(part: Mask, sizes: tuple[int, int, int]) -> Iterator[tuple[str, Mask]]:
    """Masks that a part may be confused with, each with the mistake's name."""
    kinds, name = masks.masks(), type(part).name
    numbers = tuple(part.table(*sizes).tolist()) if isinstance(part, masks.Padding) else part.arguments
    known = [("bottom_right_for_top_left", f"{name}{AT_END}", numbers)]
    if name.endswith(AT_END):
        known = [("top_left_for_bottom_right", name.removesuffix(AT_END), numbers)]
    known += (("mask_argument", name, near) for near in arguments_nearby(numbers))
    readings = [(), numbers, numbers[:1], numbers[:2][::-1]]  # the numbers as other libraries read them
    for n in numbers[:1]:
        readings += [(n, n), (n - 1, n - 1), (n, 0), (n - 1, 0), (n + 1,), (n // 2, n // 2)]
    for kind in (kind for kind in kinds.values() if kind.__module__ == masks.__name__):  # those written as text
        if not (kind.changes_scores or issubclass(kind, DRAWN)):
            known += (("mask_of_other_kind", kind.name, reading) for reading in dict.fromkeys(readings))
    for confused, other, arguments in known:
        with contextlib.suppress(KeyError, ValueError):  # there is no such mask
            mask = kinds[other](*arguments)
            mask.check(*sizes)
            yield confused, mask


def neighbour_masks(workload: Workload) -> Iterator[WrongMask]:
    """Each part of the mask ignored, or replaced by its neighbours."""
    parts = tuple(part for part in workload.mask_rule.parts if part.hides)
    for part in parts:
        others = tuple(other for other in parts if other is not part)
        if others:
            yield "mask_part_ignored", f"{part}", partial(seen_with, Mask(), others)
        for name, mask in neighbours(part, (workload.batch_size, workload.seq_len, workload.kv_len)):
            yield name, f"the mask is {mask}, where {part} was asked for", partial(seen_with, mask, others)


def by_head(mask: RowMask) -> Tensor:
    """The mask of batch row (b * H + h) mod B for head h of batch row b: (B, H, R, S)."""
    batch_size, num_heads = mask.sizes[0], mask.num_heads
    place = torch.arange(batch_size * num_heads).view(batch_size, num_heads) % batch_size
    return mask.seen[place, 0]


CHANGED: dict[str, Seen] = {
    "mask_ignored": lambda mask: torch.ones_like(mask.seen),
    "mask_inverted": lambda mask: ~mask.seen,
    "mask_transposed": lambda mask: mask.seen.mT if len(mask.rows) == mask.sizes[1] == mask.sizes[2] else mask.seen,
    "own_key_hidden": lambda mask: mask.seen & (mask.keys != mask.queries),
    "first_rows_mask_for_all": lambda mask: mask.seen[:1].expand_as(mask.seen),
    "mask_of_other_rows": lambda mask: mask.seen.roll(-1, 0),
    "mask_per_head": by_head,
}
"""The whole mask ignored, inverted, or applied to other queries, rows or heads."""


def changed_masks(workload: Workload) -> Iterator[WrongMask]:
    """The whole mask changed, or joined with another one."""
    rule = workload.mask_rule
    for kind, end in CAUSAL.items() if not any(isinstance(part, tuple(CAUSAL)) for part in rule.parts) else ():
        yield "causal_unasked", end * (workload.seq_len != workload.kv_len), partial(seen_with, kind(), (rule,))
    for name, seen in CHANGED.items() if rule.hides else ():
        is_padding = isinstance(rule, masks.Padding) and name == "mask_ignored"
        yield "padding_ignored" if is_padding else name, "", seen


def wrong_masks(workload: Workload) -> Iterator[Mistake]:
    """Every distinct wrong mask as a mistake of the forward pass.

    A single query aligned at the other end may see all keys, as with an ignored mask: both are named.
    """
    rows = torch.linspace(0, workload.seq_len - 1, min(MOST_ROWS, workload.seq_len)).long()
    right, shape = row_mask(workload, rows), (workload.batch_size, workload.num_heads, -1, -1)
    known = {right.seen.expand(shape).numpy().tobytes()}
    every = sorted((*changed_masks(workload), *neighbour_masks(workload)), key=lambda each: each[0] not in ALIGNED)
    for name, detail, seen in every:
        keys = seen(right)
        numbers = keys.expand(shape).numpy().tobytes()
        is_alike = name in ALIGNED and workload.seq_len == 1
        if is_alike or (keys.any() and numbers not in known):
            known |= set() if is_alike else {numbers}
            masked = lambda scores, mask, seen=seen: hide(mask.changed(scores), seen(mask))  # noqa: E731
            yield wrong(name, detail, needs_all_rows=name == "mask_transposed", masked_scores=masked)
