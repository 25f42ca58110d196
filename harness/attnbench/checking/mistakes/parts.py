"""Factors on outputs and gradients, and tiles: left out, counted twice, merged wrongly; widths that are cut off.

What holds from a query row on, or in some heads alone, needs no mistake of its own: the diagnosis compares a mistake
with the rows that are wrong.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake, hide, product, wrong
from attnbench.workloads.workload import Workload

TILE_LENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_TILES = 12
"""More tiles of one length are tried at both ends and in the middle alone."""


def with_gradient_times(tensor: Tensor, factor: float, first: int = 0) -> Tensor:
    """The same values (..., R, n), with the gradient of the rows from `first` on multiplied."""
    late = torch.arange(tensor.shape[-2], device=tensor.device)[:, None] >= first
    return tensor + (factor - 1) * late * (tensor - tensor.detach())


def factors(workload: Workload) -> Iterator[Mistake]:
    """The output, or a gradient, times a number, in all rows or from one on; the diagnosis measures the number."""
    root = math.sqrt(workload.head_dim)
    numbers = {"0": 0.0, "0.5": 0.5, "2": 2.0, "1/H": 1 / workload.num_heads, "sqrt(K)": root, "1/sqrt(K)": 1 / root}
    for first in (0, workload.seq_len // 2):
        for words, factor in numbers.items():
            if factor == 1 or (first and workload.seq_len == 1):
                continue
            where, kind = f" from row {first} on" if first else "", "factor" if factor else "zero"

            def context(weights: Tensor, value: Tensor, mask: RowMask, factor: float, first: int) -> Tensor:
                return steps.context(weights, value, mask) * torch.where(mask.queries >= first, factor, 1.0).to(value)

            change = partial(context, factor=factor, first=first)
            yield wrong(f"output_{kind}", f"the output is {words} times what it should be{where}", "is_factor", context=change)
            for operand in ("query", "key", "value") if not first or workload.scope == "attention" else ():

                def heads(
                    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, operand: str, factor: float, first: int
                ) -> tuple[Tensor, Tensor]:
                    named = {"key": key, "value": value}
                    if operand != "query":
                        named[operand] = with_gradient_times(named[operand], factor, first)
                    return steps.heads(query, named["key"], named["value"], mask)

                def scores(query: Tensor, key: Tensor, mask: RowMask, factor: float, first: int) -> Tensor:
                    return steps.scores(with_gradient_times(query, factor, first), key, mask)

                words_of = f"the gradient of the {operand} is {words} times what it should be{where}"
                name, flags = f"{operand}_gradient_{kind}", "is_factor is_gradient"
                if operand == "query":
                    yield wrong(name, words_of, f"{flags} needs_all_rows", scores=partial(scores, factor=factor, first=first))
                else:
                    bound = partial(heads, operand=operand, factor=factor, first=first)
                    yield wrong(name, words_of, flags, heads=bound)


def named(keys: range) -> str:
    """As in "key 7" or "the 16 keys 0 to 15"."""
    return f"key {keys[0]}" if len(keys) == 1 else f"the {len(keys)} keys {keys[0]} to {keys[-1]}"


def whole_tiles(length: int) -> Iterator[range]:
    """Every whole tile of a usual length; of many, those at both ends and in the middle."""
    for tile in TILE_LENS:
        number = length // tile
        chosen: Iterable[int] = range(number)
        if number > MOST_TILES:
            chosen = sorted({0, 1, number // 2, number - 2, number - 1})
        if tile < length:
            yield from (range(start * tile, (start + 1) * tile) for start in chosen)


def among(keys: range, mask: RowMask) -> Tensor:
    """Which of the mask's keys (S,) are of a tile."""
    return (keys.start <= mask.keys) & (mask.keys < keys.stop)


def without(scores: Tensor, mask: RowMask, keys: range) -> Tensor:
    """The masked scores with those keys hidden."""
    return hide(mask.changed(scores), mask.seen & ~among(keys, mask))


def twice(scores: Tensor, mask: RowMask, keys: range) -> Tensor:
    """The masked scores with those keys counted twice."""
    return hide(mask.changed(scores) + math.log(2) * among(keys, mask).to(scores.dtype), mask.seen)


def values_unwritten(weights: Tensor, value: Tensor, mask: RowMask, keys: range) -> Tensor:
    """The values of a tile are 0."""
    return steps.context(weights, value.masked_fill(among(keys, mask)[:, None], 0.0), mask)


