"""Mistakes in the softmax: tiles of keys lost or summed under an old maximum, the wrong axis, its sum, dropout."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.mistakes.mistake import mistake
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import hide
from attnbench.workloads.workload import Workload

TILE_LENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_TILES = 80
DROPPED = 0.5


@dataclass(frozen=True)
class Keys:
    """The keys of one tile."""

    first: int
    last: int

    def __str__(self) -> str:
        """As in "key 7" or "the 16 keys 0 to 15"."""
        if self.first == self.last:
            return f"key {self.first}"
        return f"the {self.last - self.first + 1} keys {self.first} to {self.last}"

    def among(self, keys: Tensor) -> Tensor:
        """Which of these indices (S,) are of the tile."""
        return (self.first <= keys) & (keys <= self.last)


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


def tile_lens(workload: Workload) -> list[int]:
    """The usual tile lengths of which there are several; very short ones at short lengths only."""
    return [tile for tile in TILE_LENS if tile < workload.kv_len and (tile >= 16 or workload.kv_len <= 32)]  # noqa: PLR2004


def without(scores: Tensor, mask: RowMask, keys: Keys) -> Tensor:
    """The masked scores with those keys hidden."""
    return hide(mask.changed(scores), mask.seen & ~keys.among(mask.keys))


@mistake("masked scores", choices=partial_tiles)
def last_partial_tile_dropped(scores: Tensor, mask: RowMask, choice: Keys) -> Tensor:
    """What lies past the last whole tile is left out: {choice}."""
    return without(scores, mask, choice)


@mistake("masked scores", choices=whole_tiles)
def tile_dropped(scores: Tensor, mask: RowMask, choice: Keys) -> Tensor:
    """A tile is left out: {choice}."""
    return without(scores, mask, choice)


@mistake("masked scores", choices=whole_tiles)
def tile_counted_twice(scores: Tensor, mask: RowMask, choice: Keys) -> Tensor:
    """A tile is counted twice: {choice}."""
    twice = math.log(2) * choice.among(mask.keys).to(scores.dtype)
    return hide(mask.changed(scores) + twice, mask.seen)


def running_maximum(masked: Tensor, tile: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The scores of each tile (B, H, R, s), and the largest score up to its end (B, H, R, 1)."""
    maximum = torch.full_like(masked[..., :1], torch.finfo(masked.dtype).min)
    for scores in masked.split(tile, dim=-1):
        maximum = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
        yield scores, maximum


@mistake("weights", choices=tile_lens)
def maximum_not_rescaled(masked: Tensor, mask: RowMask, choice: int) -> Tensor:
    """An online softmax over tiles of {choice} keys does not rescale what it has when the maximum grows."""
    powers = torch.cat([(scores - maximum).exp() for scores, maximum in running_maximum(masked, choice)], dim=-1)
    return powers / powers.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(powers.dtype).tiny)


@mistake("weights", choices=tile_lens)
def output_not_rescaled(masked: Tensor, mask: RowMask, choice: int) -> Tensor:
    """An online softmax over tiles of {choice} keys does not rescale its output when the maximum grows."""
    total = masked.logsumexp(dim=-1, keepdim=True)
    powers = []
    for scores, maximum in running_maximum(masked, choice):
        powers.append((scores - maximum).exp())
    return torch.cat(powers, dim=-1) * (maximum - total).exp().nan_to_num(0.0)


@mistake("weights", choices=tile_lens)
def sum_not_rescaled(masked: Tensor, mask: RowMask, choice: int) -> Tensor:
    """An online softmax over tiles of {choice} keys does not rescale its sum when the maximum grows."""
    total = torch.zeros_like(masked[..., :1])
    for scores, maximum in running_maximum(masked, choice):
        total = total + (scores - maximum).exp().sum(dim=-1, keepdim=True)
    return (masked - maximum).exp() / total.clamp(min=torch.finfo(masked.dtype).tiny)


def softmax_over(dims: tuple[int, ...], masked: Tensor) -> Tensor:
    """The softmax over some axes; hidden keys have no share."""
    powers = (masked - masked.amax(dims, keepdim=True)).exp().nan_to_num(0.0)
    return powers / powers.sum(dims, keepdim=True).clamp(min=torch.finfo(powers.dtype).tiny)


@mistake("weights", needs_all_rows=True)
def softmax_over_queries(masked: Tensor, mask: RowMask) -> Tensor:
    """The softmax runs over the queries instead of the keys."""
    return softmax_over((-2,), masked)


@mistake("weights")
def softmax_over_heads(masked: Tensor, mask: RowMask) -> Tensor:
    """The softmax runs over the heads instead of the keys."""
    return softmax_over((1,), masked)


@mistake("weights")
def softmax_over_batch(masked: Tensor, mask: RowMask) -> Tensor:
    """The softmax runs over the batch instead of the keys."""
    return softmax_over((0,), masked)


@mistake("weights", needs_all_rows=True)
def softmax_over_queries_and_keys(masked: Tensor, mask: RowMask) -> Tensor:
    """One softmax runs over queries and keys together instead of one for each query."""
    return softmax_over((-2, -1), masked)


@mistake("weights")
def no_maximum(masked: Tensor, mask: RowMask) -> Tensor:
    """The maximum is not subtracted before the exponential, which overflows where scores are large."""
    powers = masked.exp()
    return powers / powers.sum(dim=-1, keepdim=True)


@mistake("weights")
def not_normalised(masked: Tensor, mask: RowMask) -> Tensor:
    """The exponentials are not divided by their sum."""
    return (masked - masked.amax(dim=-1, keepdim=True)).exp()


@mistake("weights")
def one_more_in_the_sum(masked: Tensor, mask: RowMask) -> Tensor:
    """The softmax's sum has one term too many, as if there were one more key with score 0."""
    return torch.cat([masked, torch.zeros_like(masked[..., :1])], dim=-1).softmax(dim=-1)[..., :-1]


@mistake("weights", fits=lambda workload: workload.num_heads > 1)
def first_heads_weights_for_all(masked: Tensor, mask: RowMask) -> Tensor:
    """The weights of head 0 are used in every head."""
    return steps.weights(masked, mask)[:, :1].expand_as(masked)


@mistake("weights", fits=lambda workload: 1 < workload.seq_len == workload.kv_len, needs_all_rows=True)
def weights_transposed(masked: Tensor, mask: RowMask) -> Tensor:
    """The weights are transposed: rows and columns have changed places."""
    return steps.weights(masked, mask).transpose(-2, -1)


@mistake(
    "weights",
    fits=lambda workload: workload.mask_rule.has_empty_rows(workload.batch_size, workload.seq_len, workload.kv_len),
)
def nan_where_nothing_is_seen(masked: Tensor, mask: RowMask) -> Tensor:
    """A query that sees no key gives NaN, the softmax of nothing, where it must give 0."""
    return masked.softmax(dim=-1)


def some_dropped(masked: Tensor, mask: RowMask) -> Tensor:
    """The weights, some of them 0."""
    kept = torch.rand(masked.shape, device=masked.device) >= DROPPED
    return steps.weights(masked, mask) * kept


@mistake("weights", is_random=True)
def dropout_in_evaluation(masked: Tensor, mask: RowMask) -> Tensor:
    """Dropout is active in evaluation: some weights are 0 and the others scaled up."""
    return some_dropped(masked, mask) / (1 - DROPPED)


@mistake("weights", is_random=True)
def dropout_without_rescaling(masked: Tensor, mask: RowMask) -> Tensor:
    """Dropout is active in evaluation, and without rescaling: some weights are 0, the others as they were."""
    return some_dropped(masked, mask)
