"""Wrong factors on outputs and gradients; tiles that are lost, counted twice or merged wrongly; truncated widths.

A mistake that starts at a query row, or is limited to some heads, needs no entry: the diagnosis compares mistakes with
the wrong rows alone.
"""

import itertools
import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from attnbench.checking.mistakes.permutations import OPERANDS
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake, after, before, hide, product, wrong
from attnbench.workloads.workload import Workload

TILE_LENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_TILES = 12
"""With more tiles of one length, only those at both ends and in the middle are tried."""
FORGOTTEN = {"maximum": "sum and output", "output": "output", "sum": "sum"}
SHORT = 32
"""Up to this length very short tiles are tried too."""


def times(tensor: Tensor, factor: float, first: int, *, is_gradient: bool) -> Tensor:
    """The rows from `first` on (..., R, n) times a factor, or only their gradient."""
    late = (torch.arange(tensor.shape[-2], device=tensor.device) >= first)[:, None].to(tensor.dtype)
    return tensor + (factor - 1) * late * (tensor - tensor.detach() if is_gradient else tensor)


def factors(workload: Workload) -> Iterator[Mistake]:
    """The output, or a gradient, times a number, in all rows or from one on; the diagnosis measures the number."""
    root, is_module = math.sqrt(workload.head_dim), workload.scope == "module"
    numbers = dict.fromkeys((0.0, 0.5, 2.0, -1.0, 1 / workload.num_heads, root, 1 / root))
    for first, factor in itertools.product({0, workload.seq_len // 2}, numbers):
        words = f"is {factor:.6g} times what it should be" if factor else "is 0"
        words += f" from row {first} on" * bool(first)
        for operand, (step, places) in OPERANDS.items():
            is_gradient = operand != "output"
            if factor == 1 or len(places) > 1 or (first and is_module and is_gradient):
                continue
            change = partial(times, factor=factor, first=first, is_gradient=is_gradient)
            replaced = before(step, change, *places) if is_gradient else after(step, change)
            flags = "is_factor needs_all_rows" + " is_gradient" * is_gradient
            what = f"gradient of {operand}" if is_gradient else operand
            name = f"{operand}{'_gradient' * is_gradient}_{'factor' if factor else 'zero'}"
            yield wrong(name, f"the {what} {words}", flags, **{step: replaced})


def tiles_of(length: int) -> Iterator[tuple[str, range]]:
    """The rest after the last whole tile of each usual length, and whole tiles, each with its description.

    Of many tiles of one length, those at both ends and in the middle.
    """
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


def unwritten(tensor: Tensor, places: range, dim: int) -> Tensor:
    """The tensor with 0 in these places along an axis."""
    return tensor.index_fill(dim, torch.arange(places.start, places.stop, device=tensor.device), 0.0)


def tiles(workload: Workload) -> Iterator[Mistake]:
    """A tile of keys that is left out, counted twice, or without values."""
    for what, keys in tiles_of(workload.kv_len):
        where = f"the {len(keys)} keys {keys[0]} to {keys[-1]}" if len(keys) > 1 else f"key {keys[0]}"
        name = "tile_dropped" if what == "a tile" else "last_partial_tile_dropped"
        yield wrong(name, f"{what} is left out: {where}", masked_scores=partial(without, keys=keys))
        if what == "a tile":
            words = f"a tile is counted twice: {where}"
            yield wrong("tile_counted_twice", words, masked_scores=partial(twice, keys=keys))
            change = before("context", partial(unwritten, places=keys, dim=2), 1)
            yield wrong("tile_without_values", f"the values of a tile are 0: {where}", context=change)


def partial_softmaxes(masked: Tensor, mask: RowMask, lengths: list[int], merge: str) -> Tensor:
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
    usual = [tile for tile in TILE_LENS if tile < length and (tile >= 16 or length <= SHORT)]  # noqa: PLR2004
    keys = torch.arange(length)
    splits = {f"over tiles of {tile} keys": keys.split(tile) for tile in usual}
    splits |= {
        f"of {number} parts of the keys": keys.tensor_split(number) for number in (2, 3, 4, 8) if number < length
    }
    for lengths, where in {tuple(map(len, split)): where for where, split in splits.items()}.items():
        for merge in ("added up", "averaged"):
            words = f"partial softmaxes {where} are {merge}, without the weights that their logsumexps give them"
            change = partial(partial_softmaxes, lengths=list(lengths), merge=merge)
            yield wrong("partial_softmaxes_merged", words, weights=change)
    for tile, (name, forgotten) in itertools.product(usual, FORGOTTEN.items()):
        words = f"an online softmax over tiles of {tile} keys does not rescale its {forgotten} when the maximum grows"
        yield wrong(f"{name}_not_rescaled", words, weights=partial(online, tile=tile, forgotten=forgotten))


def cut_widths(workload: Workload) -> Iterator[Mistake]:
    """Only the first columns of query and key count."""
    full = workload.head_dim
    for width in sorted({2**power for power in range(9)} | {full - 1, workload.value_dim}):
        words = f"only the first {width} of {full} numbers of query and key count"
        scales = {words: full, f"{words}, scaled for as many": width}
        for text, scaled in scales.items() if 0 < width < full else ():

            def cut(query: Tensor, key: Tensor, mask: RowMask, width: int, scaled: int) -> Tensor:
                return product(query[..., :width], key[..., :width].mT) * mask.scale_for(scaled)

            if scaled == full or not workload.scale:
                yield wrong("width_cut", text, scores=partial(cut, width=width, scaled=scaled))


def wrong_parts(workload: Workload) -> Iterator[Mistake]:
    """Every wrong factor, tile and width."""
    for kind in (factors, tiles, merges, cut_widths):
        yield from kind(workload)