def tiles(workload: Workload) -> Iterator[Mistake]:
    """A tile of keys left out, counted twice, or without values."""
    length = workload.kv_len
    starts = sorted({length // tile * tile for tile in TILE_LENS if tile < length and length % tile})
    for keys in (range(start, length) for start in starts):
        words = f"what lies past the last whole tile is left out: {named(keys)}"
        yield wrong("last_partial_tile_dropped", words, masked_scores=partial(without, keys=keys))
    for keys in whole_tiles(length):
        yield wrong("tile_dropped", f"a tile is left out: {named(keys)}", masked_scores=partial(without, keys=keys))
        words = f"a tile is counted twice: {named(keys)}"
        yield wrong("tile_counted_twice", words, masked_scores=partial(twice, keys=keys))
        words = f"the values of a tile are 0: {named(keys)}"
        yield wrong("tile_without_values", words, context=partial(values_unwritten, keys=keys))


def partial_softmaxes(masked: Tensor, mask: RowMask, lengths: list[int], merge: str) -> Tensor:
    """Each part's own softmax (B, H, R, S) side by side, added up or averaged over the parts that see a key."""
    parts = [part.softmax(dim=-1).nan_to_num(0.0) for part in masked.split(lengths, dim=-1)]
    whole = torch.cat(parts, dim=-1)
    return whole if merge == "added up" else whole / whole.sum(dim=-1, keepdim=True).clamp(min=1)


def running_maximum(masked: Tensor, tile: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The scores of each tile (B, H, R, s), and the largest score up to its end (B, H, R, 1)."""
    maximum = torch.full_like(masked[..., :1], torch.finfo(masked.dtype).min)
    for scores in masked.split(tile, dim=-1):
        maximum = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
        yield scores, maximum


def maximum_not_rescaled(masked: Tensor, mask: RowMask, tile: int) -> Tensor:
    """Neither sum nor output is rescaled where the running maximum grows."""
    powers = torch.cat([(scores - maximum).exp() for scores, maximum in running_maximum(masked, tile)], dim=-1)
    return powers / powers.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(powers.dtype).tiny)


def output_not_rescaled(masked: Tensor, mask: RowMask, tile: int) -> Tensor:
    """The output is not rescaled where the running maximum grows."""
    every = list(running_maximum(masked, tile))
    powers = torch.cat([(scores - maximum).exp() for scores, maximum in every], dim=-1)
    return powers * (every[-1][1] - masked.logsumexp(dim=-1, keepdim=True)).exp().nan_to_num(0.0)


def sum_not_rescaled(masked: Tensor, mask: RowMask, tile: int) -> Tensor:
    """The sum is not rescaled where the running maximum grows."""
    total = torch.zeros_like(masked[..., :1])
    for scores, maximum in running_maximum(masked, tile):
        total = total + (scores - maximum).exp().sum(dim=-1, keepdim=True)
    return (masked - maximum).exp() / total.clamp(min=torch.finfo(masked.dtype).tiny)


def online_softmaxes(workload: Workload) -> Iterator[Mistake]:
    """Softmaxes over tiles or halves that are joined wrongly."""
    length = workload.kv_len
    ways: dict[str, Callable[..., Tensor]] = {
        "what it has": maximum_not_rescaled,
        "its output": output_not_rescaled,
        "its sum": sum_not_rescaled,
    }
    for tile in (tile for tile in TILE_LENS if tile < length and (tile >= 16 or length <= 32)):  # noqa: PLR2004
        for what, change in ways.items():
            words = f"an online softmax over tiles of {tile} keys does not rescale {what} when the maximum grows"
            yield wrong(change.__name__, words, weights=partial(change, tile=tile))
    splits = {f"over tiles of {tile} keys": [tile] * (length // tile) + [length % tile] * (length % tile > 0)
              for tile in TILE_LENS if tile < length and (tile > 4 or length <= 32)}  # noqa: PLR2004
    for number in (2, 3, 4, 8):
        if number < length:
            splits[f"of {number} parts of the keys"] = [len(part) for part in torch.arange(length).chunk(number)]
            splits[f"of {number} parts"] = [len(part) for part in torch.arange(length).tensor_split(number)]
    distinct = {tuple(lengths): words for words, lengths in reversed(splits.items())}
    for lengths, where in distinct.items():
        for merge in ("added up", "averaged"):
            words = f"partial softmaxes {where} are {merge}, without the weights that their logsumexps give them"
            change = partial(partial_softmaxes, lengths=list(lengths), merge=merge)
            yield wrong("partial_softmaxes_merged", words, weights=change)


def cut_widths(workload: Workload) -> Iterator[Mistake]:
    """Only the first numbers of query and key count, or of the values."""
    widths = {2**power for power in range(9)} | {workload.head_dim - 1, workload.value_dim}
    for width in sorted(each for each in widths if 0 < each < workload.head_dim):
        for own_scale in (False, True) if workload.scale == 0 else (False,):

            def scores(query: Tensor, key: Tensor, mask: RowMask, width: int, own_scale: bool) -> Tensor:  # noqa: FBT001
                scale = mask.scale_for(width if own_scale else query.shape[-1])
                return product(query[..., :width], key[..., :width].transpose(-2, -1)) * scale

            words = f"only the first {width} of {workload.head_dim} numbers of query and key count"
            words += f", scaled for {width}" if own_scale else ""
            change = partial(scores, width=width, own_scale=own_scale)
            yield wrong("width_cut", words, scores=change)


def wrong_parts(workload: Workload) -> Iterator[Mistake]:
    """Every factor, and every tile or width that goes wrong."""
    yield from factors(workload)
    yield from tiles(workload)
    yield from online_softmaxes(workload)
    yield from cut_widths(workload)
