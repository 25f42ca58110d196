"""Tiles of keys that are lost, counted twice or merged wrongly; truncated widths."""

import itertools
import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake, hide, product, wrong
from attnbench.workloads.workload import Workload

TILE_LENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_TILES = 12
"""With more tiles of one length, only those at both ends and in the middle are tried."""
FORGOTTEN = {"maximum": "sum and output", "output": "output", "sum": "sum"}
NUM_PARTS = (2, 3, 4, 8)
SHORT, LEAST_USUAL = 32, 16
"""Up to a length of SHORT, tiles shorter than LEAST_USUAL are tried too."""


def tiles_of(length: int) -> Iterator[tuple[str, range]]:
    """The rest after the last whole tile of each usual length, and whole tiles, each with its description."""
    lengths = [tile for tile in TILE_LENS if tile < length]
    for start in sorted({length // tile * tile for tile in lengths if length % tile}):
        yield "what lies past the last whole tile", range(start, length)
    for tile in lengths:
        number = length // tile
        some = sorted({0, 1, number // 2, number - 2, number - 1}) if number > MOST_TILES else range(number)
        for place in some:
            yield "a tile", range(place * tile, (place + 1) * tile)


def without(scores: Tensor, mask: RowMask, keys: range) -> Tensor:
    """The masked scores with `keys` hidden."""
    return hide(mask.changed(scores), mask.seen & ((mask.keys < keys.start) | (mask.keys >= keys.stop)))


def twice(scores: Tensor, mask: RowMask, keys: range) -> Tensor:
    """The masked scores with `keys` counted twice."""
    among = (keys.start <= mask.keys) & (mask.keys < keys.stop)
    return hide(mask.changed(scores) + math.log(2) * among.to(scores.dtype), mask.seen)


def tiles(workload: Workload) -> Iterator[Mistake]:
    """A tile of keys that is left out or counted twice."""
    for what, keys in tiles_of(workload.kv_len):
        where = f"the {len(keys)} keys {keys[0]} to {keys[-1]}" if len(keys) > 1 else f"key {keys[0]}"
        name = "tile_dropped" if what == "a tile" else "last_partial_tile_dropped"
        yield wrong(name, f"{what} is left out: {where}", masked_scores=partial(without, keys=keys))
        if what == "a tile":
            words = f"a tile is counted twice: {where}"
            yield wrong("tile_counted_twice", words, masked_scores=partial(twice, keys=keys))


def partial_softmaxes(masked: Tensor, mask: RowMask, lengths: tuple[int, ...], merge: str) -> Tensor:
    """The separate softmaxes of parts (B, H, R, S), side by side, summed or averaged over the parts that see a key."""
    whole = torch.cat([part.softmax(dim=-1).nan_to_num(0.0) for part in masked.split(lengths, dim=-1)], dim=-1)
    return whole if merge == "added up" else whole / whole.sum(dim=-1, keepdim=True).clamp(min=1)


def online(masked: Tensor, mask: RowMask, tile: int, forgotten: str) -> Tensor:
    """An online softmax that does not rescale its sum, its output, or both when the maximum grows."""
    maximum, powers = torch.full_like(masked[..., :1], torch.finfo(masked.dtype).min), []
    for scores in masked.split(tile, dim=-1):
        maximum = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
        powers.append((scores - maximum).exp())
    stale, right = torch.cat(powers, dim=-1), (masked - maximum).exp()
    total = (right if forgotten == "output" else stale).sum(dim=-1, keepdim=True)
    return (right if forgotten == "sum" else stale) / total.clamp(min=torch.finfo(masked.dtype).tiny)


def merges(workload: Workload) -> Iterator[Mistake]:
    """Softmaxes over tiles or parts that are merged wrongly."""
    length = workload.kv_len
    usual = [tile for tile in TILE_LENS if tile < length and (tile >= LEAST_USUAL or length <= SHORT)]
    keys = torch.arange(length)
    splits = {tuple(map(len, keys.split(tile))): f"over tiles of {tile} keys" for tile in usual}
    for number in (number for number in NUM_PARTS if number < length):
        splits[tuple(map(len, keys.tensor_split(number)))] = f"of {number} parts of the keys"
    for (lengths, where), merge in itertools.product(splits.items(), ("added up", "averaged")):
        words = f"partial softmaxes {where} are {merge}, without the weights that their logsumexps give them"
        change = partial(partial_softmaxes, lengths=lengths, merge=merge)
        yield wrong("partial_softmaxes_merged", words, weights=change)
    for tile, (name, forgotten) in itertools.product(usual, FORGOTTEN.items()):
        words = f"an online softmax over tiles of {tile} keys does not rescale its {forgotten} when the maximum grows"
        yield wrong(f"{name}_not_rescaled", words, weights=partial(online, tile=tile, forgotten=forgotten))


def cut(query: Tensor, key: Tensor, mask: RowMask, width: int, scaled: int) -> Tensor:
    """The scores of the first columns alone, scaled for a width."""
    return product(query[..., :width], key[..., :width].mT) * mask.scale_for(scaled)


def cut_widths(workload: Workload) -> Iterator[Mistake]:
    """Only the first columns of query and key count."""
    full = workload.head_dim
    for width in sorted({2**power for power in range(9)} | {full - 1, workload.value_dim}):
        words = f"only the first {width} of {full} numbers of query and key count"
        if 0 < width < full:
            yield wrong("width_cut", words, scores=partial(cut, width=width, scaled=full))
        if 0 < width < full and not workload.scale:
            text = f"{words}, scaled for that width"
            yield wrong("width_cut", text, scores=partial(cut, width=width, scaled=width))


def wrong_tiles(workload: Workload) -> Iterator[Mistake]:
    """Every wrong tile, merge and width."""
    for kind in (tiles, merges, cut_widths):
        yield from kind(workload)
