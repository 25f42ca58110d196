"""Wrong factors on outputs and gradients; tiles that are lost, counted twice or merged wrongly; truncated widths.

A mistake that starts at a query row, or is limited to some heads, needs no entry: the diagnosis compares mistakes with
the wrong rows alone.
"""

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
SHORT = 32
"""Up to this length very short tiles are tried too."""


def times(tensor: Tensor, factor: float, first: int, *, is_gradient: bool) -> Tensor:
    """The rows from `first` on (..., R, n) times a factor, or only their gradient."""
    late = (torch.arange(tensor.shape[-2], device=tensor.device) >= first)[:, None].to(tensor.dtype)
    return tensor + (factor - 1) * late * (tensor - tensor.detach() if is_gradient else tensor)


def factors(workload: Workload) -> Iterator[Mistake]:
    """The output, or a gradient, times a number, in all rows or from one on; the diagnosis measures the number."""
    root, is_module = math.sqrt(workload.head_dim), workload.scope == "module"
    for first in {0, workload.seq_len // 2}:
        for factor in dict.fromkeys((0.0, 0.5, 2.0, -1.0, 1 / workload.num_heads, root, 1 / root)):
            kind = "factor" if factor else "zero"
            says = f"is {factor:.6g} times what it should be" if factor else "is 0"
            says += f" from row {first} on" * bool(first)
            for operand, (step, places) in OPERANDS.items():
                is_gradient = operand != "output"
                if factor == 1 or len(places) > 1 or (first and is_module and is_gradient):
                    continue
                change = partial(times, factor=factor, first=first, is_gradient=is_gradient)
                replaced = before(step, change, *places) if is_gradient else after(step, change)
                flags = "is_factor needs_all_rows" + " is_gradient" * is_gradient
                name, what = (f"{operand}_gradient", f"gradient of {operand}") if is_gradient else (operand, operand)
                yield wrong(f"{name}_{kind}", f"the {what} {says}", flags, **{step: replaced})


def whole_tiles(length: int) -> Iterator[range]:
    """Every whole tile of a usual length; of many tiles, those at both ends and in the middle."""
    for tile in TILE_LENS:
        number = length // tile
        some = sorted({0, 1, number // 2, number - 2, number - 1}) if number > MOST_TILES else range(number)
        if tile < length:
            yield from (range(start * tile, (start + 1) * tile) for start in some)


def tiles_of(length: int) -> Iterator[tuple[str, range]]:
    """Every whole tile of a usual length, and the rest after the last one, each with its description."""
    rest = sorted({length // tile * tile for tile in TILE_LENS if tile < length and length % tile})
    yield from (("what lies past the last whole tile", range(start, length)) for start in rest)
    yield from (("a tile", places) for places in whole_tiles(length))


def without(scores: Tensor, mask: RowMask, keys: range) -> Tensor:
    """The masked scores with `keys` hidden."""
    return hide(mask.changed(scores), mask.seen & ((mask.keys < keys.start) | (mask.keys >= keys.stop)))


def twice(scores: Tensor, mask: RowMask, keys: range) -> Tensor:
    """The masked scores with `keys` counted twice."""
    among = (keys.start <= mask.keys) & (mask.keys < keys.stop)
    return hide(mask.changed(scores) + math.log(2) * among.to(scores.dtype), mask.seen)


def unwritten(value: Tensor, keys: range) -> Tensor:
    """Values (B, H, S, V) with 0 for the keys of a tile."""
    return value.index_fill(2, torch.arange(keys.start, keys.stop, device=value.device), 0.0)


def tiles(workload: Workload) -> Iterator[Mistake]:
    """A tile of keys that is left out, counted twice, or without values."""
    for what, keys in tiles_of(workload.kv_len):
        where = f"the {len(keys)} keys {keys[0]} to {keys[-1]}" if len(keys) > 1 else f"key {keys[0]}"
        name = "tile_dropped" if what == "a tile" else "last_partial_tile_dropped"
        yield wrong(name, f"{what} is left out: {where}", masked_scores=partial(without, keys=keys))
        if what == "a tile":
            yield wrong(
                "tile_counted_twice", f"a tile is counted twice: {where}", masked_scores=partial(twice, keys=keys)
            )
            change = before("context", partial(unwritten, keys=keys), 1)
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
    splits = {f"over tiles of {tile} keys": [len(part) for part in torch.arange(length).split(tile)] for tile in usual}
    for number in (number for number in (2, 3, 4, 8) if number < length):
        splits[f"of {number} parts of the keys"] = [len(part) for part in torch.arange(length).tensor_split(number)]
    for lengths, where in {tuple(lengths): where for where, lengths in splits.items()}.items():
        for merge in ("added up", "averaged"):
            words = f"partial softmaxes {where} are {merge}, without the weights that their logsumexps give them"
            change = partial(partial_softmaxes, lengths=list(lengths), merge=merge)
            yield wrong("partial_softmaxes_merged", words, weights=change)
    for tile in usual:
        for name, forgotten in (("maximum", "sum and output"), ("output", "output"), ("sum", "sum")):
            words = (
                f"an online softmax over tiles of {tile} keys does not rescale its {forgotten} when the maximum grows"
            )
            yield wrong(f"{name}_not_rescaled", words, weights=partial(online, tile=tile, forgotten=forgotten))


def cut_widths(workload: Workload) -> Iterator[Mistake]:
    """Only the first columns of query and key count."""
    full = workload.head_dim
    for width in sorted({2**power for power in range(9)} | {full - 1, workload.value_dim}):
        for is_scaled in (False, True) if 0 < width < full else ():

            def cut(query: Tensor, key: Tensor, mask: RowMask, width: int, is_scaled: bool) -> Tensor:  # noqa: FBT001
                scale = mask.scale_for(width if is_scaled else full)
                return product(query[..., :width], key[..., :width].transpose(-2, -1)) * scale

            words = (
                f"only the first {width} of {full} numbers of query and key count" + ", scaled for as many" * is_scaled
            )
            if not (is_scaled and workload.scale):
                yield wrong("width_cut", words, scores=partial(cut, width=width, is_scaled=is_scaled))


def wrong_parts(workload: Workload) -> Iterator[Mistake]:
    """Every wrong factor, tile and width."""
    yield from factors(workload)
    yield from tiles(workload)
    yield from merges(workload)
    yield from cut_widths(workload)
