"""Wrong masks: the neighbours of the mask that was asked for, and what else hides, shows or shifts keys."""

import functools
import operator
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from attnbench.checking.oracle import RowMask
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
DRAWN = (masks.Boolean, masks.TreeOf, masks.Document, masks.PaddingToNothing)
"""Masks that nobody has by mistake."""
MOVES = (-1, 1, -2, 2, -3, 3)
MOST_ROWS = 256
"""Masks that show the same to this many queries are taken for the same."""


def showing(scores: Tensor, mask: RowMask, seen: Tensor) -> Tensor:
    """The masked scores where other keys are seen, (B, 1, R, S) or what broadcasts to it."""
    return hide(mask.changed(scores), seen)


def instead(words: str, seen: Callable[[RowMask], Tensor], name: str = "mask_wrong", flags: str = "") -> Mistake:
    """The mistake that shows `seen(mask)` (B, 1, R, S)."""
    return wrong(name, words, flags, masked_scores=lambda scores, mask: showing(scores, mask, seen(mask)))


def seen_with(other: Mask, others: tuple[Mask, ...]) -> Callable[[RowMask], Tensor]:
    """What is seen under a mask and under all of `others`."""
    return lambda mask: functools.reduce(operator.and_, map(mask.seen_under, (other, *others)))


def explicit(part: Mask, sizes: tuple[int, int, int]) -> Mask:
    """The same mask with its lengths written out."""
    if isinstance(part, masks.Padding):
        return masks.Padding(*part.table(*sizes).tolist())
    if isinstance(part, masks.Ragged):
        return masks.Ragged(*(part.table(*sizes) + sizes[1]).tolist())
    return part


