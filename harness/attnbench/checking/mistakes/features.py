"""Mistakes in what real models add to plain attention: a scale, sinks, learned biases, and their masks and layouts."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.case import block_table, cache_scales, paged
from attnbench.checking.mistakes.scores import adding, changing, has, showing
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Condition, has_several, is_square, mistake, product
from attnbench.contract import repeat_heads, softmax_with_sinks
from attnbench.workloads import masks
from attnbench.workloads.masks import Mask
from attnbench.workloads.workload import Workload

Pair = tuple[Tensor, Tensor]
BUCKETS = (masks.RelativeBuckets, masks.RelativeBucketsPast)
LEARNED = (*BUCKETS, masks.Decomposed)
CHUNKS: dict[type[Mask], type[Mask]] = {
    masks.Chunks: masks.SlidingWindow,
    masks.ChunksBottomRight: masks.SlidingWindowBottomRight,
}
"""Chunks, and the window that is taken for them."""
STREAMING: dict[type[Mask], type[Mask]] = {
    masks.Streaming: masks.SlidingWindow,
    masks.StreamingBottomRight: masks.SlidingWindowBottomRight,
}
"""First keys and a window, and the window alone."""
AT_THE_OTHER_END: dict[type[Mask], type[Mask]] = {
    masks.Chunks: masks.ChunksBottomRight,
    masks.ChunksBottomRight: masks.Chunks,
    masks.Streaming: masks.StreamingBottomRight,
    masks.StreamingBottomRight: masks.Streaming,
}
TREES = (masks.Tree, masks.TreeOf)


def has_scale(workload: Workload) -> bool:
    """Whether the scale is another than 1 / sqrt(K)."""
    return workload.scale > 0


def has_sinks(workload: Workload) -> bool:
    """Whether there are sinks."""
    return workload.sinks != "none"


def any_of(*conditions: Condition) -> Condition:
    """Whether one of them holds."""
    return lambda workload: any(holds(workload) for holds in conditions)


@mistake("scores", has_scale)
def scale_ignored(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The scale that is asked for is ignored: the scores are divided by sqrt(K)."""
    return product(query, key.transpose(-2, -1)) / math.sqrt(query.shape[-1])


