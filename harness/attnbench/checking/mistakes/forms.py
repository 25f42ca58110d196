"""Wrong forward passes: operands in another order, lost or badly merged tiles, wrong scores and weights, precision."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnbench.checking import oracle, steps
from attnbench.checking.case import QKV
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import (
    Mistake,
    after,
    before,
    hide,
    product,
    softmax_with_sinks,
    with_bias,
    with_change,
    wrong,
)
from attnbench.contract import Weights
from attnbench.workloads import masks
from attnbench.workloads.workload import Workload

OPERANDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "query": ("scores", (0,)),
    "key": ("heads", (1,)),
    "value": ("heads", (2,)),
    "keys and values": ("heads", (1, 2)),
    "output": ("context", ()),
}
"""The step that reads each operand, and the operand's places in its arguments; the step that returns the output."""
ALL_ROWS = "needs_all_rows"
AXES = {"batch": "batch rows", "head": "heads", "position": "positions"}
TILE_LENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_TILES = 12
"""With more tiles of one length, only those at both ends and in the middle are tried."""
FORGOTTEN = {"maximum": "sum and output", "output": "output", "sum": "sum"}
NUM_PARTS = (2, 3, 4, 8)
FILLS = (-10.0, -100.0, -1e3, -1e4, -2e4, -4e4, -65504.0)
"""Scores of hidden keys instead of minus infinity."""
WEAK = -1e3
"""Higher fills show on normal inputs."""
FLOORS = (0.0, -10.0, -100.0, -1e3, -1e4, -65504.0)
"""Initial values of a running maximum instead of minus infinity."""
TINY = 1e-37
CLAMPS = (10.0, 20.0, 50.0, 80.0)
SMALL = {0.0: "", 1e-30: ", and a tiny number is added to the sum", 1e-6: ", and 1e-6 is added to the sum"}
ROTARY_BASES = (10_000.0, 20_000.0, 100_000.0, 500_000.0, 1_000_000.0)
WIDE = {"float32", "float64"}
"""In half precision, roundings to bfloat16 and small numbers in sums or leaks are within honest errors."""