def arguments_nearby(part: Mask) -> Iterator[tuple[int, ...]]:
    """Other arguments: each alone, or all, off by one or more, twice or half as large, in another order."""
    numbers = part.arguments
    for place in range(len(numbers)):
        moved = {numbers[place] + move for move in MOVES} | {2 * numbers[place], numbers[place] // 2}
        yield from (numbers[:place] + (number,) + numbers[place + 1 :] for number in sorted(moved))
    if len(numbers) > 1:
        yield from (tuple(number + move for number in numbers) for move in MOVES)
        yield from (numbers[::-1], numbers[1:] + numbers[:1], numbers[-1:] + numbers[:-1])
        yield from ((end,) * len(numbers) for end in (numbers[0], max(numbers)))


def siblings(part: Mask) -> Iterator[tuple[type[Mask], tuple[int, ...]]]:
    """Masks of other kinds with the same numbers, or with those that other libraries would read."""
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
    """Masks for which a part may be taken, each with the name of such a mistake."""
    at_start = {end: start for start, end in AT_END.items()}
    written = explicit(part, sizes)
    known: list[tuple[str, type[Mask], tuple[int, ...]]] = []
    if type(part) in AT_END:
        known.append(("bottom_right_for_top_left", AT_END[type(part)], part.arguments))
    if type(part) in at_start:
        known.append(("top_left_for_bottom_right", at_start[type(part)], part.arguments))
    known += (("mask_argument", type(written), numbers) for numbers in arguments_nearby(written))
    known += (("mask_of_other_kind", kind, numbers) for kind, numbers in siblings(part))
    for name, kind, numbers in known:
        try:
            mask = kind(*numbers)
            mask.check(*sizes)
        except ValueError:  # there is no such mask
            continue
        yield name, mask


def neighbour_masks(workload: Workload) -> Iterator[Mistake]:
    """Each part of the mask replaced by its neighbours, none of which shows what another does."""
    sizes = (workload.batch_size, workload.seq_len, workload.kv_len)
    parts = tuple(part for part in workload.mask_rule.parts if part.hides)
    everything = Mask()
    rows = np.unique(np.linspace(0, workload.seq_len - 1, MOST_ROWS, dtype=np.int64))
    known = {workload.mask_rule.dense(*sizes, rows=rows).tobytes()}
    for part in parts:
        others = tuple(other for other in parts if other is not part)
        for name, mask in neighbours(part, sizes):
            mask_seen = functools.reduce(operator.and_, (each.dense(*sizes, rows=rows) for each in (mask, *others)))
            if (seen := mask_seen.tobytes()) in known or not mask_seen.any():
                continue
            known.add(seen)
            end = f", {END if name.startswith('bottom') else START}" if name.endswith(("_left", "_right")) else ""
            yield instead(f"the mask is {mask}{end}, where {part} was asked for", seen_with(mask, others), name)
        if len(parts) > 1:
            words = f"a part of the mask is ignored, {part}: what it alone hides gets weight"
            yield instead(words, seen_with(everything, others), "mask_part_ignored")


def moved(seen: Tensor, step: int, end: str) -> Tensor:
    """What is seen, shifted along the keys; those at the end stay as they were, are hidden, or come from the other."""
    result, places = seen.roll(step, -1), slice(0, step) if step > 0 else slice(step, None)
    if end != "rolled":
        result[..., places] = seen[..., places] & (end == "stays")
    return result


def by_head(mask: RowMask) -> Tensor:
    """The mask of batch row (b * H + h) mod B for head h of batch row b: (B, H, R, S)."""
    batch_size, num_heads = mask.sizes[0], mask.num_heads
    place = torch.arange(batch_size * num_heads).view(batch_size, num_heads) % batch_size
    return mask.seen[place, 0]


def changed_masks(workload: Workload) -> Iterator[Mistake]:
    """The whole mask ignored, inverted, shifted, or given to others than those it is for."""
    rule, square = workload.mask_rule, workload.seq_len == workload.kv_len
    if workload.kv_len > 1 and not any(isinstance(part, CAUSAL) for part in rule.parts):
        for kind, end in zip(CAUSAL, ("", "") if square else (f", {START}", f", {END}"), strict=True):
            if kind is CAUSAL[0] or not square:
                seen = functools.partial(lambda mask, kind: mask.seen & mask.seen_under(kind()), kind=kind)
                yield instead(f"a causal mask is applied that was not asked for{end}", seen, "causal_unasked")
    if not rule.hides:
        return
    name = "padding_ignored" if isinstance(rule, masks.Padding) else "mask_ignored"
    words = "the mask is ignored: hidden keys get weight"
    yield wrong(name, words, masked_scores=lambda scores, mask: mask.changed(scores))
    words = "the mask is inverted: visible keys are hidden, hidden ones visible (True means visible)"
    yield instead(words, lambda mask: ~mask.seen, "mask_inverted")
    if square:
        words = "the mask is transposed: queries and keys have changed places"
        yield instead(words, lambda mask: mask.seen.mT, "mask_transposed", "needs_all_rows")
        yield instead("the mask hides a query's own key", lambda mask: mask.seen & (mask.keys != mask.queries))
    ends = {"stays": "", "hidden": ", and the key at the end is hidden", "rolled": ", round the end"}
    for step in (step for step in MOVES if abs(step) < workload.kv_len):
        for end, words in ends.items() if abs(step) == 1 else (("stays", ""),):
            seen = functools.partial(lambda mask, step, end: moved(mask.seen, step, end), step=step, end=end)
            way = f"{abs(step)} {'after' if step > 0 else 'before'} it"
            yield instead(f"the mask is shifted: what it says of a key holds for the key {way}{words}", seen, "mask_shifted")
    if workload.batch_size > 1 and not all(isinstance(part, CAUSAL) for part in rule.parts):
        words = "the mask of batch row 0 is used for every batch row"
        yield instead(words, lambda mask: mask.seen[:1].expand_as(mask.seen), "first_rows_mask_for_all")
        words = "each batch row has the mask of the next one"
        yield instead(words, lambda mask: mask.seen.roll(-1, 0), "mask_of_other_rows")
        words = "the masks of batch rows are given to heads: head h has that of a batch row other than its own"
        yield instead(words + " (repeat instead of repeat_interleave)", by_head, "mask_per_head")
    if any(isinstance(part, masks.Padding) for part in rule.parts) and square:

        def of_queries(mask: RowMask) -> Tensor:
            parts = (part for part in mask.rule.parts if part.hides)
            shown = (mask.seen_under(part) for part in parts if not isinstance(part, masks.Padding))
            padding = next(part for part in mask.rule.parts if isinstance(part, masks.Padding))
            lengths = torch.from_numpy(padding.table(*mask.sizes))[:, None, None, None]
            return functools.reduce(operator.and_, shown, mask.queries < lengths.to(mask.queries.device))

        yield instead("the padding is applied to the queries instead of the keys", of_queries, "padding_of_queries")


def trees(workload: Workload) -> Iterator[Mistake]:
    """What becomes of a tree of drafted tokens."""
    tree = next((part for part in workload.mask_rule.parts if isinstance(part, masks.Tree)), None)
    if tree is None:
        return

    def number(mask: RowMask) -> Tensor:
        """Of each key among the drafted tokens (S,), below 0 in the cache."""
        return mask.keys - (mask.sizes[2] - mask.sizes[1])

    def with_parent(mask: RowMask) -> Tensor:
        parent = torch.tensor(tree.parents(mask.sizes[1]), device=mask.rows.device)[mask.queries]
        return (number(mask) < 0) | (number(mask) == mask.queries) | ((number(mask) == parent) & (parent >= 0))

    words = "a drafted token sees the cache and itself, and none of its ancestors"
    yield instead(words, lambda mask: (number(mask) < 0) | (number(mask) == mask.queries), "tree_wrong")
    words = "a drafted token sees its ancestors, and nothing of the cache"
    yield instead(words, lambda mask: mask.seen & (number(mask) >= 0), "tree_wrong")
    yield instead("a drafted token sees its parent, and no ancestor before that", with_parent, "tree_wrong")


def wrong_masks(workload: Workload) -> Iterator[Mistake]:
    """Every wrong mask at a workload."""
    yield from neighbour_masks(workload)
    yield from changed_masks(workload)
    yield from trees(workload)
