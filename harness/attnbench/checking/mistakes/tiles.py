"""Mistakes of kernels that work tile by tile: a tile of keys lost, counted twice, or summed under an old maximum."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.checking.mistakes.kind import Mistake
from attnbench.checking.steps import Changes, Scene, changed
from attnbench.workloads.workload import Workload

TILE_LENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_TILES = 80


@dataclass(frozen=True)
class Keys:
    """The keys of one tile."""

    first: int
    last: int

    def __str__(self) -> str:
        """As a person counts them."""
        if self.first == self.last:
            return f"key {self.first}"
        return f"the {self.last - self.first + 1} keys {self.first} to {self.last}"

    def among(self, scene: Scene) -> Tensor:
        """Which keys they are (S,)."""
        return (self.first <= scene.keys) & (scene.keys <= self.last)


def partial_tiles(workload: Workload) -> Iterator[Keys]:
    """What is left over past the last whole tile, for each tile length: each such set of keys once."""
    length = workload.kv_len
    starts = {length // tile * tile for tile in TILE_LENS if tile < length and length % tile}
    yield from (Keys(start, length - 1) for start in sorted(starts))


def whole_tiles(workload: Workload) -> Iterator[Keys]:
    """Every whole tile of a usual length; where these are too many, tiles at both ends and in the middle."""
    length = workload.kv_len
    for tile in TILE_LENS:
        number = length // tile
        chosen: Iterable[int] = range(number)
        if number * 2 > MOST_TILES or (tile == 1 and number > MOST_TILES // 4):
            chosen = sorted({0, 1, number // 2, number - 2, number - 1})
        if tile < length:
            yield from (Keys(start * tile, start * tile + tile - 1) for start in chosen)


def dropping(keys: Keys) -> Changes:
    """Those keys get no weight."""

    def masked(scores: Tensor, scene: Scene) -> Tensor:
        return changed(scores, scene).masked_fill(~scene.seen | keys.among(scene), -math.inf)

    return {"masked scores": masked}


def counting_twice(keys: Keys) -> Changes:
    """Those keys' exponentials count twice."""

    def masked(scores: Tensor, scene: Scene) -> Tensor:
        twice = math.log(2) * keys.among(scene).to(scores.dtype)
        return (changed(scores, scene) + twice).masked_fill(~scene.seen, -math.inf)

    return {"masked scores": masked}


def old_maximum(tile: int) -> Changes:
    """An online softmax that never rescales what it summed under an earlier, smaller maximum."""

    def weights(masked: Tensor, scene: Scene) -> Tensor:
        tiles = masked.split(tile, dim=-1)
        maximum = torch.full_like(masked[..., :1], torch.finfo(masked.dtype).min)
        powers = []
        for scores in tiles:
            maximum = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
            powers.append((scores - maximum).exp())
        made = torch.cat(powers, dim=-1)
        return made / made.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(made.dtype).tiny)

    return {"weights": weights}


def sum_not_rescaled(tile: int) -> Changes:
    """An online softmax that rescales its output when the maximum grows, but not its sum of exponentials."""

    def weights(masked: Tensor, scene: Scene) -> Tensor:
        maximum = torch.full_like(masked[..., :1], torch.finfo(masked.dtype).min)
        total = torch.zeros_like(maximum)
        for scores in masked.split(tile, dim=-1):
            maximum = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
            total = total + (scores - maximum).exp().sum(dim=-1, keepdim=True)
        return (masked - maximum).exp() / total.clamp(min=torch.finfo(masked.dtype).tiny)

    return {"weights": weights}


def output_not_rescaled(tile: int) -> Changes:
    """An online softmax that rescales its sum of exponentials when the maximum grows, but not its output."""

    def weights(masked: Tensor, scene: Scene) -> Tensor:
        total = masked.logsumexp(dim=-1, keepdim=True)
        maximum = torch.full_like(masked[..., :1], torch.finfo(masked.dtype).min)
        powers = []
        for scores in masked.split(tile, dim=-1):
            maximum = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
            powers.append((scores - maximum).exp())
        return torch.cat(powers, dim=-1) * (maximum - total).exp().nan_to_num(0.0)

    return {"weights": weights}


def _tile_lens(workload: Workload) -> list[int]:
    return [tile for tile in TILE_LENS if tile < workload.kv_len and (tile >= 16 or workload.kv_len <= 32)]  # noqa: PLR2004


def _has_partial_tile(workload: Workload) -> bool:
    return any(partial_tiles(workload))


def _has_tiles(workload: Workload) -> bool:
    return workload.kv_len > 1


MISTAKES = (
    Mistake(
        name="last_partial_tile_dropped",
        words="what lies past the last whole tile is left out: {choice}",
        changes=dropping,
        fits=_has_partial_tile,
        choices=partial_tiles,
    ),
    Mistake(
        name="tile_dropped",
        words="a tile is left out: {choice}",
        changes=dropping,
        fits=_has_tiles,
        choices=whole_tiles,
    ),
    Mistake(
        name="tile_counted_twice",
        words="a tile is counted twice: {choice}",
        changes=counting_twice,
        fits=_has_tiles,
        choices=whole_tiles,
    ),
    Mistake(
        name="maximum_not_rescaled",
        words="an online softmax over tiles of {choice} keys does not rescale what it has when the maximum grows",
        changes=old_maximum,
        fits=_has_tiles,
        choices=_tile_lens,
    ),
    Mistake(
        name="output_not_rescaled",
        words="an online softmax over tiles of {choice} keys does not rescale its output when the maximum grows",
        changes=output_not_rescaled,
        fits=_has_tiles,
        choices=_tile_lens,
    ),
    Mistake(
        name="sum_not_rescaled",
        words="an online softmax over tiles of {choice} keys does not rescale its sum when the maximum grows",
        changes=sum_not_rescaled,
        fits=_has_tiles,
        choices=_tile_lens,
    ),
)
