"""Wrong masks: neighbours of the workload's mask, and other ways to hide, show or shift keys."""

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attnbench.checking.oracle import RowMask, row_mask
from attnbench.checking.steps import Mistake, hide, wrong
from attnbench.workloads import masks
from attnbench.workloads.masks import Mask
from attnbench.workloads.workload import Workload

CAUSAL = (masks.Causal, masks.CausalBottomRight)
START, END = "aligned at the start (top-left)", "aligned at the end (bottom-right)"
AT_END: dict[type[Mask], type[Mask]] = {
    start: end
    for start in masks.masks().values()
    for end in masks.masks().values()
    if end.name == f"{start.name}_bottom_right"
}
DRAWN = (masks.Boolean, masks.Document, masks.PaddingToNothing)
"""Masks that do not occur by mistake."""
MOVES = (-1, 1, -2, 2, -3, 3)
MOST_ROWS = 256
"""Masks that show the same keys to the first queries, up to this number, count as equal."""


Seen = Callable[[RowMask], Tensor]
"""The keys that queries see (B, 1, R, S), or a tensor that broadcasts to (B, H, R, S)."""


@dataclass(frozen=True)
class WrongMask:
    """A wrong set of visible keys; `words` complete "It looks as if ..."."""

    name: str
    words: str
    seen: Seen
    flags: str = ""


def showing(scores: Tensor, mask: RowMask, seen: Seen) -> Tensor:
    """The masked scores with other visible keys."""
    return hide(mask.changed(scores), seen(mask))


def seen_with(other: Mask, others: tuple[Mask, ...], mask: RowMask) -> Tensor:
    """The keys that are visible under a mask and under all of `others`."""
    return functools.reduce(operator.and_, map(mask.seen_under, (other, *others)))


def explicit(part: Mask, sizes: tuple[int, int, int]) -> Mask:
    """This mask with its default lengths filled in."""
    if isinstance(part, masks.Padding):
        return masks.Padding(*part.table(*sizes).tolist())
    if isinstance(part, masks.Ragged):
        return masks.Ragged(*(part.table(*sizes) + sizes[1]).tolist())
    return part


