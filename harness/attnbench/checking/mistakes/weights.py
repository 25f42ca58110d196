"""Mistakes in the softmax, its tiles included, and after it: how values are mixed, how heads are merged and projected.

Mistakes of the output projection can be made in scope `module` only. At the end: mistakes in the backward pass, where
the output is right and training goes wrong, and in the use of memory.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.mistakes.scores import both_ways, coarse, is_wide
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import has_several, hide, is_square, mistake, product
from attnbench.contract import Weights
from attnbench.workloads.workload import Workload

Pair = tuple[Tensor, Tensor]
TILE_LENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_TILES = 80
DROPPED = 0.5
LONG = 1024
STALE: dict[tuple[torch.Size, torch.dtype], Tensor] = {}


def named(tiles: Iterable[range]) -> dict[str, range]:
    """The keys of each tile by a name, as in "key 7" or "the 16 keys 0 to 15"."""
    return {
        f"key {keys[0]}" if len(keys) == 1 else f"the {len(keys)} keys {keys[0]} to {keys[-1]}": keys for keys in tiles
    }


def partial_tiles(workload: Workload) -> dict[str, range]:
    """What is left over past the last whole tile, for each tile length: each such set of keys once."""
    length = workload.kv_len
    starts = {length // tile * tile for tile in TILE_LENS if tile < length and length % tile}
    return named(range(start, length) for start in sorted(starts))


def whole_tiles(workload: Workload) -> dict[str, range]:
    """Every whole tile of a usual length; where these are too many, tiles at both ends and in the middle."""
    tiles: list[range] = []
    for tile in TILE_LENS:
        number = workload.kv_len // tile
        chosen: Iterable[int] = range(number)
        if number * 2 > MOST_TILES or (tile == 1 and number > MOST_TILES // 4):
            chosen = sorted({0, 1, number // 2, number - 2, number - 1})
        if tile < workload.kv_len:
            tiles += (range(start * tile, (start + 1) * tile) for start in chosen)
    return named(tiles)


def tile_lens(workload: Workload) -> dict[str, int]:
    """The usual tile lengths of which there are several; very short ones at short lengths only."""
    length = workload.kv_len
    return {str(tile): tile for tile in TILE_LENS if tile < length and (tile >= 16 or length <= 32)}  # noqa: PLR2004


def among(keys: range, mask: RowMask) -> Tensor:
    """Which of the mask's keys (S,) are of a tile."""
    return (keys.start <= mask.keys) & (mask.keys < keys.stop)


def without(scores: Tensor, mask: RowMask, keys: range) -> Tensor:
    """The masked scores with those keys hidden."""
    return hide(mask.changed(scores), mask.seen & ~among(keys, mask))


@mistake("masked scores", choices=partial_tiles)
def last_partial_tile_dropped(scores: Tensor, mask: RowMask, choice: range) -> Tensor:
    """What lies past the last whole tile is left out: {choice}."""
    return without(scores, mask, choice)


@mistake("masked scores", choices=whole_tiles)
def tile_dropped(scores: Tensor, mask: RowMask, choice: range) -> Tensor:
    """A tile is left out: {choice}."""
    return without(scores, mask, choice)


@mistake("masked scores", choices=whole_tiles)
def tile_counted_twice(scores: Tensor, mask: RowMask, choice: range) -> Tensor:
    """A tile is counted twice: {choice}."""
    twice = math.log(2) * among(choice, mask).to(scores.dtype)
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
    tiles = list(running_maximum(masked, choice))
    powers = torch.cat([(scores - maximum).exp() for scores, maximum in tiles], dim=-1)
    return powers * (tiles[-1][1] - masked.logsumexp(dim=-1, keepdim=True)).exp().nan_to_num(0.0)


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


def sigmoids(workload: Workload) -> dict[str, float]:
    """The usual biases of a sigmoid that takes the place of a softmax."""
    return {"": 0.0, " of the scores - log(S)": math.log(workload.kv_len)} if workload.kv_len > 1 else {"": 0.0}


