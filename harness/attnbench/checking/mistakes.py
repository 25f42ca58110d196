"""The catalogue of known mistakes: the diagnosis names them, and `nox -s detection` counts how many the check finds.

A mistake is the textbook form with some steps replaced (checking/steps.py). Each function in KINDS yields the mistakes
of one kind that are possible at a workload. To add a mistake that has only one form (no parameter such as a size), add
a line to a table above `singles`. Shapes as in the contract; R chosen query rows.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial, reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from attnbench.case import QKV
from attnbench.checking import oracle, steps
from attnbench.checking.oracle import RowMask, product, row_mask
from attnbench.checking.page_mistakes import page_mistakes
from attnbench.checking.steps import Mistake, after, before, hide, softmax_with_sinks, with_bias, wrong
from attnbench.contract import Weights
from attnbench.workloads import masks
from attnbench.workloads.masks import Mask
from attnbench.workloads.workload import Workload, rotary_text

Seen = Callable[[RowMask], Tensor]
"""A function that returns the visible keys: boolean (B, 1, R, S), or any shape that broadcasts to (B, H, R, S)."""
WrongMask = tuple[str, str, Seen]  # the mistake's name, a detail, and a function that returns the visible keys
AT_END = "_bottom_right"
ALIGNED = ("bottom_right_for_top_left", "top_left_for_bottom_right")
CAUSAL: dict[type[Mask], str] = {
    masks.Causal: "aligned at the start (top-left)",
    masks.CausalBottomRight: "aligned at the end (bottom-right)",
}
DRAWN = (masks.Boolean, masks.Document, masks.PaddingToNothing)
"""Masks that are not tried as wrong masks, because no code uses them by mistake."""
ALIBI = (masks.Alibi, masks.AlibiBottomRight)
MASK_TILES = (16, 32, 64, 128)  # keys in a tile in which the mask is skipped
BY_FIRST_ROW = "tiles_skipped_by_first_row"
MOVES = (-1, 1, -2, 2, -3, 3)  # possible errors of an argument of a mask
MOST_ROWS = 256
"""Number of evenly spaced queries at which masks are compared (all queries if there are fewer), to find equal masks."""
OPERANDS = {"query": (0,), "key": (1,), "value": (2,), "keys and values": (1, 2), "query, key and value": (0, 1, 2)}
"""Groups of operands, as indices among the arguments of the step `heads`."""
OUTPUT = "output"
BETWEEN_ROWS = {"batch_for_positions", "heads_for_positions", "query_key_swapped", "softmax_over_queries"}
"""Mistakes of `singles` in which a query's answer depends on other queries: they need all query rows."""
BLOCKS = (16, 32, 64, 128, 256)
HEAD_BLOCKS = (2, 4, 8)
TILE_LENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # keys in a tile
MOST_TILES = 12
"""With more tiles of one length, only those at both ends and in the middle are tried."""
NUM_PARTS = (2, 3, 4, 8)  # numbers of parts into which the keys are split
FILLS = (-10.0, -100.0, -1e3, -1e4, -2e4, -4e4, -65504.0)
"""Scores that code may give hidden keys instead of minus infinity."""
WEAK = -1e3  # hidden keys with a higher fill get weight on normal inputs
FLOORS = (0.0, -10.0, -100.0, -1e3, -1e4, -65504.0)
"""Initial values of a running maximum instead of minus infinity."""
TINY = 1e-37  # added to the sum, which may be 0 because of the floor
TILE = "a tile"
CLAMPS = (10.0, 20.0, 50.0, 80.0)  # largest absolute scores after clamping
ROTARY_BASES = (10_000.0, 20_000.0, 100_000.0, 500_000.0, 1_000_000.0)
WIDE = {"float32", "float64"}
"""Dtypes whose tolerance shows a bias in bfloat16, a small extra term in a sum, or a hidden key's small weight."""


def seen_with(other: Mask, others: tuple[Mask, ...], mask: RowMask) -> Tensor:
    """Return whether each query of `mask` sees each key under `other` and all of `others`: boolean (B, 1, R, S)."""
    return reduce(and_, map(mask.seen_under, (other, *others)))