def orders(number: int) -> dict[str, list[int]]:
    """Distinct wrong orders of `number` things, by description."""
    things = list(range(number))
    known = {
        "in reverse": things[::-1],
        "one place early": things[1:] + things[:1],
        "one place late": things[-1:] + things[:-1],
        "those of the first alone": [0] * number,
    }
    for rows in (rows for rows in range(2, number) if number % rows == 0):
        words = f"grouped as ({number // rows}, {rows}) and read as ({rows}, {number // rows})"
        known[words] = [row + rows * column for row in range(rows) for column in range(number // rows)]
    distinct = {tuple(order): words for words, order in reversed(known.items())}
    return {words: list(order) for order, words in reversed(distinct.items()) if list(order) != things}


def in_order(axis: int, order: list[int]) -> Callable[[Tensor], Tensor]:
    """A function that reorders one axis of a tensor."""
    return lambda tensor: tensor[(slice(None),) * axis + (order,)]


def reordered(workload: Workload) -> Iterator[Mistake]:
    """Query, key, value, keys with their values, the output, or a bias in another order along one axis."""
    batch_size, of_query, of_key = workload.batch_size, workload.num_heads, workload.num_kv_heads
    for operand, (step, places) in OPERANDS.items():
        sizes = (batch_size, of_key, workload.kv_len) if step == "heads" else (batch_size, of_query, workload.seq_len)
        axes = 1 if operand == "query" else 3  # its other axes are as for keys and values, or the output
        for place, (axis, number) in enumerate(zip(AXES, sizes[:axes], strict=False)):
            for words, order in orders(number).items():
                if axis != "position" or not words.startswith("grouped"):
                    change = in_order(place, order)
                    changed = before(step, change, *places) if places else after(step, change)
                    flags = ALL_ROWS * (operand == "output" and axis == "position")
                    text = f"the {AXES[axis]} of the {operand} are {words}"
                    yield wrong(f"{operand.replace(' ', '_')}_{axis}_order", text, flags, **{step: changed})
    times = of_query // of_key
    if min(times, of_key) > 1:
        repeated = lambda _, key, value, __: (key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1))  # noqa: E731
        yield wrong("kv_heads_interleaved", heads=repeated)
    has_bias = any(part.is_additive for part in workload.mask_rule.changes)
    for words, order in orders(of_query).items() if has_bias else ():
        other = with_bias(lambda bias, *_, order=order: bias[:, order])
        yield wrong("bias_head_order", f"the heads of the bias are {words}", masked_scores=other)


def viewed(tensor: Tensor) -> Tensor:
    """Read (B, T, H, K) as (B, H, T, K) by a view, without a transpose."""
    return tensor.transpose(1, 2).reshape(tensor.shape)


def merged(tensor: Tensor) -> Tensor:
    """Read (B, H, T, K) as (B, T, H, K) by a view, without a transpose."""
    return tensor.reshape(tensor.transpose(1, 2).shape).transpose(1, 2)


def across_heads(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """Attention among the heads of one position: (B, H, T, K) read as (B, T, H, K)."""
    scores = product(query.transpose(1, 2), key.permute(0, 2, 3, 1)) * mask.scale_for(query.shape[-1])  # (B,T,H,H)
    return product(scores.softmax(dim=-1), value.transpose(1, 2)).transpose(1, 2)


def layouts(workload: Workload) -> Iterator[Mistake]:
    """(B, H, T, K) read as (B, T, H, K), or the reverse."""
    if min(workload.num_heads, workload.seq_len) == 1:
        return
    if workload.seq_len == workload.kv_len:
        yield wrong("heads_for_positions", flags=ALL_ROWS, whole=across_heads)
        swapped: Callable[..., Tensor] = lambda query, key, mask: steps.scores(key, query, mask)  # noqa: E731
        yield wrong("query_key_swapped", flags=ALL_ROWS, scores=swapped)
    views: dict[str, dict[str, Any]] = {
        "query, key and value": {"scores": before("scores", viewed, 0), "heads": before("heads", viewed, 1, 2)},
        **{f"the {name}": {OPERANDS[name][0]: before(OPERANDS[name][0], viewed, *OPERANDS[name][1])} for name in QKV},
        "the output": {"context": after("context", viewed)},
    }
    for what, changes in views.items():
        words = f"a view or reshape without a transpose makes (B, H, T, K) of (B, T, H, K), in {what}"
        yield wrong("viewed_not_transposed", words, ALL_ROWS, **changes)
    yield wrong("merged_without_transpose", flags=ALL_ROWS, context=after("context", merged))


def regrouped(regroup: Callable[[list[Tensor]], Iterable[Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    """A projection whose weights and biases (H, K, ...) of query, key and value are regrouped."""

    def projected(x: Tensor, context: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        tensors, named = weights.filled().tensors(), dict[str, Tensor]()
        for kind in ("", "_bias") if weights.has_bias else ("",):
            names = [f"{part}{kind}" for part in QKV]
            named |= dict(zip(names, regroup([tensors[name] for name in names]), strict=True))
        return oracle.project(x, context, Weights(**named))

    return projected


def by_feature(parts: list[Tensor]) -> Iterable[Tensor]:
    """Read (H*K,) as (K, H)."""
    return (part.flatten(0, 1).unflatten(0, (part.shape[1], part.shape[0])).transpose(0, 1) for part in parts)


def by_head(parts: list[Tensor]) -> Iterable[Tensor]:
    """Read a layout of all queries, all keys, all values as if it were stored head by head."""
    num_heads, head_dim = parts[0].shape[:2]
    packed = torch.cat([part.flatten(0, 1) for part in parts]).unflatten(0, (num_heads, 3, head_dim))
    return [packed[:, place] for place in range(3)]


def in_thirds(parts: list[Tensor]) -> Iterable[Tensor]:
    """Read a layout stored head by head as if it were all queries, all keys, all values."""
    packed = torch.stack(parts, dim=1).flatten(0, 2)  # (H,3,K,...) -> (H*3*K,...)
    return (part.unflatten(0, parts[0].shape[:2]) for part in packed.chunk(3))


def projections(workload: Workload) -> Iterator[Mistake]:
    """Mistakes of the projections, in scope `module`."""
    if workload.scope == "attention":
        return
    heads, groups, width, value = workload.num_heads, workload.num_kv_heads, workload.head_dim, workload.value_dim
    shapes, places = [(heads, width), (groups, width), (groups, value)], range(3)
    for order in itertools.permutations(places):
        if order != tuple(places) and [shapes[place] for place in order] == shapes:
            names = "{}, {} and {}".format(*(QKV[at] for at in order))
            words = f"query, key and value are projected with the weights of {names}, in that order"
            change = regrouped(lambda parts, order=order: [parts[place] for place in order])  # type: ignore[misc]
            yield wrong("projections_in_wrong_order", words, projection=change)
    yield wrong("no_input_biases", projection=before("projection", lambda weights: weights.biased("out"), 2))
    yield wrong("split_feature_by_feature", projection=regrouped(by_feature))
    if heads == groups and width == value:
        yield wrong("packed_read_head_by_head", projection=regrouped(by_head))
        yield wrong("packed_read_in_thirds", projection=regrouped(in_thirds))
    yield wrong("merged_feature_by_feature", output=before("output", lambda x: x.transpose(1, 3), 0))  # (B,V,R,H)
    yield wrong("no_output_bias", output=before("output", partial(replace, out_bias=None), 1))
    if heads * value == workload.embed_dim:
        yield wrong("no_output_projection", output=before("output", partial(replace, out=None), 1))
        transposed = before("output", lambda weights: replace(weights, out=weights.out.T), 1)
        yield wrong("output_projection_transposed", output=transposed)


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


def counted(scores: Tensor, mask: RowMask, keys: range, times: int) -> Tensor:
    """The masked scores with `keys` counted twice, or never."""
    among = (keys.start <= mask.keys) & (mask.keys < keys.stop)
    more = scores.new_full((), times).log()  # -inf for never
    return hide(mask.changed(scores).where(~among, mask.changed(scores) + more), mask.seen)


def tiles(workload: Workload) -> Iterator[Mistake]:
    """A tile of keys that is left out or counted twice."""
    for what, keys in tiles_of(workload.kv_len):
        where = f"the {len(keys)} keys {keys[0]} to {keys[-1]}" if len(keys) > 1 else f"key {keys[0]}"
        name = "tile_dropped" if what == "a tile" else "last_partial_tile_dropped"
        yield wrong(name, f"{what} is left out: {where}", masked_scores=partial(counted, keys=keys, times=0))
        if what == "a tile":
            words = f"a tile is counted twice: {where}"
            yield wrong("tile_counted_twice", words, masked_scores=partial(counted, keys=keys, times=2))


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
    if workload.sinks != "none":
        return
    length = workload.kv_len
    usual, keys = [tile for tile in TILE_LENS if tile < length], torch.arange(length)
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
    """The scores of only the first columns, scaled for a width."""
    return product(query[..., :width], key[..., :width].mT) * mask.scale_for(scaled)


def scales(workload: Workload) -> Iterator[Mistake]:
    """Scores with another scale, of truncated widths, or of rotated operands."""
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
        *(("scaled_by_other_width", other**-0.5) for other in (32, 64, 128)),
    ]
    known = [right]
    for name, scale in factors:
        if not any(math.isclose(scale, other) for other in known):
            known.append(scale)
            words = f"the scores are scaled for heads {scale**-2:.0f} wide, and they are {width} wide"
            words *= name == "scaled_by_other_width"
            yield wrong(name, words, scores=after("scores", partial(torch.mul, other=scale / right)))
    if workload.mask_rule.changes_scores and right != 1:
        early: Callable[..., Tensor] = lambda query, key, mask: mask.changed(product(query, key.mT)) * right  # noqa: E731
        yield wrong("changed_before_scale", scores=early, masked_scores=lambda x, mask: hide(x, mask.seen))
    for first in sorted({2**power for power in range(9)} | {width - 1, workload.value_dim}):
        words = f"only the first {first} of {width} numbers of query and key count"
        if 0 < first < width:
            yield wrong("width_cut", words, scores=partial(cut, width=first, scaled=width))
        if 0 < first < width and not workload.scale:
            text = f"{words}, scaled for that width"
            yield wrong("width_cut", text, scores=partial(cut, width=first, scaled=first))
    styles = ("in halves, as in Llama", "interleaved, as in GPT-J") if width % 2 == 0 else ()
    for base, style in itertools.product(ROTARY_BASES, styles):
        turn = partial(oracle.rotated, base=base, is_interleaved=style.startswith("inter"))
        words = f"query and key are rotated by their positions inside (rotary embedding, {style}, base {base:g})"
        yield wrong("rotary_inside", words, scores=partial(turned, workload=workload, turn=turn))


def turned(query: Tensor, key: Tensor, mask: RowMask, workload: Workload, turn: Callable[..., Tensor]) -> Tensor:
    """The scores with another rotation than the workload's."""
    query, key, _ = oracle.in_place(workload, mask.rows, (query, key, key), -1)
    return steps.scores(turn(query, mask.rows), turn(key, mask.keys), mask)


def softmax_over(masked: Tensor, _: RowMask, dim: int) -> Tensor:
    """The softmax over another axis; hidden keys get no share."""
    powers = (masked - masked.amax(dim, keepdim=True)).exp().nan_to_num(0.0)
    return powers / powers.sum(dim, keepdim=True).clamp(min=torch.finfo(powers.dtype).tiny)


def exponentials(masked: Tensor) -> Tensor:
    """Exponentials after subtracting the maximum; 0 if a query sees no key."""
    return (masked - masked.amax(dim=-1, keepdim=True)).exp().nan_to_num(0.0)


def usual(masked: Tensor) -> Tensor:
    """The softmax; 0 if a query sees no key."""
    return masked.softmax(dim=-1).nan_to_num(0.0)


SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    "no_softmax": lambda x: x.where(x.isfinite(), 0),
    "not_normalised": exponentials,
    "one_more_in_the_sum": lambda x: torch.nn.functional.pad(x, (0, 1)).softmax(dim=-1)[..., :-1],
    "sigmoid_for_softmax": torch.sigmoid,
    "softmax_twice": lambda x: usual(usual(x).masked_fill(x == -math.inf, -math.inf)),
    "softmax_of_base_2": lambda x: usual(x * math.log(2)),
    "query_and_key_ignored": lambda x: usual(x.masked_fill(x.isfinite(), 0.0)),
}
"""Other functions from masked scores to weights."""


def unusual(
    masked: Tensor, _: RowMask, *, floor: float | None = None, most: float = math.inf, more: float = 0.0
) -> Tensor:
    """A softmax without subtracting the maximum (or at least `floor`), of clamped scores, or with a larger sum."""
    top = 0.0 if floor is None else masked.amax(dim=-1, keepdim=True).clamp(min=floor)
    powers = (masked.clamp(-most, most) - top).exp().where(masked > -math.inf, 0.0)
    return powers / (powers.sum(dim=-1, keepdim=True) + more)


def softmaxes(workload: Workload) -> Iterator[Mistake]:
    """Softmaxes over other axes, without maximum or sum, or with an extra term in the sum."""
    if workload.sinks != "none":
        return
    for name, dim in (("queries", -2), ("heads", 1), ("batch", 0)):
        yield wrong(f"softmax_over_{name}", flags=ALL_ROWS * (dim == -2), weights=partial(softmax_over, dim=dim))  # noqa: PLR2004
    for name, change in SOFTMAXES.items():
        yield wrong(name, weights=lambda masked, _, change=change: change(masked))
    words = "the maximum is not subtracted before the exponential, which overflows where scores are large"
    for more, added in SMALL.items():
        yield wrong("no_maximum", words + added, weights=partial(unusual, more=more))
    for most in CLAMPS:
        words = f"scores are clamped, to {most:g} say, before an exponential without maximum"
        yield wrong("no_maximum", words, weights=partial(unusual, most=most))
    for more in (1e-4, 1e-3, 1e-2) if workload.dtype in WIDE else ():
        words = f"{more:g} is added to the softmax's sum"
        yield wrong("eps_in_the_sum", words, weights=partial(unusual, floor=-math.inf, more=more))
    for floor in FLOORS:
        words = f"the maximum that is subtracted is {floor:g} at least: where all scores are lower, exponentials vanish"
        yield wrong("floor_of_the_maximum", words, weights=partial(unusual, floor=floor, more=TINY))


def fills(workload: Workload) -> Iterator[Mistake]:
    """Hidden keys that have a score, or lose their weight too late."""
    if not workload.mask_rule.hides:
        return
    nothing: Callable[..., Tensor] = lambda x, m: softmax_with_sinks(x, m.sinks) * m.seen.any(dim=-1, keepdim=True)  # noqa: E731
    for fill in FILLS:
        name = "mask_too_weak" if fill > WEAK else "finite_fill"
        filled = lambda x, m, fill=fill: m.changed(x).where(m.seen, fill)  # noqa: E731
        about = f"about {fill:g}" if fill > WEAK else f"{fill:g} or lower"  # the weakest that explains it is named
        words = f"hidden keys get a score of {about} instead of minus infinity"
        yield wrong(name, words, masked_scores=filled, weights=nothing)
        added = lambda x, m, fill=fill: m.changed(x) + (~m.seen * fill).to(x.dtype)  # noqa: E731
        if workload.dtype in WIDE:
            yield wrong(name, f"{fill:g} is added to the scores of hidden keys", masked_scores=added, weights=nothing)
    yield wrong("mask_added_as_number", masked_scores=lambda x, m: m.changed(x) + m.seen.to(x.dtype))
    yield wrong("mask_multiplied", masked_scores=lambda x, m: m.changed(x) * m.seen.to(x.dtype))
    late: Callable[..., Tensor] = lambda x, m: x.softmax(dim=-1).where(m.seen, 0.0)  # noqa: E731
    yield wrong("mask_after_softmax", masked_scores=lambda x, m: m.changed(x), weights=late)


def extensions(workload: Workload) -> Iterator[Mistake]:
    """Mistakes in biases, softcap and sinks."""
    parts = [part for part in workload.mask_rule.changes if part.is_additive]
    for part in parts:
        words = "the bias is never added to the scores" + f": {part}" * (len(parts) > 1)
        without = with_bias(lambda bias, _, each, part=part: bias * (type(each) is not type(part)))  # type: ignore[misc]
        yield wrong("bias_ignored", words, masked_scores=without)
    if parts:
        yield wrong("bias_sign_flipped", masked_scores=with_bias(lambda x, *_: -x))
    if parts and workload.dtype in WIDE:
        yield wrong("bfloat16_bias", masked_scores=with_bias(lambda bias, *_: coarse(bias)))
    if any(isinstance(part, masks.Softcap) for part in workload.mask_rule.changes):
        never = with_change(lambda scores, _, part: scores if isinstance(part, masks.Softcap) else None)
        yield wrong("softcap_ignored", masked_scores=never)
        yield wrong("softcap_after_mask", masked_scores=lambda x, mask: mask.changed(hide(x, mask.seen)))
    if workload.sinks != "none":
        yield wrong("sinks_ignored", weights=lambda x, _: usual(x))
        scaled: Callable[..., Tensor] = lambda x, m: softmax_with_sinks(x, m.sinks * workload.score_scale)  # noqa: E731
        yield wrong("sink_scaled", weights=scaled)


def coarse(tensor: Tensor) -> Tensor:
    """Round the tensor to bfloat16 and back."""
    return tensor.bfloat16().to(tensor.dtype)


def roundings(workload: Workload) -> Iterator[Mistake]:
    """Intermediate results rounded to bfloat16."""
    everything = {"scores": before("scores", coarse, 0, 1), "context": before("context", coarse, 0, 1)}
    kinds: dict[str, dict[str, Callable[..., object]]] = {
        "queries, keys, weights and values": everything,
        "queries and keys": {"scores": before("scores", coarse, 0, 1)},
        "scores": {"scores": after("scores", coarse)},
        "weights": {"context": before("context", coarse, 0)},
        "values": {"context": before("context", coarse, 1)},
        "results": {"context": after("context", coarse)},
    }
    for what, changes in kinds.items() if workload.dtype in WIDE else ():
        yield wrong("bfloat16_inside", f"the {what} are rounded to bfloat16 on the way", "is_rounding", **changes)


KINDS = (reordered, layouts, projections, tiles, merges, scales, softmaxes, fills, extensions, roundings)


def wrong_forms(workload: Workload) -> Iterator[Mistake]:
    """Every mistake of the forward pass except for wrong masks."""
    for kind in KINDS:
        yield from kind(workload)
