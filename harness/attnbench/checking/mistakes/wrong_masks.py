"""Wrong masks: neighbours of the workload's mask, and other ways to hide or show keys."""

import functools
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.checking.oracle import RowMask, row_mask
from attnbench.checking.steps import Mistake, hide, meaning, wrong
from attnbench.workloads import masks
from attnbench.workloads.masks import Mask
from attnbench.workloads.workload import Workload

START, END = "aligned at the start (top-left)", "aligned at the end (bottom-right)"
CAUSAL: dict[type[Mask], str] = {masks.Causal: START, masks.CausalBottomRight: END}
DRAWN = (masks.Boolean, masks.Document, masks.PaddingToNothing)
"""Masks that do not occur by mistake."""
MOVES = (-1, 1, -2, 2, -3, 3)
ALIGNMENTS = {"bottom_right_for_top_left", "top_left_for_bottom_right"}
MOST_ROWS = 256
"""Masks that show the same keys to the first queries, up to this number, count as equal."""


class WrongMask(NamedTuple):
    """A wrong set of visible keys."""

    name: str
    words: str
    seen: Callable[[RowMask], Tensor]  # (B, 1, R, S), or a tensor that broadcasts to (B, H, R, S)
    flags: str = ""

    def masked(self, scores: Tensor, mask: RowMask) -> Tensor:
        """The masked scores with these visible keys."""
        return hide(mask.changed(scores), self.seen(mask))


def seen_with(other: Mask, others: tuple[Mask, ...], mask: RowMask) -> Tensor:
    """The keys that are visible under a mask and under all of `others`."""
    return functools.reduce(operator.and_, map(mask.seen_under, (other, *others)))


def arguments_nearby(numbers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Near arguments: each alone, or all, off by one or more, doubled or halved, or in reverse."""
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
    known: list[tuple[str, type[Mask], tuple[int, ...]]] = []
    if other := kinds.get(f"{name}_bottom_right"):
        known.append(("bottom_right_for_top_left", other, numbers))
    if name.endswith("_bottom_right"):
        known.append(("top_left_for_bottom_right", kinds[name.removesuffix("_bottom_right")], numbers))
    known += (("mask_argument", type(part), near) for near in arguments_nearby(numbers))
    readings = [(), numbers, numbers[:1], numbers[:2][::-1]]  # the numbers as other libraries read them
    for length in numbers[:1]:
        half = length // 2
        readings += [
            (length, length),
            (length - 1, length - 1),
            (length, 0),
            (length - 1, 0),
            (length + 1,),
            (half, half),
        ]
    for kind in (kind for kind in kinds.values() if kind.__module__ == masks.__name__):  # those written as text
        if not (kind.changes_scores or issubclass(kind, DRAWN)):
            known += (("mask_of_other_kind", kind, reading) for reading in dict.fromkeys(readings))
    for confused, kind, arguments in known:
        try:
            mask = kind(*arguments)
            mask.check(*sizes)
        except ValueError:  # there is no such mask
            continue
        yield confused, mask


def neighbour_masks(workload: Workload) -> Iterator[WrongMask]:
    """Each part of the mask ignored, or replaced by its neighbours."""
    parts = tuple(part for part in workload.mask_rule.parts if part.hides)
    for part in parts:
        others = tuple(other for other in parts if other is not part)
        if others:
            words = f"a part of the mask is ignored, {part}: what it alone hides gets weight"
            yield WrongMask("mask_part_ignored", words, partial(seen_with, Mask(), others))
        for name, mask in neighbours(part, (workload.batch_size, workload.seq_len, workload.kv_len)):
            end = f", {END if name.startswith('bottom') else START}" * (name in ALIGNMENTS)
            words = f"the mask is {mask}{end}, where {part} was asked for"
            yield WrongMask(name, words, partial(seen_with, mask, others))


def moved(mask: RowMask, step: int) -> Tensor:
    """The visible keys shifted along the key axis; those at the end stay."""
    result, places = mask.seen.roll(step, -1), slice(0, step) if step > 0 else slice(step, None)
    result[..., places] = mask.seen[..., places]
    return result


def by_head(mask: RowMask) -> Tensor:
    """The mask of batch row (b * H + h) mod B for head h of batch row b: (B, H, R, S)."""
    batch_size, num_heads = mask.sizes[0], mask.num_heads
    place = torch.arange(batch_size * num_heads).view(batch_size, num_heads) % batch_size
    return mask.seen[place, 0]


def changed_masks(workload: Workload) -> Iterator[WrongMask]:
    """The whole mask ignored, inverted, shifted, or applied to the wrong queries, rows or heads."""
    rule, is_square = workload.mask_rule, workload.seq_len == workload.kv_len
    if not any(isinstance(part, tuple(CAUSAL)) for part in rule.parts):
        for kind, end in CAUSAL.items():
            words = "a causal mask is applied that was not asked for" + f", {end}" * (not is_square)
            yield WrongMask("causal_unasked", words, partial(seen_with, kind(), (rule,)))
    if not rule.hides:
        return
    name = "padding_ignored" if isinstance(rule, masks.Padding) else "mask_ignored"
    yield WrongMask(name, meaning("mask_ignored"), lambda mask: torch.ones_like(mask.seen))
    kinds: list[tuple[str, Callable[[RowMask], Tensor]]] = [("mask_inverted", lambda mask: ~mask.seen)]
    if is_square:
        kinds.append(("mask_transposed", lambda mask: mask.seen.mT))
        kinds.append(("own_key_hidden", lambda mask: mask.seen & (mask.keys != mask.queries)))
    if workload.batch_size > 1:
        kinds.append(("first_rows_mask_for_all", lambda mask: mask.seen[:1].expand_as(mask.seen)))
        kinds.append(("mask_of_other_rows", lambda mask: mask.seen.roll(-1, 0)))
        kinds.append(("mask_per_head", by_head))
    for name, seen in kinds:
        yield WrongMask(name, meaning(name), seen, "needs_all_rows" * (name == "mask_transposed"))
    for step in (step for step in MOVES if abs(step) < workload.kv_len):
        words = f"the mask is shifted: it treats a key as the one {abs(step)} {'before' if step > 0 else 'after'} it"
        yield WrongMask("mask_shifted", words, partial(moved, step=step))


def distinct_masks(workload: Workload) -> Iterator[WrongMask]:
    """Distinct wrong masks at a workload.

    A single query aligned at the other end may see all keys, as with an ignored mask: both are named.
    """
    rows = torch.linspace(0, workload.seq_len - 1, min(MOST_ROWS, workload.seq_len)).long()
    right, shape = row_mask(workload, rows), (workload.batch_size, workload.num_heads, -1, -1)
    known = {right.seen.expand(shape).numpy().tobytes()}
    every = sorted((*changed_masks(workload), *neighbour_masks(workload)), key=lambda each: each.name not in ALIGNMENTS)
    for each in every:
        if each.name in ALIGNMENTS and workload.seq_len == 1:
            yield each
        elif "needs_all_rows" not in each.flags or len(rows) == workload.seq_len:
            seen = each.seen(right)
            numbers = seen.expand(shape).numpy().tobytes()
            if seen.any() and numbers not in known:
                known.add(numbers)
                yield each


def wrong_masks(workload: Workload) -> Iterator[Mistake]:
    """Every wrong mask as a mistake of the forward pass."""
    for each in distinct_masks(workload):
        yield wrong(each.name, each.words, each.flags, masked_scores=each.masked)