@mistake("scores", has_scale, has_several("head_dim"))
def scale_and_root(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The scores are multiplied by the scale that is asked for, and also divided by sqrt(K)."""
    return steps.scores(query, key, mask) / math.sqrt(query.shape[-1])


@mistake("scores", has_scale, lambda workload: workload.scale != 1)
def scale_inverted(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The scores are divided by the scale that is asked for instead of multiplied."""
    return product(query, key.transpose(-2, -1)) / mask.scale_for(query.shape[-1])


def in_key(workload: Workload) -> bool:
    """Whether values are part of their keys, and not all of them."""
    return workload.layout == "value_in_key" and workload.value_dim < workload.head_dim


@mistake("heads", in_key)
def value_at_end_of_key(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """The values are the last V numbers of their keys instead of the first."""
    last = key[..., key.shape[-1] - value.shape[-1] :]
    return repeat_heads(key, query.shape[1]), repeat_heads(last, query.shape[1])


@mistake("scores", in_key, choices=lambda workload: {"": workload.value_dim})
def only_value_part_in_scores(query: Tensor, key: Tensor, mask: RowMask, choice: int) -> Tensor:
    """The scores are products of the first V numbers of query and key alone: the rest, its position, is left out."""
    return product(query[..., :choice], key[..., :choice].transpose(-2, -1)) * mask.scale_for(query.shape[-1])


def in_pages(workload: Workload) -> bool:
    """Whether key and value lie in pages."""
    return bool(workload.page_size)


def in_8_bits(workload: Workload) -> bool:
    """Whether key and value are stored in 8 bits."""
    return workload.cache_dtype != "same"


def workload_itself(workload: Workload) -> dict[str, Workload]:
    """The workload, for a step that must know more of it than its tensors say."""
    return {"": workload}


def by_table(query: Tensor, key: Tensor, value: Tensor, workload: Workload, table: Tensor) -> Pair:
    """Key and value read from their pages by another block table (B, pages)."""
    right = block_table(workload).to(key.device)

    def read(tensor: Tensor) -> Tensor:
        pages = paged(tensor, right, workload.page_size)[table.to(tensor.device)]  # (B,pages,G,page,K)
        gathered = pages.transpose(1, 2).flatten(2, 3)[:, :, : workload.kv_len]
        return repeat_heads(gathered, query.shape[1])

    return read(key), read(value)


@mistake("heads", in_pages, choices=workload_itself)
def pages_in_order(query: Tensor, key: Tensor, value: Tensor, mask: RowMask, choice: Workload) -> Pair:
    """The block table is ignored: a row's pages are read one after the other as they lie."""
    table = block_table(choice)
    return by_table(query, key, value, choice, torch.arange(table.numel()).view(table.shape))


@mistake("heads", in_pages, has_several("batch_size"), choices=workload_itself)
def pages_of_other_rows(query: Tensor, key: Tensor, value: Tensor, mask: RowMask, choice: Workload) -> Pair:
    """Each row reads the pages of the next one, and the last those of row 0."""
    return by_table(query, key, value, choice, block_table(choice).roll(-1, 0))


@mistake("heads", in_pages, lambda each: each.kv_len > each.page_size, choices=workload_itself)
def pages_reversed(query: Tensor, key: Tensor, value: Tensor, mask: RowMask, choice: Workload) -> Pair:
    """Each row's pages are read in the opposite order."""
    return by_table(query, key, value, choice, block_table(choice).flip(1))


def scales(tensor: Tensor) -> Tensor:
    """What the numbers of a cache in 8 bits are multiplied by (G, 1, 1)."""
    return cache_scales(tensor)[:, None, None]


@mistake("heads", in_8_bits, choices=lambda _: {"keys": "keys", "values": "values"})
def cache_scale_ignored(query: Tensor, key: Tensor, value: Tensor, mask: RowMask, choice: str) -> Pair:
    """The {choice} of the cache are not multiplied by their scale."""
    if choice == "keys":
        key = key / scales(key)
    else:
        value = value / scales(value)
    return steps.heads(query, key, value, mask)


@mistake("heads", in_8_bits)
def cache_scales_exchanged(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """The keys of the cache are multiplied by the scale of the values, and the other way round."""
    ratio = scales(value) / scales(key)
    return steps.heads(query, key * ratio, value / ratio, mask)


@mistake("heads", in_8_bits, has_several("num_kv_heads"))
def cache_scale_of_first_head(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """The scale of key/value head 0 is used for every head of the cache."""

    def with_first(tensor: Tensor) -> Tensor:
        return tensor * (scales(tensor)[:1] / scales(tensor))

    return steps.heads(query, with_first(key), with_first(value), mask)


def ignoring_sinks(masked: Tensor) -> Tensor:
    """The softmax over the keys alone; 0 where a query sees none."""
    return masked.softmax(dim=-1).nan_to_num(0.0)


def with_sinks(masked: Tensor, sinks: Tensor) -> Tensor:
    """The softmax with these sinks (H, 1, 1)."""
    return softmax_with_sinks(masked, sinks)


@mistake("weights", has_sinks)
def sinks_ignored(masked: Tensor, mask: RowMask) -> Tensor:
    """The sinks are ignored: the weights of a query's keys add up to 1."""
    return ignoring_sinks(masked)


@mistake("weights", has_sinks, has_several("num_heads"))
def sink_of_first_head_for_all(masked: Tensor, mask: RowMask) -> Tensor:
    """The sink of head 0 is used in every head."""
    assert mask.sinks is not None
    return with_sinks(masked, mask.sinks[:1].expand_as(mask.sinks))


@mistake("weights", has_sinks, has_several("num_heads"))
def sinks_reversed(masked: Tensor, mask: RowMask) -> Tensor:
    """Each head has the sink of another: they are in the opposite order."""
    assert mask.sinks is not None
    return with_sinks(masked, mask.sinks.flip(0))


@mistake("weights", has_sinks)
def sink_without_exponential(masked: Tensor, mask: RowMask) -> Tensor:
    """A sink is added to the softmax's sum as it is, without its exponential."""
    assert mask.sinks is not None
    powers = (masked - masked.amax(dim=-1, keepdim=True)).exp().nan_to_num(0.0)
    return powers / (powers.sum(dim=-1, keepdim=True) + mask.sinks)


@mistake("weights", has_sinks)
def sink_without_maximum(masked: Tensor, mask: RowMask) -> Tensor:
    """A sink's exponential is added to the sum without the maximum subtracted, which the scores' have had."""
    assert mask.sinks is not None
    powers = (masked - masked.amax(dim=-1, keepdim=True)).exp().nan_to_num(0.0)
    return powers / (powers.sum(dim=-1, keepdim=True) + mask.sinks.exp())


@mistake("weights", has_sinks, lambda workload: workload.score_scale != 1, choices=lambda each: {"": each.score_scale})
def sink_scaled(masked: Tensor, mask: RowMask, choice: float) -> Tensor:
    """A sink is multiplied by the scale, as scores are."""
    assert mask.sinks is not None
    return with_sinks(masked, mask.sinks * choice)


@mistake("weights", has_sinks)
def sink_weight_to_last_key(masked: Tensor, mask: RowMask) -> Tensor:
    """The weight of a sink is not dropped: the last key gets it."""
    made = steps.weights(masked, mask)
    rest = 1 - made.sum(dim=-1, keepdim=True)
    return torch.cat([made[..., :-1], made[..., -1:] + rest], dim=-1)


@mistake("weights", has_sinks, is_gradient=True)
def no_gradient_of_sinks(masked: Tensor, mask: RowMask) -> Tensor:
    """No gradient reaches the sinks."""
    assert mask.sinks is not None
    return with_sinks(masked, mask.sinks.detach())


@mistake("masked scores", has(*LEARNED), is_gradient=True)
def no_gradient_of_learned_bias(scores: Tensor, mask: RowMask) -> Tensor:
    """No gradient reaches the learned bias."""
    return adding(scores, mask, lambda bias, _: bias.detach(), LEARNED)


def by_other_index(scores: Tensor, mask: RowMask, index: Callable[[Mask], tuple[Tensor, ...]]) -> Tensor:
    """The masked scores where learned biases are looked up at another index."""
    row = torch.arange(mask.sizes[0])[:, None, None, None]
    head = torch.arange(mask.num_heads)[:, None, None]

    def bias(_: Tensor, part: Mask) -> Tensor:
        found: Tensor = part.looked_up(mask.inputs, (row, head, mask.queries), index(part))
        return found

    return adding(scores, mask, bias, LEARNED)


def bucket_of(mask: RowMask, part: Mask, *, one_more: int = 0, is_mirrored: bool = False) -> tuple[Tensor, ...]:
    """The bucket of each query and key, with the distance so much larger, or in the opposite direction."""
    end = 0 if type(part) is masks.RelativeBuckets else mask.sizes[2] - mask.sizes[1]
    ahead = (mask.keys - mask.queries - end) * (-1 if is_mirrored else 1)
    ahead = ahead + ahead.sign() * one_more
    return part.index(torch.zeros_like(ahead), ahead, 0, mask.sizes[2])


@mistake("masked scores", has_several("seq_len", "kv_len"), has(*BUCKETS))
def buckets_mirrored(scores: Tensor, mask: RowMask) -> Tensor:
    """The distances of the bias have the wrong sign: keys before the query are taken for keys after it."""
    return by_other_index(scores, mask, lambda part: bucket_of(mask, part, is_mirrored=True))


@mistake("masked scores", has_several("seq_len", "kv_len"), has(*BUCKETS))
def buckets_one_further(scores: Tensor, mask: RowMask) -> Tensor:
    """The distances of the bias are counted one too far: neighbours have the bucket of the distance 2."""
    return by_other_index(scores, mask, lambda part: bucket_of(mask, part, one_more=1))


@mistake("masked scores", has_several("seq_len", "kv_len"), has(*BUCKETS))
def buckets_of_other_kind(scores: Tensor, mask: RowMask) -> Tensor:
    """The buckets are those of the other half of T5: of the decoder for the encoder, or the other way round."""
    kinds, offset = {BUCKETS[0]: BUCKETS[1], BUCKETS[1]: BUCKETS[0]}, mask.sizes[2] - mask.sizes[1]

    def index(part: Mask) -> tuple[Tensor, ...]:
        return kinds[type(part)](*part.arguments).index(mask.queries, mask.keys, offset, mask.sizes[2])  # type: ignore[index]

    return by_other_index(scores, mask, index)


@mistake("masked scores", has_several("kv_len", least=4), has(masks.Decomposed))
def grid_read_by_columns(scores: Tensor, mask: RowMask) -> Tensor:
    """The grid of the keys is read column by column instead of row by row."""
    key_len = mask.sizes[2]

    def index(part: Mask) -> tuple[Tensor, ...]:
        assert isinstance(part, masks.Decomposed)
        rows = key_len // part.columns(key_len)
        return mask.keys % rows, mask.keys // rows

    return by_other_index(scores, mask, index)


@mistake("masked scores", has(masks.Decomposed), choices=lambda _: {"rows": "column_bias", "columns": "row_bias"})
def half_of_decomposed_bias(scores: Tensor, mask: RowMask, choice: str) -> Tensor:
    """Of the decomposed bias only that of the {choice} is added."""

    def bias(right: Tensor, part: Mask) -> Tensor:
        kept = {name: table * (name != choice) for name, table in mask.inputs.items()}
        row = torch.arange(mask.sizes[0])[:, None, None, None]
        head = torch.arange(mask.num_heads)[:, None, None]
        index = part.index(mask.queries, mask.keys, 0, mask.sizes[2])
        found: Tensor = part.looked_up(kept, (row, head, mask.queries), index)
        return found

    return adding(scores, mask, bias, (masks.Decomposed,))


@mistake("masked scores", has(masks.Decomposed))
def decomposed_bias_ignored(scores: Tensor, mask: RowMask) -> Tensor:
    """The decomposed bias is never added to the scores."""
    return changing(scores, mask, (masks.Decomposed,), lambda scores, _: scores)


@mistake("masked scores", has_several("num_heads"), has(masks.Decomposed))
def decomposed_bias_of_first_head(scores: Tensor, mask: RowMask) -> Tensor:
    """The decomposed bias of head 0 is used in every head."""
    return adding(scores, mask, lambda bias, _: bias[:, :1].expand_as(bias), (masks.Decomposed,))


def moved_ends(workload: Workload) -> dict[str, tuple[int, int]]:
    """The ends of a window on both sides, one key further or nearer."""
    ends = {"left end is one key too near": (-1, 0), "left end is one key too far": (1, 0)}
    ends |= {"right end is one key too near": (0, -1), "right end is one key too far": (0, 1)}
    (part,) = [part for part in workload.mask_rule.parts if type(part) is masks.Window]
    return {name: moves for name, moves in ends.items() if min(map(sum, zip(part.arguments, moves, strict=True))) >= 0}


@mistake("masked scores", has(masks.Window), choices=moved_ends)
def window_end_moved(scores: Tensor, mask: RowMask, choice: tuple[int, int]) -> Tensor:
    """The window's {choice}."""

    def seen(part: Mask) -> Tensor:
        return mask.seen_under(masks.Window(*(end + by for end, by in zip(part.arguments, choice, strict=True))))

    return showing(scores, mask, seen, masks.Window)


def window_arguments(workload: Workload) -> tuple[int, ...]:
    """Left and right of a window on both sides; the same where there is none."""
    return next((part.arguments for part in workload.mask_rule.parts if type(part) is masks.Window), (0, 0))


@mistake("masked scores", has(masks.Window), lambda workload: len(set(window_arguments(workload))) > 1)
def window_sides_swapped(scores: Tensor, mask: RowMask) -> Tensor:
    """The window's left and right side have changed places."""
    return showing(scores, mask, lambda part: mask.seen_under(masks.Window(*part.arguments[::-1])), masks.Window)


@mistake("masked scores", has(masks.Window), lambda workload: window_arguments(workload)[1] > 0)
def window_without_right_side(scores: Tensor, mask: RowMask) -> Tensor:
    """The window has a left side only: a query sees nothing after its own place, as under a causal window."""
    return showing(scores, mask, lambda part: mask.seen_under(masks.Window(part.arguments[0], 0)), masks.Window)


@mistake("masked scores", has(*CHUNKS))
def window_for_chunks(scores: Tensor, mask: RowMask) -> Tensor:
    """A window of the last n keys takes the place of chunks of n."""
    return showing(scores, mask, lambda part: mask.seen_under(CHUNKS[type(part)](*part.arguments)), *CHUNKS)


@mistake("masked scores", has(*CHUNKS), choices=lambda _: {"short": -1, "long": 1})
def chunks_of_other_length(scores: Tensor, mask: RowMask, choice: int) -> Tensor:
    """The chunks are one key too {choice}."""

    def seen(part: Mask) -> Tensor:
        return mask.seen_under(type(part)(max(1, part.arguments[0] + choice)))

    return showing(scores, mask, seen, *CHUNKS)


@mistake("masked scores", lambda workload: not is_square(workload), has(*AT_THE_OTHER_END))
def counted_from_other_end(scores: Tensor, mask: RowMask) -> Tensor:
    """The places of the chunks or of the window are counted from the wrong end: T and S differ."""
    kinds = AT_THE_OTHER_END
    return showing(scores, mask, lambda part: mask.seen_under(kinds[type(part)](*part.arguments)), *kinds)


@mistake("masked scores", has(*STREAMING))
def first_keys_hidden(scores: Tensor, mask: RowMask) -> Tensor:
    """The first keys, which every query sees, are hidden once the window has left them."""
    return showing(scores, mask, lambda part: mask.seen_under(STREAMING[type(part)](part.arguments[0])), *STREAMING)


def streaming_slips(_: Workload) -> dict[str, tuple[int, int]]:
    """What may be off by one in the window and in the number of first keys."""
    return {
        "window is one key too long": (1, 0),
        "window is one key too short": (-1, 0),
        "first keys are one too many": (0, 1),
        "first keys are one too few": (0, -1),
    }


@mistake("masked scores", has(*STREAMING), choices=streaming_slips)
def streaming_off_by_one(scores: Tensor, mask: RowMask, choice: tuple[int, int]) -> Tensor:
    """The {choice}."""

    def seen(part: Mask) -> Tensor:
        length, first = (number + by for number, by in zip(part.arguments, choice, strict=True))
        kind = type(part)
        if first == 0:
            return mask.seen_under(STREAMING[kind](length))
        if length == 0:  # its own place is in no window
            own = mask.keys == mask.queries + (mask.sizes[2] - mask.sizes[1]) * (kind is masks.StreamingBottomRight)
            return mask.seen_under(kind(1, first)) & ~(own & (mask.keys >= first))
        return mask.seen_under(kind(length, first))

    return showing(scores, mask, seen, *STREAMING)


def drafted(mask: RowMask) -> Tensor:
    """For each key its number among the drafted tokens (S,), below 0 in the cache."""
    return mask.keys - (mask.sizes[2] - mask.sizes[1])


@mistake("masked scores", has_several("seq_len", least=3), has(*TREES))
def causal_for_tree(scores: Tensor, mask: RowMask) -> Tensor:
    """The tree is ignored: a drafted token sees all that come before it, siblings included."""
    return showing(scores, mask, lambda _: mask.seen_under(masks.CausalBottomRight()), *TREES)


@mistake("masked scores", has_several("seq_len"), has(*TREES))
def tree_without_ancestors(scores: Tensor, mask: RowMask) -> Tensor:
    """A drafted token sees the cache and itself, and none of its ancestors."""
    return showing(scores, mask, lambda _: (drafted(mask) < 0) | (drafted(mask) == mask.queries), *TREES)


@mistake("masked scores", has_several("seq_len", least=4), has(*TREES))
def tree_with_parent_only(scores: Tensor, mask: RowMask) -> Tensor:
    """A drafted token sees its parent, and no ancestor before that."""

    def seen(part: Mask) -> Tensor:
        assert isinstance(part, masks.Tree)
        parent = torch.tensor(part.parents(mask.sizes[1]), device=mask.rows.device)[mask.queries]
        number = drafted(mask)
        return (number < 0) | (number == mask.queries) | ((number == parent) & (parent >= 0))

    return showing(scores, mask, seen, *TREES)


@mistake("masked scores", lambda workload: workload.kv_len > workload.seq_len, has(*TREES))
def tree_without_cache(scores: Tensor, mask: RowMask) -> Tensor:
    """A drafted token sees its ancestors, and nothing of the cache."""
    return showing(scores, mask, lambda part: mask.seen_under(part) & (drafted(mask) >= 0), *TREES)


def ragged_lengths(part: Mask, mask: RowMask) -> Tensor:
    """The place of each row's first query (B, 1, 1, 1)."""
    return torch.from_numpy(part.table(*mask.sizes))[:, None, None, None].to(mask.device)


@mistake("masked scores", has_several("batch_size"), has(masks.Ragged))
def ragged_lengths_ignored(scores: Tensor, mask: RowMask) -> Tensor:
    """The lengths of the caches are ignored: every row has as many keys as the longest may have."""
    return showing(scores, mask, lambda _: mask.seen_under(masks.CausalBottomRight()), masks.Ragged)


@mistake("masked scores", has_several("batch_size"), has(masks.Ragged))
def ragged_lengths_of_other_rows(scores: Tensor, mask: RowMask) -> Tensor:
    """Each row has the cache length of the next one, and the last that of row 0."""
    return showing(
        scores, mask, lambda part: mask.keys <= ragged_lengths(part, mask).roll(-1, 0) + mask.queries, masks.Ragged
    )


@mistake("masked scores", has_several("seq_len"), has(masks.Ragged))
def ragged_not_causal(scores: Tensor, mask: RowMask) -> Tensor:
    """A query sees the whole cache of its row, the tokens after it included."""
    last = mask.sizes[1] - 1
    return showing(scores, mask, lambda part: mask.keys <= ragged_lengths(part, mask) + last, masks.Ragged)


@mistake("masked scores", has(masks.Ragged), choices=lambda _: {"one key too few": -1, "one key too many": 1})
def ragged_off_by_one(scores: Tensor, mask: RowMask, choice: int) -> Tensor:
    """A query sees {choice} of its row's cache."""

    def seen(part: Mask) -> Tensor:
        return mask.keys <= ragged_lengths(part, mask) + mask.queries + choice

    return showing(scores, mask, seen, masks.Ragged)