@mistake("weights", choices=sigmoids)
def sigmoid_for_softmax(masked: Tensor, mask: RowMask, choice: float) -> Tensor:
    """A sigmoid{choice} takes the place of the softmax, so that the weights do not add up to 1."""
    return (masked - choice).sigmoid()


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


@mistake("weights", has_several("num_heads"))
def first_heads_weights_for_all(masked: Tensor, mask: RowMask) -> Tensor:
    """The weights of head 0 are used in every head."""
    return steps.weights(masked, mask)[:, :1].expand_as(masked)


@mistake("weights", is_square, has_several("seq_len"), needs_all_rows=True)
def weights_transposed(masked: Tensor, mask: RowMask) -> Tensor:
    """The weights are transposed: rows and columns have changed places."""
    return steps.weights(masked, mask).transpose(-2, -1)


@mistake(
    "weights",
    lambda workload: workload.mask_rule.has_empty_rows(workload.batch_size, workload.seq_len, workload.kv_len),
)
def nan_where_nothing_is_seen(masked: Tensor, mask: RowMask) -> Tensor:
    """A query that sees no key gives NaN, the softmax of nothing, where it must give 0."""
    return masked.softmax(dim=-1)


@mistake("weights", is_wide, is_rounding=True, choices=lambda _: {"": False, " and so is their sum": True})
def bfloat16_exponentials(masked: Tensor, mask: RowMask, choice: bool) -> Tensor:  # noqa: FBT001 - a choice
    """The exponentials of the scores are rounded to bfloat16 on the way{choice}."""
    right = steps.weights(masked, mask)
    largest = right.amax(dim=-1, keepdim=True)
    powers = coarse((right / largest).nan_to_num(0.0))
    total = powers.sum(dim=-1, keepdim=True)
    return (powers / total).nan_to_num(0.0) if choice else powers * largest


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


def has_square_projection(workload: Workload) -> bool:
    """Whether the output projection may be left out or transposed: it has as many rows as columns."""
    return workload.num_heads * workload.value_dim == workload.embed_dim