def arguments_nearby(numbers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield similar arguments: one doubled or halved, one or all off by up to 3, all equal, or in reverse order."""
    for place, number in enumerate(numbers):
        for other in sorted({number + move for move in MOVES} | {2 * number, number // 2}):
            yield (*numbers[:place], other, *numbers[place + 1 :])
    if len(numbers) > 1:
        for move in MOVES:
            yield tuple(number + move for number in numbers)
        yield from (numbers[::-1], (numbers[0],) * len(numbers), (max(numbers),) * len(numbers))


def neighbours(part: Mask, sizes: tuple[int, int, int]) -> Iterator[tuple[str, Mask]]:
    """Yield (mistake's name, mask) for masks that code may use in place of `part`; `sizes` are (B, T, S)."""
    kinds, name = masks.masks(), type(part).name
    numbers = tuple(part.table(*sizes).tolist()) if isinstance(part, masks.Padding) else part.arguments
    known = [("bottom_right_for_top_left", f"{name}{AT_END}", numbers)]
    if name.endswith(AT_END):
        known = [("top_left_for_bottom_right", name.removesuffix(AT_END), numbers)]
    known += (("mask_argument", name, near) for near in arguments_nearby(numbers))
    readings = [(), numbers, numbers[:1], numbers[:2][::-1]]  # how other libraries may read the numbers
    for n in numbers[:1]:
        readings += [(n, n), (n - 1, n - 1), (n, 0), (n - 1, 0), (n + 1,), (n // 2, n // 2)]
    for kind in (kind for kind in kinds.values() if kind.__module__ == masks.__name__):  # kinds that users can write
        if not (kind.changes_scores or issubclass(kind, DRAWN)):
            known += (("mask_of_other_kind", kind.name, reading) for reading in dict.fromkeys(readings))
    for confused, other, arguments in known:
        with contextlib.suppress(KeyError, ValueError):  # there is no such mask
            mask = kinds[other](*arguments)
            mask.check(*sizes)
            yield confused, mask


def neighbour_masks(workload: Workload) -> Iterator[WrongMask]:
    """Yield wrong masks in which one part of the mask is ignored, or replaced by a mask of `neighbours`."""
    parts = tuple(part for part in workload.mask_rule.parts if part.hides)
    for part in parts:
        others = tuple(other for other in parts if other is not part)
        if others:
            yield "mask_part_ignored", f"{part}", partial(seen_with, Mask(), others)
        for name, mask in neighbours(part, (workload.batch_size, workload.seq_len, workload.kv_len)):
            yield name, f"the mask is {mask}, where {part} was asked for", partial(seen_with, mask, others)


def by_head(mask: RowMask) -> Tensor:
    """Return a wrong mask (B, H, R, S): head h of batch row b gets the mask of batch row (b * H + h) mod B.

    Code does this if it repeats the masks to B * H rows with `repeat` instead of `repeat_interleave`.
    """
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
    "mask_of_queries": lambda mask: (
        mask.seen[..., -1, :][..., mask.rows, None].expand_as(mask.seen)
        if mask.sizes[1] == mask.sizes[2]
        else mask.seen
    ),
}
"""Mistakes by name that ignore or invert the whole mask, or apply it to other queries, keys, batch rows or heads."""


def changed_masks(workload: Workload) -> Iterator[WrongMask]:
    """Yield wrong masks: the whole mask changed, the mask or keys skipped in some tiles, or the last keys hidden."""
    rule = workload.mask_rule
    for name, seen in CHANGED.items() if rule.hides else ():
        is_padding = isinstance(rule, masks.Padding) and name == "mask_ignored"
        yield "padding_ignored" if is_padding else name, "", seen
    for tile, (words, skips) in itertools.product(MASK_TILES, SKIPPED.items()) if rule.hides else ():
        if tile < workload.kv_len:
            yield "mask_skipped_in_tiles", f"{words}, of {tile} keys", partial(also_seen, tile=tile, skips=skips)
    for tile in MASK_TILES if rule.hides and workload.batch_size > 1 else ():
        yield BY_FIRST_ROW, "", partial(seen_by_first_row, tile=tile)
    if workload.seq_len < workload.kv_len:
        first = lambda mask: mask.seen & (mask.keys < mask.sizes[1])  # noqa: E731
        yield "keys_cut", f"the first {workload.seq_len} of {workload.kv_len}", first


def also_seen(mask: RowMask, tile: int, skips: Callable[..., Tensor]) -> Tensor:
    """Return the visible keys, and all keys in tiles where `skips(key's tile, query's tile, number of tiles)` holds."""
    number = -(-mask.sizes[2] // tile)
    return mask.seen | skips(mask.keys // tile, mask.queries // tile, number)


def seen_by_first_row(mask: RowMask, tile: int) -> Tensor:
    """Return the visible keys without those in tiles in which no query of batch row 0 sees a key."""
    seen = mask.seen[:1].any(dim=-2, keepdim=True)  # (1,1,1,S)
    tiles = torch.stack([part.any(dim=-1) for part in seen.split(tile, dim=-1)], dim=-1)
    return mask.seen & tiles.repeat_interleave(tile, dim=-1)[..., : seen.shape[-1]]


SKIPPED: dict[str, Callable[..., Tensor]] = {
    "it is applied only to tiles on the diagonal": lambda key, query, _: key < query,
    "it is applied only to the first tile": lambda key, _, __: key > 0,
    "it is applied only to the last tile": lambda key, _, number: key < number - 1,
}
"""Functions by description: f(key's tile, query's tile, number of tiles) -> whether the mask is skipped in the tile."""


def joined_masks(workload: Workload) -> Iterator[WrongMask]:
    """Yield the mask combined with a causal mask of either alignment, if no part of the mask is causal."""
    rule = workload.mask_rule
    for kind, end in CAUSAL.items() if not any(isinstance(part, tuple(CAUSAL)) for part in rule.parts) else ():
        yield "causal_unasked", end * (workload.seq_len != workload.kv_len), partial(seen_with, kind(), (rule,))


def wrong_masks(workload: Workload) -> Iterator[Mistake]:
    """Yield every distinct wrong mask, as a mistake.

    With a single query, a mask aligned at the wrong end may hide nothing, like an ignored mask; both are yielded.
    """
    rows = torch.linspace(0, workload.seq_len - 1, min(MOST_ROWS, workload.seq_len)).long()
    right, shape = row_mask(workload, rows), (workload.batch_size, workload.num_heads, -1, -1)
    known = {right.seen.expand(shape).numpy().tobytes()}
    found = (*changed_masks(workload), *neighbour_masks(workload), *joined_masks(workload))
    every = sorted(found, key=lambda each: each[0] not in ALIGNED)
    for name, detail, seen in every:
        keys = seen(right)
        numbers = keys.expand(shape).numpy().tobytes()
        is_alike = name in ALIGNED and workload.seq_len == 1
        if is_alike or (keys.any() and numbers not in known):
            known |= set() if is_alike else {numbers}
            masked = lambda scores, mask, seen=seen: hide(mask.changed(scores), seen(mask))  # noqa: E731
            yield wrong(name, detail, needs_all_rows=name in {"mask_transposed", BY_FIRST_ROW}, masked_scores=masked)


def changed(operand: str, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return {name: step} for the step that applies `change` to a group of operands in OPERANDS, or to OUTPUT."""
    if operand == OUTPUT:
        return {"context": after("context", change)}
    return {"heads": before("heads", change, *OPERANDS[operand])}


def orders(number: int) -> Iterator[tuple[str, list[int]]]:
    """Yield (description, list of indices) for distinct wrong orders of `number` items."""
    things = list(range(number))
    known = {
        "in reverse": things[::-1],
        "one place early": things[1:] + things[:1],
        "one place late": things[-1:] + things[:-1],
        "those of the first alone": [0] * number,
    }
    for rows in (rows for rows in range(2, number) if number % rows == 0):
        words = f"grouped as ({number // rows}, {rows}) and read column by column"
        known[words] = torch.arange(number).view(-1, rows).T.flatten().tolist()
    seen = [things]
    for words, order in known.items():
        if order not in seen:
            seen.append(order)
            yield words, order


def reordered(workload: Workload) -> Iterator[Mistake]:
    """Yield mistakes that reorder one axis of operands or of the output, or mix up two axes."""
    of_query, of_key = workload.num_heads, workload.num_kv_heads
    for operand in (*list(OPERANDS)[:-1], OUTPUT):
        sizes = {"batch row": workload.batch_size}
        if operand not in {"query", OUTPUT}:
            sizes |= {"head": of_key, "position": workload.kv_len}
        elif operand == OUTPUT:  # reordering a query's other axes equals one of the other cases
            sizes |= {"head": of_query, "position": workload.seq_len}
        for dim, (axis, number) in enumerate(sizes.items()):
            for words, order in orders(number):
                if axis != "position" or not words.startswith("grouped"):
                    change = lambda x, at=(slice(None),) * dim + (order,): x[at]  # noqa: E731
                    is_across = operand == OUTPUT and axis == "position"
                    name = f"{operand.replace(' ', '_')}_{axis.removesuffix(' row')}_order"
                    detail = f"the {axis}s of the {operand} are {words}"
                    yield wrong(name, detail, needs_all_rows=is_across, **changed(operand, change))
    yield from other_blocks(workload)
    detail = "(B, G, K, S), for the product with queries, is made of (B, G, S, K) in the key"
    mixed = before("heads", lambda key: key.reshape(*key.shape[:2], key.shape[3], key.shape[2]).mT, 1)
    yield wrong("viewed_not_transposed", detail, heads=mixed)
    if min(of_query, workload.seq_len) == 1:
        return
    if min(of_query, workload.batch_size) > 1:
        blocks = lambda x: x.flatten(0, 1).unflatten(0, x.shape[1::-1]).transpose(0, 1)  # noqa: E731
        yield wrong("heads_merged_before_batch", **changed(OUTPUT, blocks))
    merged = changed(OUTPUT, lambda x: x.reshape(x.transpose(1, 2).shape).transpose(1, 2))
    yield wrong("merged_without_transpose", needs_all_rows=True, **merged)
    for operand in ("query, key and value", *QKV, OUTPUT):
        detail = f"(B, H, T, K) is made of (B, T, H, K), in the {operand}"
        view = changed(operand, lambda x: x.transpose(1, 2).reshape(x.shape))
        yield wrong("viewed_not_transposed", detail, needs_all_rows=True, **view)


def other_blocks(workload: Workload) -> Iterator[Mistake]:
    """Yield mistakes in which query heads read keys and values of the wrong head.

    In some of them, head h of batch row b, which has number n = b * H + h, reads the keys and values of number n % m,
    where m is a power of 2. In the others, groups of 2, 4 or 8 neighbouring query heads read the key/value head of
    their first member.
    """
    number = workload.batch_size * workload.num_heads
    for most in (power for power in BLOCKS if power < number):

        def read(query: Tensor, key: Tensor, value: Tensor, mask: RowMask, most: int = most) -> tuple[Tensor, ...]:
            operands = steps.heads(query, key, value, mask)
            places = torch.arange(number) % most
            again = [each.flatten(end_dim=1)[places].view_as(each) for each in operands[1:]]
            return operands[0], *again

        yield wrong("block_index_cut", f"block n reads the keys and values of block n % {most}", heads=read)
    heads, readers = torch.arange(workload.num_heads), workload.num_heads // workload.num_kv_heads
    for size in (size for size in HEAD_BLOCKS if readers > 1 and readers % size and size < workload.num_heads):
        group = heads // size * size // readers
        other = lambda query, key, value, _, group=group: (query, key[:, group], value[:, group])  # noqa: E731
        yield wrong("key_head_of_the_first", f"blocks of {size} heads", heads=other)


def interleaved(query: Tensor, key: Tensor, value: Tensor, _: RowMask) -> tuple[Tensor, ...]:
    """Repeat key and value so that query head h reads key/value head h % G, instead of h // (H / G)."""
    times = query.shape[1] // key.shape[1]
    return query, key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1)


def regrouped(
    regroup: Callable[[list[Tensor]], Iterable[Tensor]], kinds: tuple[str, ...] = ("", "_bias")
) -> Callable[..., tuple[Tensor, ...]]:
    """Return the step `projection` in which `regroup` changes the weights of query, key and value (H, K, D).

    `kinds` contains "" to regroup weights, and "_bias" to regroup biases (H, K).
    """

    def projected(x: Tensor, context: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        tensors = weights.filled().tensors()
        named = {
            f"{part}{kind}": tensors[f"{part}{kind}"] for part in QKV for kind in ("", "_bias")[: 1 + weights.has_bias]
        }
        for kind in kinds if weights.has_bias else ("",):
            names = [f"{part}{kind}" for part in QKV]
            named |= dict(zip(names, regroup([tensors[name] for name in names]), strict=True))
        return oracle.project(x, context, Weights(**named))

    return projected


def head_by_head(parts: list[Tensor]) -> Tensor:
    """Read packed weights (3, H, K, ...), all queries, then all keys, then all values, as if stored head by head."""
    packed = torch.stack(parts)
    return packed.reshape(packed.shape[1], 3, *packed.shape[2:]).transpose(0, 1)


def in_thirds(parts: list[Tensor]) -> Tensor:
    """Read packed weights stored head by head (H, 3, K, ...) as if all queries came first, then keys, then values."""
    packed = torch.stack(parts, dim=1)
    return packed.reshape(3, packed.shape[0], *packed.shape[2:])


def projections(workload: Workload) -> Iterator[Mistake]:
    """Yield mistakes that exchange the weights of the projections, or only their biases, in scope `module`."""
    groups, width, value = workload.num_kv_heads, workload.head_dim, workload.value_dim
    shapes = [(workload.num_heads, width), (groups, width), (groups, value)]
    for order in itertools.permutations(range(3)) if workload.scope == "module" else ():
        if sorted(order) != list(order) and [shapes[place] for place in order] == shapes:
            names = "{}, {} and {}".format(*(QKV[at] for at in order))
            change = regrouped(lambda parts, order=order: [parts[place] for place in order])  # type: ignore[misc]
            yield wrong("projections_in_wrong_order", f"the weights are those of {names}", projection=change)
            if {"q", "k", "v"} <= workload.biased:
                alone = regrouped(lambda parts, order=order: [parts[place] for place in order], kinds=("_bias",))  # type: ignore[misc]
                yield wrong("biases_in_wrong_order", f"they are those of {names}", projection=alone)
    for times, words in {0: "left out", 2: "added twice"}.items() if "out" in workload.biased else ():
        yield wrong("output_bias_count", f"it is {words}", output=partial(with_output_bias, times=times))


def with_output_bias(attended: Tensor, weights: Weights, times: int) -> Tensor:
    """Compute the step `output`, with the output bias added `times` times."""
    assert weights.out_bias is not None
    return oracle.output(attended, weights) + (times - 1) * weights.out_bias


def tiles_of(length: int) -> Iterator[tuple[str, range]]:
    """Yield (description, range of keys) for tiles of usual lengths and for the keys after the last whole tile."""
    lengths = [tile for tile in TILE_LENS if tile < length]
    for start in sorted({length // tile * tile for tile in lengths if length % tile}):
        yield "what lies past the last whole tile", range(start, length)
    for tile in lengths:
        number = length // tile
        some = sorted({0, 1, number // 2, number - 2, number - 1}) if number > MOST_TILES else range(number)
        for place in some:
            yield TILE, range(place * tile, (place + 1) * tile)


def counted(scores: Tensor, mask: RowMask, keys: range, times: int) -> Tensor:
    """Return masked scores (B, H, R, S), changed so that the softmax counts each key in `keys` `times` times."""
    among = (keys.start <= mask.keys) & (mask.keys < keys.stop)
    more = scores.new_full((), times).log()  # -inf for 0 times
    return hide(mask.changed(scores).where(~among, mask.changed(scores) + more), mask.seen)


def tiles(workload: Workload) -> Iterator[Mistake]:
    """Yield mistakes that leave out one tile of the keys, or count one tile or part of them twice."""
    for what, keys in tiles_of(workload.kv_len):
        where = f"the {len(keys)} keys {keys[0]} to {keys[-1]}" if len(keys) > 1 else f"key {keys[0]}"
        name = "tile_dropped" if what == TILE else "last_partial_tile_dropped"
        yield wrong(name, where, masked_scores=partial(counted, keys=keys, times=0))
        if what == TILE:
            yield wrong("tile_counted_twice", where, masked_scores=partial(counted, keys=keys, times=2))
    for number in (number for number in NUM_PARTS if workload.kv_len > number):
        sizes = [len(part) for part in torch.arange(workload.kv_len).tensor_split(number)]
        ends = list(itertools.accumulate(sizes))
        for part, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            words = f"part {part + 1} of {number}, the keys {end - size} to {end - 1}"
            yield wrong(
                "part_weighed_twice", words, masked_scores=partial(counted, keys=range(end - size, end), times=2)
            )


def partial_softmaxes(masked: Tensor, mask: RowMask, lengths: tuple[int, ...], merge: str) -> Tensor:
    """Return the weights (B, H, R, S) if each part of the keys has its own softmax, and the outputs are merged wrongly.

    The outputs are added up or, if `merge` is "averaged", divided by the number of parts in which the query sees a key.
    """
    whole = torch.cat([usual(part, mask) for part in masked.split(lengths, dim=-1)], dim=-1)
    return whole if merge == "added up" else whole / whole.sum(dim=-1, keepdim=True).clamp(min=1)


def online(masked: Tensor, mask: RowMask, tile: int, forgotten: str) -> Tensor:
    """Compute an online softmax that does not rescale the sum, the output or both when the maximum grows.

    `forgotten` is "sum", "output" or, for both, "maximum".
    """
    maximum, powers = torch.full_like(masked[..., :1], torch.finfo(masked.dtype).min), []
    for scores in masked.split(tile, dim=-1):
        maximum = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
        powers.append((scores - maximum).exp())
    stale, right = torch.cat(powers, dim=-1), (masked - maximum).exp()
    total = (right if forgotten == "output" else stale).sum(dim=-1, keepdim=True)
    return (right if forgotten == "sum" else stale) / total.clamp(min=torch.finfo(masked.dtype).tiny)


def by_first_tile(masked: Tensor, _: RowMask, tile: int) -> Tensor:
    """Compute a softmax that subtracts the maximum of the first tile from all scores."""
    powers = (masked - masked[..., :tile].amax(dim=-1, keepdim=True)).exp()
    return powers / powers.sum(dim=-1, keepdim=True)


def merges(workload: Workload) -> Iterator[Mistake]:
    """Yield mistakes that merge softmaxes over tiles or parts of the keys wrongly."""
    if workload.sinks != "none":
        return
    tile_lens, keys = [tile for tile in TILE_LENS if tile < workload.kv_len], torch.arange(workload.kv_len)
    splits = {tuple(map(len, keys.split(tile))): f"tiles of {tile} keys" for tile in tile_lens}
    for number in (number for number in NUM_PARTS if number < len(keys)):
        splits[tuple(map(len, keys.tensor_split(number)))] = f"{number} parts of the keys"
    for (lengths, where), merge in itertools.product(splits.items(), ("added up", "averaged")):
        change = partial(partial_softmaxes, lengths=lengths, merge=merge)
        yield wrong("partial_softmaxes_merged", f"{where} are {merge}", weights=change)
    for tile in tile_lens:
        yield wrong("first_maximum_kept", f"tiles of {tile} keys", weights=partial(by_first_tile, tile=tile))
    for tile, name in itertools.product(tile_lens, ("maximum", "output", "sum")):
        change = partial(online, tile=tile, forgotten=name)
        yield wrong(f"{name}_not_rescaled", f"tiles of {tile} keys", weights=change)


def scales(workload: Workload) -> Iterator[Mistake]:
    """Yield mistakes that scale the scores by a wrong factor."""
    right, width, root = workload.score_scale, workload.head_dim, math.sqrt(workload.head_dim)
    factors = [
        ("no_scale", 1.0),
        ("scale_ignored", 1 / root),
        ("scaled_by_width", 1 / width),
        ("scaled_twice", right**2),
        ("multiplied_by_root", 1 / right),
        ("scaled_by_embedding", (workload.num_heads * width) ** -0.5),
        ("scaled_by_value_width", workload.value_dim**-0.5),
        ("scale_and_root", right / root),
        ("scaled_by_fourth_root", width**-0.25),
        *(("scaled_by_other_width", other**-0.5) for other in (32, 64, 128)),
        ("scaled_by_whole_root", 1 / math.isqrt(width)),
        ("scaled_by_length", workload.seq_len**-0.5),
        ("scaled_by_key_length", workload.kv_len**-0.5),
    ]
    known = [right]
    for name, scale in factors:
        if not any(math.isclose(scale, other) for other in known):
            known.append(scale)
            detail = f"they are {scale / right:.3g} times what they should be"
            if name == "scaled_by_other_width":
                detail = f"for heads {scale**-2:.0f} wide, and they are {width} wide"
            yield wrong(name, detail, scores=after("scores", partial(torch.mul, other=scale / right)))


def cut(query: Tensor, key: Tensor, mask: RowMask, width: int, scaled: int) -> Tensor:
    """Compute the scores from only the first `width` columns, with the scale of heads `scaled` columns wide."""
    return product(query[..., :width], key[..., :width].mT) * mask.scale_for(scaled)


def emptied(context: Tensor, width: int) -> Tensor:
    """Return the context (B, H, R, V) with 0 in all columns after the first `width`."""
    return context * (torch.arange(context.shape[-1]) < width)


def turned(query: Tensor, key: Tensor, mask: RowMask, workload: Workload, turn: Callable[..., Tensor]) -> Tensor:
    """Compute the scores with the rotation `turn(heads, positions)` of query and key instead of the workload's."""
    query, key, _ = oracle.in_place(workload, mask.rows, (query, key, key), -1)
    return steps.scores(turn(query, mask.rows), turn(key, mask.keys), mask)


def widths(workload: Workload) -> Iterator[Mistake]:
    """Yield mistakes that use only the first columns of queries and keys, or a wrong or no rotary embedding."""
    width = workload.head_dim
    for first in sorted({2**power for power in range(9)} | {width - 1, workload.value_dim}):
        for scaled, more in {width: "", first: ", scaled for that width"}.items():
            if 0 < first < width and (scaled == width or not workload.scale):
                change = partial(cut, width=first, scaled=scaled)
                yield wrong("width_cut", f"the first {first} of {width}{more}", scores=change)
                if first < workload.value_dim:
                    values = after("context", partial(emptied, width=first))
                    yield wrong("columns_cut", f"the first {first} of {width}{more}", scores=change, context=values)
    for base, style in itertools.product(ROTARY_BASES, ("halves", "interleaved") if width % 2 == 0 else ()):
        turn = partial(oracle.rotated, base=base, is_interleaved=style == "interleaved")
        change = partial(turned, workload=workload, turn=turn)
        if (text := rotary_text(style, base)) == workload.rotary:
            continue
        name = "rotary_inside" if workload.rotary == "none" else "rotary_other"
        mistake = wrong(name, f"a rotary embedding ({style}), base {base:.0f}", scores=change)
        yield replace(mistake, declare=f'adapt(..., rotary="{text}")')
    if workload.rotary != "none":
        own = partial(oracle.rotated, base=workload.rotary_base, is_interleaved=workload.rotary.startswith("inter"))
        yield wrong("rotary_missing", scores=partial(turned, workload=workload, turn=lambda heads, _: heads))
        for words, otherwise in other_turns(workload):
            yield wrong("rotary_angles", words, scores=partial(turned, workload=workload, turn=otherwise))
        for words, place in POSITIONS.items():
            at_others = lambda heads, places, place=place: own(heads, place(places))  # noqa: E731
            yield wrong("rotary_positions", words, scores=partial(turned, workload=workload, turn=at_others))


def other_turns(workload: Workload) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Yield (description, wrong rotation): angles for another width or in half precision, or pairs updated in place."""
    width, base, is_interleaved = workload.head_dim, workload.rotary_base, workload.rotary.startswith("inter")
    powers = torch.arange(width // 2, dtype=torch.float64) / (width // 2)
    right = base**-powers

    def turn(heads: Tensor, places: Tensor, frequencies: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        angles = (places.to(dtype)[:, None] * frequencies.to(dtype)).double()
        return oracle.by_angles(heads, angles, is_interleaved=is_interleaved)

    def in_place(heads: Tensor, places: Tensor) -> Tensor:
        cos, sin = (each.to(heads) for each in ((places[:, None] * right).cos(), (places[:, None] * right).sin()))
        one, other = (heads[..., 0::2], heads[..., 1::2]) if is_interleaved else heads.chunk(2, dim=-1)
        pairs = (first := one * cos - other * sin), other * cos + first * sin
        return torch.stack(pairs, dim=-1).flatten(-2) if is_interleaved else torch.cat(pairs, dim=-1)

    if (whole := workload.num_heads * width) != width:
        words = f"the frequencies are those of all {whole} columns, not of a head's {width}"
        yield words, partial(turn, frequencies=base ** (-powers * width / whole))
    for dtype in (torch.bfloat16, torch.float16):
        name, frequencies = str(dtype).removeprefix("torch."), right.to(dtype).double()
        yield f"the frequencies are rounded to {name}", partial(turn, frequencies=frequencies)
        yield f"they are computed in {name}", partial(turn, frequencies=frequencies, dtype=dtype)
    yield "the second half of a pair is computed from the first when that is rotated already", in_place


POSITIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "they run backwards": lambda at: -at,
    "a table ends at 512": lambda at: at.clamp(max=511),
    "a table ends at 1024": lambda at: at.clamp(max=1023),
    "they begin again at 512": lambda at: at % 512,
    "they begin again at 1024": lambda at: at % 1024,
}
"""Wrong positions of a rotary embedding, by description. Shifting all positions is no mistake: it changes no score."""


def unusual(
    masked: Tensor, _: RowMask, *, floor: float | None = None, most: float = math.inf, more: float = 0.0
) -> Tensor:
    """Compute a softmax of scores clamped to [-most, most], with `more` added to the sum of exponentials.

    The softmax subtracts the row's maximum, or `floor` if this is larger; if `floor` is None, it subtracts nothing.
    """
    top = 0.0 if floor is None else masked.amax(dim=-1, keepdim=True).clamp(min=floor)
    powers = (masked.clamp(-most, most) - top).exp().where(masked > -math.inf, 0.0)
    return powers / (powers.sum(dim=-1, keepdim=True) + more)


def softmaxes(workload: Workload) -> Iterator[Mistake]:
    """Yield mistakes in a softmax: no maximum, a maximum with a floor, clamped scores, or an extra term in the sum."""
    eps = (1e-4, 1e-3, 1e-2) if workload.dtype in WIDE else ()
    forms: list[tuple[str, str, dict[str, Any]]] = [
        ("no_maximum", "large scores overflow", {}),
        ("no_maximum", "a tiny number is added to the sum", {"more": 1e-30}),
        ("no_maximum", "1e-6 is added to the sum", {"more": 1e-6}),
        *(("no_maximum", f"scores are clamped, to {most:g} say", {"most": most}) for most in CLAMPS),
        *(("eps_in_the_sum", f"{more:g}", {"floor": -math.inf, "more": more}) for more in eps),
        *(("floor_of_the_maximum", f"{floor:g}", {"floor": floor, "more": TINY}) for floor in FLOORS),
    ]
    for name, detail, change in forms if workload.sinks == "none" else ():
        yield wrong(name, detail, weights=partial(unusual, **change))


def fills(workload: Workload) -> Iterator[Mistake]:
    """Yield mistakes that replace the scores of hidden keys by a finite number, or add such a number to them."""
    if not workload.mask_rule.hides:
        return
    nothing: Callable[..., Tensor] = lambda x, m: softmax_with_sinks(x, m.sinks) * m.seen.any(dim=-1, keepdim=True)  # noqa: E731
    for fill in FILLS:
        name = "mask_too_weak" if fill > WEAK else "finite_fill"
        about = f"about {fill:g}" if fill > WEAK else f"{fill:g} or lower"  # of fills that fit, the weakest is named
        filled = lambda x, m, fill=fill: m.changed(x).where(m.seen, fill)  # noqa: E731
        yield wrong(name, about, masked_scores=filled, weights=nothing)
        added = lambda x, m, fill=fill: m.changed(x) + (~m.seen * fill).to(x.dtype)  # noqa: E731
        if workload.dtype in WIDE:
            yield wrong(name, f"{fill:g} is added to theirs", masked_scores=added, weights=nothing)


def biases(workload: Workload) -> Iterator[Mistake]:
    """Yield mistakes with biases: omitted, from wrong heads, of opposite sign, with wrong ALiBi slopes, or rounded."""
    parts = [part for part in workload.mask_rule.changes if part.is_additive]
    for part in parts:
        without = with_bias(lambda bias, each, part=part: bias * (type(each) is not type(part)))  # type: ignore[misc]
        yield wrong("bias_ignored", f"{part}" * (len(parts) > 1), masked_scores=without)
    for words, order in orders(workload.num_heads) if parts else ():
        other = with_bias(lambda bias, _, order=order: bias[:, order])  # type: ignore[misc]
        yield wrong("bias_head_order", f"the heads of the bias are {words}", masked_scores=other)
    if parts:
        yield wrong("bias_sign_flipped", masked_scores=with_bias(lambda bias, _: -bias))
    for part in (part for part in parts if isinstance(part, ALIBI)):
        right = torch.from_numpy(part.per_head(workload.num_heads))[:, None, None]
        for words, slopes in slopes_of(workload.num_heads):
            if not torch.equal(slopes, right):
                other = with_bias(lambda bias, each, by=slopes / right: bias * by if isinstance(each, ALIBI) else bias)  # type: ignore[misc]
                yield wrong("alibi_slopes", words, masked_scores=other)
    if parts and workload.dtype in WIDE:
        yield wrong("bfloat16_bias", masked_scores=with_bias(lambda bias, _: bias.bfloat16()))


def slopes_of(num_heads: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (description, ALiBi slopes (H, 1, 1)) of other formulas; some slopes may equal the right slopes."""
    place = torch.arange(1, num_heads + 1, dtype=torch.float64)[:, None, None]
    for words, number in {
        f"they are 2^(-8 h / {num_heads}), as if {num_heads} were a power of 2": num_heads,
        "they are the first of the next power of 2": 2 ** math.ceil(math.log2(num_heads)),
        "they go on from the power of 2 below": 2 ** int(math.log2(num_heads)),
    }.items():
        yield words, torch.exp2(-masks.STEEPEST * place / number)
    yield "they begin at head 0 with 1", torch.exp2(-masks.STEEPEST * (place - 1) / num_heads)


def unshifted(masked: Tensor, mask: RowMask, *, is_in_maximum: bool) -> Tensor:
    """Compute the weights if the maximum is subtracted from the scores, but not from the sink.

    The maximum is that of the scores or, if `is_in_maximum`, of scores and sink.
    """
    assert mask.sinks is not None
    sinks = mask.sinks.to(masked.dtype)
    top = masked.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(masked.dtype).min)
    top = torch.maximum(top, sinks) if is_in_maximum else top
    powers = (masked - top).exp()
    return powers / (powers.sum(dim=-1, keepdim=True) + sinks.exp())


def sinks(workload: Workload) -> Iterator[Mistake]:
    """Yield mistakes with sinks: from wrong heads, without subtracting the maximum, or counted more than once."""
    if workload.sinks == "none":
        return
    for words, order in orders(workload.num_heads):
        other = lambda x, mask, order=order: softmax_with_sinks(x, mask.sinks[order])  # noqa: E731
        yield wrong("sink_head_order", f"the heads of the sinks are {words}", weights=other)
    for words, is_in_maximum in {"": False, "which is that of scores and sink": True}.items():
        yield wrong("sink_not_shifted", words, weights=partial(unshifted, is_in_maximum=is_in_maximum))
    for times in (2, 3, 4):
        more = lambda x, mask, times=times: softmax_with_sinks(x, mask.sinks + math.log(times))  # noqa: E731
        yield wrong("sinks_counted_again", f"{times} times", weights=more)


def uncapped(scores: Tensor, mask: RowMask) -> Tensor:
    """Return the masked scores without the softcap."""
    return hide(reduce(mask.change, (part for part in mask.rule.changes if part.is_additive), scores), mask.seen)


def usual(masked: Tensor, _: RowMask, dim: int = -1) -> Tensor:
    """Compute the softmax over the keys, or over axis `dim`; it is 0 where all scores along the axis are -inf."""
    return masked.softmax(dim=dim).nan_to_num(0.0)


Table = dict[str, dict[str, Any]]
"""Mistakes that have only one form: the replaced steps, by name. `attnbench explain` describes each name."""
OF_HEADS: Table = {
    "heads_for_positions": {  # attention among the heads of one position
        "heads": after("heads", lambda operands: tuple(each.transpose(1, 2) for each in operands)),
        "masked_scores": lambda x, _: x,  # (B,T,H,H)
        "weights": lambda x, _: x.softmax(dim=-1),
        "context": after("context", lambda x: x.transpose(1, 2)),
    },
    "batch_for_positions": {  # attention among the batch rows at one position
        "heads": after("heads", lambda operands: tuple(each.transpose(0, 2) for each in operands)),
        "masked_scores": lambda x, _: x,  # (T,H,B,B)
        "weights": lambda x, _: x.softmax(dim=-1),
        "context": after("context", lambda x: x.transpose(0, 2)),
    },
    "query_key_swapped": {"scores": lambda query, key, mask: steps.scores(key, query, mask)},
}
PROJECTED: Table = {
    "no_input_biases": {"projection": before("projection", lambda weights: weights.biased("out"), 2)},
    "no_query_bias": {"projection": before("projection", lambda weights: weights.biased({"k", "v", "out"}), 2)},
    "no_value_bias": {"projection": before("projection", lambda weights: weights.biased({"q", "k", "out"}), 2)},
    "merged_feature_by_feature": {"output": before("output", lambda x: x.transpose(1, 3), 0)},  # (B,V,R,H)
    "no_output_bias": {"output": before("output", partial(replace, out_bias=None), 1)},
}
PACKED: Table = {
    "packed_read_head_by_head": {"projection": regrouped(head_by_head)},
    "packed_read_in_thirds": {"projection": regrouped(in_thirds)},
}
SQUARE_OUTPUT: Table = {
    "no_output_projection": {"output": before("output", partial(replace, out=None), 1)},
    "output_projection_transposed": {
        "output": before("output", lambda weights: replace(weights, out=weights.out.T), 1)
    },
}
SOFTMAXES: Table = {
    "softmax_over_queries": {"weights": partial(usual, dim=-2)},
    "softmax_over_heads": {"weights": partial(usual, dim=1)},
    "softmax_over_batch": {"weights": partial(usual, dim=0)},
    "no_softmax": {"weights": lambda x, _: x.where(x.isfinite(), 0)},
    "not_normalised": {"weights": lambda x, _: (x - x.amax(dim=-1, keepdim=True)).exp().nan_to_num(0.0)},
    "one_more_in_the_sum": {"weights": lambda x, _: softmax_with_sinks(x, x.new_zeros(1, 1, 1))},
    "sigmoid_for_softmax": {"weights": lambda x, _: torch.sigmoid(x)},
    "softmax_twice": {"weights": lambda x, mask: usual(hide(usual(x, mask), x > -math.inf), mask)},
    "softmax_of_base_2": {"weights": lambda x, mask: usual(x * math.log(2), mask)},
    "query_and_key_ignored": {"weights": lambda x, mask: usual(x.masked_fill(x.isfinite(), 0.0), mask)},
}
OF_MASK: Table = {
    "mask_added_as_number": {"masked_scores": lambda x, mask: mask.changed(x) + mask.seen.to(x.dtype)},
    "mask_multiplied": {"masked_scores": lambda x, mask: mask.changed(x) * mask.seen.to(x.dtype)},
    "mask_after_softmax": {
        "masked_scores": lambda x, mask: mask.changed(x),
        "weights": lambda x, mask: x.softmax(dim=-1).where(mask.seen, 0.0),
    },
}
OF_SOFTCAP: Table = {
    "softcap_ignored": {"masked_scores": uncapped},
    "softcap_after_mask": {"masked_scores": lambda x, mask: mask.changed(hide(x, mask.seen))},
}


def singles(workload: Workload) -> Iterator[Mistake]:
    """Yield the known mistakes that have only one form (no parameter such as a size) and can occur at a workload."""
    rule, heads, groups = workload.mask_rule, workload.num_heads, workload.num_kv_heads
    is_module = workload.scope == "module"
    is_packed = (heads, workload.head_dim) == (groups, workload.value_dim)
    tables: list[tuple[Table, bool]] = [
        (OF_HEADS, min(heads, workload.seq_len) > 1 and workload.seq_len == workload.kv_len),
        ({"kv_heads_interleaved": {"heads": interleaved}}, min(heads // groups, groups) > 1),
        (PROJECTED, is_module),
        (PACKED, is_module and is_packed),
        (SQUARE_OUTPUT, is_module and heads * workload.value_dim == workload.embed_dim),
        (SOFTMAXES, workload.sinks == "none"),
        (OF_MASK, rule.hides),
        (OF_SOFTCAP, not rule.is_additive),
        ({"sinks_ignored": {"weights": usual}}, workload.sinks != "none"),
    ]
    for table, is_possible in tables:
        for name, changes in table.items() if is_possible else ():
            yield wrong(name, needs_all_rows=name in BETWEEN_ROWS, **changes)


KINDS = (
    *(wrong_masks, reordered, singles, projections, tiles, merges, scales, widths, softmaxes, fills, biases, sinks),
    page_mistakes,
)


def catalogue(workload: Workload) -> Iterator[Mistake]:
    """Yield every mistake that is possible at this workload, except those of the backward pass alone."""
    for generator in KINDS:
        yield from generator(workload)


def where_nothing_is_seen(kind: str, fill: Callable[[Tensor], Tensor]) -> Mistake:
    """Create the textbook form in which queries that see no key get the scores `fill(scores)`, instead of -inf."""

    def filled(scores: Tensor, mask: RowMask) -> Tensor:
        changed = mask.changed(scores)
        return hide(changed, mask.seen).where(mask.seen.any(dim=-1, keepdim=True), fill(changed))

    return wrong(f"{kind}_where_nothing_is_seen", masked_scores=filled, weights=lambda x, _: x.softmax(dim=-1))


NAN = where_nothing_is_seen("nan", lambda scores: scores - math.inf)  # not a constant, so that gradients are NaN too
FINITE = {
    "mean": where_nothing_is_seen("mean", torch.zeros_like),
    "all": where_nothing_is_seen("all", lambda scores: scores),
}
"""The textbook forms that give queries without visible keys a finite answer, by their names in CONVENTIONS."""