def arguments_nearby(part: Mask) -> Iterator[tuple[int, ...]]:
    """Near arguments: each alone, or all, off by one or more, doubled or halved, or in another order."""
    numbers = part.arguments
    for place in range(len(numbers)):
        moved = {numbers[place] + move for move in MOVES} | {2 * numbers[place], numbers[place] // 2}
        yield from ((*numbers[:place], number, *numbers[place + 1 :]) for number in sorted(moved))
    if len(numbers) > 1:
        yield from (tuple(number + move for number in numbers) for move in MOVES)
        yield from (numbers[::-1], numbers[1:] + numbers[:1], numbers[-1:] + numbers[:-1])
        yield from ((end,) * len(numbers) for end in (numbers[0], max(numbers)))


def siblings(part: Mask) -> Iterator[tuple[type[Mask], tuple[int, ...]]]:
    """Masks of other kinds with the same numbers, or with the numbers as other libraries read them."""
    numbers = part.arguments
    most = numbers[:2]
    readings = [(), numbers, numbers[:1], most[::-1]]
    if numbers:
        length = numbers[0]
        readings += [(length, length), (length - 1, length - 1), (length, 0), (length - 1, 0), (0, length - 1)]
        readings += [(length // 2, length // 2), (length + 1,)]
    for kind in masks.masks().values():
        if not (kind.changes_scores or issubclass(kind, DRAWN) or kind is Mask):
            yield from ((kind, reading) for reading in dict.fromkeys(readings))


def neighbours(part: Mask, sizes: tuple[int, int, int]) -> Iterator[tuple[str, Mask]]:
    """Masks that a part may be confused with, each with the mistake's name."""
    at_start = {end: start for start, end in AT_END.items()}
    written = explicit(part, sizes)
    known: list[tuple[str, type[Mask], tuple[int, ...]]] = []
    if type(part) in AT_END:
        known.append(("bottom_right_for_top_left", AT_END[type(part)], part.arguments))
    if type(part) in at_start:
        known.append(("top_left_for_bottom_right", at_start[type(part)], part.arguments))
    if isinstance(part, masks.Tree):  # a token sees the cache and itself
        known.append(("mask_argument", masks.Tree, (0,)))
    known += (("mask_argument", type(written), numbers) for numbers in arguments_nearby(written))
    known += (("mask_of_other_kind", kind, numbers) for kind, numbers in siblings(part))
    for name, kind, numbers in known:
        try:
            mask = kind(*numbers)
            mask.check(*sizes)
        except ValueError:  # there is no such mask
            continue
        yield name, mask


def neighbour_masks(workload: Workload) -> Iterator[WrongMask]:
    """Each part of the mask ignored, or replaced by its neighbours."""
    parts = tuple(part for part in workload.mask_rule.parts if part.hides)
    for part in parts:
        others = tuple(other for other in parts if other is not part)
        if others:
            words = f"a part of the mask is ignored, {part}: what it alone hides gets weight"
            yield WrongMask("mask_part_ignored", words, partial(seen_with, Mask(), others))
        for name, mask in neighbours(part, (workload.batch_size, workload.seq_len, workload.kv_len)):
            end = f", {END if name.startswith('bottom') else START}" if name.endswith(("_left", "_right")) else ""
            words = f"the mask is {mask}{end}, where {part} was asked for"
            yield WrongMask(name, words, partial(seen_with, mask, others))


def moved(seen: Tensor, step: int, end: str) -> Tensor:
    """The visible keys shifted along the key axis; those at the end stay, are hidden, or wrap around."""
    result, places = seen.roll(step, -1), slice(0, step) if step > 0 else slice(step, None)
    if end != "rolled":
        result[..., places] = seen[..., places] & (end == "stays")
    return result


def by_head(mask: RowMask) -> Tensor:
    """The mask of batch row (b * H + h) mod B for head h of batch row b: (B, H, R, S)."""
    batch_size, num_heads = mask.sizes[0], mask.num_heads
    place = torch.arange(batch_size * num_heads).view(batch_size, num_heads) % batch_size
    return mask.seen[place, 0]


def of_queries(mask: RowMask) -> Tensor:
    """The padding applied to queries instead of keys."""
    parts = [part for part in mask.rule.parts if part.hides]
    padding = next(part for part in parts if isinstance(part, masks.Padding))
    lengths = torch.from_numpy(padding.table(*mask.sizes))[:, None, None, None].to(mask.rows.device)
    others = (mask.seen_under(part) for part in parts if part is not padding)
    return functools.reduce(operator.and_, others, (mask.queries < lengths).expand_as(mask.seen))


def changed_masks(workload: Workload) -> Iterator[WrongMask]:
    """The whole mask ignored, inverted, shifted, or applied to the wrong queries, rows or heads."""
    rule, square = workload.mask_rule, workload.seq_len == workload.kv_len
    if not any(isinstance(part, CAUSAL) for part in rule.parts):
        for kind, end in zip(CAUSAL, (START, END), strict=True):
            words = "a causal mask is applied that was not asked for" + f", {end}" * (not square)
            yield WrongMask(
                "causal_unasked", words, partial(lambda mask, kind: mask.seen & mask.seen_under(kind()), kind=kind)
            )
    if not rule.hides:
        return
    name = "padding_ignored" if isinstance(rule, masks.Padding) else "mask_ignored"
    yield WrongMask(name, "the mask is ignored: hidden keys get weight", lambda mask: torch.ones_like(mask.seen))
    words = "the mask is inverted: visible keys are hidden, hidden ones visible (True means visible)"
    yield WrongMask("mask_inverted", words, lambda mask: ~mask.seen)
    if square:
        words = "the mask is transposed: queries and keys have changed places"
        yield WrongMask("mask_transposed", words, lambda mask: mask.seen.mT, "needs_all_rows")
        words = "the mask hides a query's own key"
        yield WrongMask("own_key_hidden", words, lambda mask: mask.seen & (mask.keys != mask.queries))
    if workload.kv_len > workload.seq_len:
        words = "a query sees nothing of the cache, the keys before the first query's own"
        yield WrongMask("cache_hidden", words, lambda mask: mask.seen & (mask.keys >= mask.sizes[2] - mask.sizes[1]))
    if workload.batch_size > 1:
        words = "the mask of batch row 0 is used for every batch row"
        yield WrongMask("first_rows_mask_for_all", words, lambda mask: mask.seen[:1].expand_as(mask.seen))
        words = "each batch row has the mask of the next one"
        yield WrongMask("mask_of_other_rows", words, lambda mask: mask.seen.roll(-1, 0))
        words = "the masks of batch rows are given to heads (repeat instead of repeat_interleave)"
        yield WrongMask("mask_per_head", words, by_head)
    if any(isinstance(part, masks.Padding) for part in rule.parts) and square:
        words = "the padding is applied to the queries instead of the keys"
        yield WrongMask("padding_of_queries", words, of_queries)
    ends = {"stays": "", "hidden": ", and the key at the end is hidden", "rolled": ", round the end"}
    for step in (step for step in MOVES if abs(step) < workload.kv_len):
        way = f"{abs(step)} {'after' if step > 0 else 'before'} it"
        for end, at_end in ends.items() if abs(step) == 1 else (("stays", ""),):
            words = f"the mask is shifted: what it says of a key holds for the key {way}{at_end}"
            yield WrongMask(
                "mask_shifted", words, partial(lambda mask, step, end: moved(mask.seen, step, end), step=step, end=end)
            )


ALIGNMENTS = {"bottom_right_for_top_left", "top_left_for_bottom_right"}


def distinct_masks(workload: Workload) -> Iterator[WrongMask]:
    """Distinct wrong masks at a workload.

    A single query aligned at the other end may see all keys, as with an ignored mask: both are named.
    """
    rows = torch.linspace(0, workload.seq_len - 1, min(MOST_ROWS, workload.seq_len)).long()
    right, shape = row_mask(workload, rows), (-1, workload.num_heads, -1, -1)
    known = {right.seen.expand(shape).numpy().tobytes()}
    every = sorted((*changed_masks(workload), *neighbour_masks(workload)), key=lambda each: each.name not in ALIGNMENTS)
    for each in every:
        if each.name in ALIGNMENTS and workload.seq_len == 1:
            yield each
            continue
        if "needs_all_rows" not in each.flags or len(rows) == workload.seq_len:
            seen = each.seen(right).expand(workload.batch_size, *shape[1:])
            if not seen.any() or (shown := seen.numpy().tobytes()) in known:
                continue
            known.add(shown)
        yield each


def wrong_masks(workload: Workload) -> Iterator[Mistake]:
    """Every wrong mask as a mistake of the forward pass."""
    for each in distinct_masks(workload):
        yield wrong(each.name, each.words, each.flags, masked_scores=partial(showing, seen=each.seen))