@mistake("context")
def query_and_key_ignored(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """Query and key play no part: each output is the plain mean of the values that the query sees."""
    seen = mask.seen.to(value.dtype)
    return product(seen / seen.sum(dim=-1, keepdim=True).clamp(min=1), value)


def inside(_: Workload) -> dict[str, str]:
    """What may be rounded to bfloat16 as the values are mixed."""
    return {"weights and values": "both", "weights": "weights", "values": "values", "results": "results"}


@mistake("context", is_wide, is_rounding=True, choices=inside)
def bfloat16_inside(weights: Tensor, value: Tensor, mask: RowMask, choice: str) -> Tensor:
    """The {choice} are rounded to bfloat16 on the way."""
    if choice in {"both", "weights"}:
        weights = coarse(weights)
    if choice in {"both", "values"}:
        value = coarse(value)
    made = steps.context(weights, value, mask)
    return coarse(made) if choice in {"both", "results"} else made


def sum_tiles(workload: Workload) -> dict[str, tuple[int, bool]]:
    """After how many keys a running sum is rounded, and whether it is that of an online softmax."""
    tiles = {"every key": 1} | {f"every {tile} keys": tile for tile in (16, 32, 64, 128) if tile < workload.kv_len}
    plain = {name: (tile, False) for name, tile in tiles.items()}
    return (
        plain
        | {f"{name} of an online softmax": (tile, True) for name, tile in tiles.items()}
        | {"all keys, before the division by their sum": (workload.kv_len, True)}
    )


@mistake(
    "context",
    lambda workload: workload.dtype != "bfloat16" or workload.kv_len >= LONG,
    is_rounding=True,
    choices=sum_tiles,
)
def bfloat16_sums(weights: Tensor, value: Tensor, mask: RowMask, choice: tuple[int, bool]) -> Tensor:
    """The sum over the keys is accumulated in bfloat16, rounded after {choice}."""
    tile, is_online = choice
    total = torch.zeros(*weights.shape[:-1], value.shape[-1], dtype=value.dtype, device=value.device)
    before = torch.full_like(weights[..., :1], torch.finfo(weights.dtype).tiny)
    for share, mixed in zip(weights.split(tile, dim=-1), value.split(tile, dim=-2), strict=True):
        if is_online:  # the running sum is in units of the largest weight so far
            largest = torch.maximum(before, share.amax(dim=-1, keepdim=True))
            total, before = coarse(total * (before / largest) + product(share / largest, mixed)), largest
        else:
            total = coarse(total + product(share, mixed))
    return total * before if is_online else total


@mistake("context", is_fitted=True, choices=lambda _: {"1.25": 1.25})
def context_scaled(weights: Tensor, value: Tensor, mask: RowMask, choice: float) -> Tensor:
    """The output of the attention is {choice} times what it should be."""
    return choice * steps.context(weights, value, mask)


@mistake("context", has_several("num_heads"), choices=lambda workload: both_ways(workload.num_heads))
def output_heads_rolled(weights: Tensor, value: Tensor, mask: RowMask, choice: int) -> Tensor:
    """The heads of the output are rolled: each stands in the place of {choice}."""
    return steps.context(weights, value, mask).roll(-choice, 1)


@mistake("context", has_several("batch_size"))
def first_batch_row_only(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """The output is written for the first batch row only; the other rows are 0."""
    made = steps.context(weights, value, mask)
    return torch.cat([made[:1], torch.zeros_like(made[1:])])


@mistake("context", has_several("batch_size"))
def first_batch_row_for_all(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """Every batch row is given the output of the first."""
    made = steps.context(weights, value, mask)
    return made[:1].expand_as(made)


@mistake("context", has_several("num_heads", "seq_len"), needs_all_rows=True)
def output_viewed_not_transposed(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """Heads and tokens of the output are exchanged by a view or reshape without a transpose."""
    made = steps.context(weights, value, mask)
    return made.transpose(1, 2).reshape(made.shape)  # (B,H,T,V) -> (B,T,H,V), read as (B,H,T,V)


@mistake("output", has_several("num_heads", "seq_len"), needs_all_rows=True)
def merged_without_transpose(context: Tensor, weights: Weights) -> Tensor:
    """Heads are merged by a view without a transpose: tokens and heads are mixed up."""
    batch_size, _, num_rows, _ = context.shape
    return steps.output(context.reshape(batch_size, 1, num_rows, -1), weights)  # (B,H,R,V) read as (B,R,H*V)


@mistake("output", has_several("num_heads", "value_dim"))
def merged_feature_by_feature(context: Tensor, weights: Weights) -> Tensor:
    """Heads are merged in the wrong order: feature by feature instead of head by head."""
    return steps.output(context.transpose(1, 3), weights)  # (B,H,R,V) -> (B,V,R,H)


@mistake("output", has_several("num_heads"))
def merged_in_reverse(context: Tensor, weights: Weights) -> Tensor:
    """Heads are merged in the wrong order: the last head first."""
    return steps.output(context.flip(1), weights)


@mistake("output", is_fitted=True, choices=lambda _: {"1.25": 1.25})
def output_scaled(context: Tensor, weights: Weights, choice: float) -> Tensor:
    """The module's output is {choice} times what it should be."""
    return choice * steps.output(context, weights)


@mistake(
    "output", is_wide, is_rounding=True, choices=lambda _: {"merged heads": "merged", "output's weights": "weights"}
)
def bfloat16_output_projection(context: Tensor, weights: Weights, choice: str) -> Tensor:
    """The {choice} are rounded to bfloat16 on the way."""
    if choice == "merged":
        return steps.output(coarse(context), weights)
    return steps.output(context, weights.map(coarse))


@mistake("output", has_square_projection)
def no_output_projection(context: Tensor, weights: Weights) -> Tensor:
    """The output projection is left out."""
    return steps.output(context, replace(weights, out=None))


@mistake("output")
def no_output_bias(context: Tensor, weights: Weights) -> Tensor:
    """The output projection's bias is dropped."""
    return steps.output(context, replace(weights, out_bias=None))


@mistake("output", has_square_projection)
def output_projection_transposed(context: Tensor, weights: Weights) -> Tensor:
    """The output projection's matrix is transposed."""
    assert weights.out is not None
    return steps.output(context, replace(weights, out=weights.out.T))


@mistake("heads", is_gradient=True)
def no_gradient_of_key(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """No gradient reaches the keys."""
    return steps.heads(query, key.detach(), value, mask)


@mistake("heads", is_gradient=True)
def no_gradient_of_value(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """No gradient reaches the values."""
    return steps.heads(query, key, value.detach(), mask)


@mistake("scores", is_gradient=True)
def no_gradient_of_query(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """No gradient reaches the queries."""
    return steps.scores(query.detach(), key, mask)


def with_gradient_times(tensor: Tensor, factor: float) -> Tensor:
    """The same values, with the gradient multiplied."""
    return tensor + (factor - 1) * (tensor - tensor.detach())


@mistake("scores", is_gradient=True)
def gradient_of_query_not_scaled(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The gradient of the queries lacks the factor 1/sqrt(K), or another scale."""
    return steps.scores(with_gradient_times(query, 1 / mask.scale_for(query.shape[-1])), key, mask)


@mistake("scores", is_gradient=True)
def gradient_of_key_not_scaled(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The gradient of the keys lacks the factor 1/sqrt(K), or another scale."""
    return steps.scores(query, with_gradient_times(key, 1 / mask.scale_for(query.shape[-1])), mask)


@mistake("scores", is_gradient=True)
def gradient_of_query_doubled(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The gradient of the queries is twice what it should be."""
    return steps.scores(with_gradient_times(query, 2), key, mask)


@mistake("scores", is_gradient=True)
def gradient_of_key_doubled(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The gradient of the keys is twice what it should be."""
    return steps.scores(query, with_gradient_times(key, 2), mask)


@mistake("context", is_gradient=True)
def gradient_of_value_doubled(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """The gradient of the values is twice what it should be."""
    return steps.context(weights, with_gradient_times(value, 2), mask)


@mistake("weights", is_gradient=True)
def softmax_gradient_without_correction(masked: Tensor, mask: RowMask) -> Tensor:
    """The gradient through the softmax lacks its second term: weights * (grad - sum(weights * grad))."""
    made = masked.softmax(dim=-1).nan_to_num(0.0).detach()
    finite = masked.nan_to_num(0.0, 0.0, 0.0)
    return made * (finite - finite.detach() + 1)


@mistake("context", has_several("seq_len"), needs_all_rows=True, is_gradient=True)
def gradient_of_value_partly_lost(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """The gradient of the values sums over the later half of the queries alone."""
    half = weights.shape[2] // 2
    earlier, later = product(weights[:, :, :half], value.detach()), product(weights[:, :, half:], value)
    return torch.cat([earlier, later], dim=2)


@mistake("heads", lambda workload: workload.num_kv_heads < workload.num_heads, is_gradient=True)
def gradient_from_first_of_group(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """A shared key/value head receives the gradient of its group's first query head alone."""
    times = query.shape[1] // key.shape[1]

    def repeat(tensor: Tensor) -> Tensor:
        rest = tensor.detach()[:, :, None].expand(-1, -1, times - 1, -1, -1)
        return torch.cat([tensor[:, :, None], rest], dim=2).flatten(1, 2)

    return repeat(key), repeat(value)


def as_if_contiguous(tensor: Tensor) -> Tensor:
    """The tensor's memory, read row after row whatever its strides."""
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.is_contiguous() or room < tensor.numel():
        return tensor
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride(), 0)


@mistake("heads", has_several("num_kv_heads", "kv_len"), is_memory=True)
def read_as_contiguous(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """A tensor that is not contiguous is read as if it were."""
    return steps.heads(query, as_if_contiguous(key), as_if_contiguous(value), mask)


@mistake("context", lambda workload: workload.direction == "inference", is_memory=True)
def stale_output_buffer(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """An output buffer is reused: a later call overwrites the output of an earlier one."""
    made = steps.context(weights, value, mask)
    return STALE.setdefault((made.shape, made.dtype), made.detach().clone()).copy_(made)


@mistake("scores", has_several("head_dim"), is_memory=True)
def input_changed(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The call changes its input: the query is scaled in place."""
    query.data.mul_(mask.scale_for(query.shape[-1]))
    return product(query, key.transpose(-2, -1))
