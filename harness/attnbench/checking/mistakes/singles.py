"""Mistakes without a family: projections, extensions of attention, caches, rotary positions, memory, gradients."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from attnbench.checking import oracle, steps
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake, after, before, hide, product, project, table, wrong
from attnbench.contract import Weights, softmax_with_sinks
from attnbench.workloads import masks
from attnbench.workloads.masks import Mask
from attnbench.workloads.workload import Workload

PARTS = ("query", "key", "value")
DROPPED = 0.5
STALE: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
MOST_POWER = 3.0
"""The largest power of a rotary base in a fit."""
ROTARY_BASES = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)
ALIBI = (masks.Alibi, masks.AlibiBottomRight)
Pair = tuple[Tensor, Tensor]


def regrouped(regroup: Callable[[list[Tensor]], Iterable[Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    """A projection whose weights and biases (H, K, ...) of query, key and value are regrouped."""

    def projected(x: Tensor, context: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        tensors, named = weights.filled().tensors(), dict[str, Tensor]()
        for kind in ("", "_bias") if weights.has_bias else ("",):
            names = [f"{part}{kind}" for part in PARTS]
            named |= dict(zip(names, regroup([tensors[name] for name in names]), strict=True))
        return project(x, context, Weights(**named))

    return projected


def by_feature(parts: list[Tensor]) -> Iterable[Tensor]:
    """Read (H*K,) as (K, H)."""
    return (part.flatten(0, 1).unflatten(0, (part.shape[1], part.shape[0])).transpose(0, 1) for part in parts)


def by_head(parts: list[Tensor]) -> Iterable[Tensor]:
    """Read all queries, all keys, all values as head by head."""
    num_heads, head_dim = parts[0].shape[:2]
    packed = torch.cat([part.flatten(0, 1) for part in parts]).unflatten(0, (num_heads, 3, head_dim))
    return [packed[:, place] for place in range(3)]


def in_thirds(parts: list[Tensor]) -> Iterable[Tensor]:
    """Read head by head as all queries, all keys, all values."""
    packed = torch.stack(parts, dim=1).flatten(0, 2)  # (H,3,K,...) -> (H*3*K,...)
    return (part.unflatten(0, parts[0].shape[:2]) for part in packed.chunk(3))


def projections(workload: Workload) -> Iterator[Mistake]:
    """Mistakes of the projections, in scope `module`."""
    heads, groups, width, value = workload.num_heads, workload.num_kv_heads, workload.head_dim, workload.value_dim
    shapes, places = [(heads, width), (groups, width), (groups, value)], range(3)
    for order in itertools.permutations(places):
        if order != tuple(places) and [shapes[place] for place in order] == shapes:
            words = "query, key and value are projected with the weights of {}, {} and {}, in that order"
            change = regrouped(lambda parts, order=order: [parts[place] for place in order])  # type: ignore[misc]
            yield wrong("projections_in_wrong_order", words.format(*(PARTS[at] for at in order)), projection=change)
    yield from table(
        "projection",
        "",
        ("no_input_biases", "the biases of the input projections are dropped", before("projection", unbiased, 2)),
        (
            "split_feature_by_feature",
            "heads are split in the wrong order: (K, H) instead of (H, K)",
            regrouped(by_feature),
        ),
    )
    if heads == groups and width == value:
        yield from table(
            "projection",
            "",
            (
                "packed_read_head_by_head",
                "weights packed as all queries, keys, values are read head by head",
                regrouped(by_head),
            ),
            (
                "packed_read_in_thirds",
                "weights packed head by head are read as all queries, keys, values",
                regrouped(in_thirds),
            ),
        )
    words = "heads are merged feature by feature instead of head by head"
    by_features = before("output", lambda x: x.transpose(1, 3), 0)  # (B,H,R,V) -> (B,V,R,H)
    yield wrong("merged_feature_by_feature", words, output=by_features)
    words = "heads are merged by a view without a transpose"
    by_view = before("output", lambda x: x.reshape(x.shape[0], 1, x.shape[2], -1), 0)  # (B,H,R,V) read as (B,R,H*V)
    yield wrong("merged_without_transpose", words, "needs_all_rows", output=by_view)
    words = "the output projection's bias is dropped"
    yield wrong("no_output_bias", words, output=before("output", partial(replace, out_bias=None), 1))
    if heads * value == workload.embed_dim:
        yield from table(
            "output",
            "",
            (
                "no_output_projection",
                "the output projection is left out",
                before("output", partial(replace, out=None), 1),
            ),
            (
                "output_projection_transposed",
                "the output projection's matrix is transposed",
                before("output", lambda weights: replace(weights, out=weights.out.T), 1),
            ),
        )


def unbiased(weights: Weights) -> Weights:
    """The weights without the biases of the input projections."""
    return weights.biased("out")


def rotary(base: float, workload: Workload, *, is_interleaved: bool) -> Mistake:
    """Other rotary positions than the workload's; the diagnosis fits the power of the base."""
    turn = partial(oracle.rotated, base=base, is_interleaved=is_interleaved)
    style = "interleaved, as in GPT-J" if is_interleaved else "in halves, as in Llama"
    words = f"query and key are rotated by their positions inside (rotary embedding, {style}, base {base:.6g})"

    def scores(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
        query, key, _ = oracle.in_place(workload, mask.rows, (query, key, key), -1)
        return steps.scores(turn(query, mask.rows), turn(key, mask.keys), mask)

    again = partial(rotary, workload=workload, is_interleaved=is_interleaved)
    mistake = wrong("rotary_inside", words, scores=scores)
    return replace(mistake, fit=lambda power: again(base ** min(max(power, -MOST_POWER), MOST_POWER)))


def of_scores(workload: Workload) -> Iterator[Mistake]:
    """Mistakes of the scores and weights."""
    for is_interleaved in (False, True) if workload.head_dim % 2 == 0 else ():
        yield from (rotary(base, workload, is_interleaved=is_interleaved) for base in ROTARY_BASES)
    root = math.sqrt(workload.head_dim)
    lengths = {"length 1": 1 / root, "length 1, without a scale": 1.0, "a root mean square of 1": root}
    for words, scale in lengths.items() if workload.head_dim > 1 else ():
        cosines = lambda q, k, _, scale=scale: product(normalize(q, dim=-1), normalize(k, dim=-1).mT) * scale  # noqa: E731
        words = f"query and key are normalised before their product (QK norm), to {words}"  # noqa: PLW2901
        yield wrong("query_key_normalised", words, scores=cosines)
    if workload.seq_len == workload.kv_len:
        words = "query and key have changed places in the scores"
        swapped: Callable[..., Tensor] = lambda query, key, mask: steps.scores(key, query, mask)  # noqa: E731
        yield wrong("query_key_swapped", words, "needs_all_rows", scores=swapped)
        words = "the weights are transposed"
        yield wrong("weights_transposed", words, "needs_all_rows", weights=after("weights", lambda x: x.mT))
    first = after("weights", lambda x: x[:, :1].expand_as(x))
    yield wrong("first_heads_weights_for_all", "the weights of head 0 are used in every head", weights=first)
    words = "query and key play no part: the output is the mean of the values"
    yield wrong("query_and_key_ignored", words, weights=equal_weights)


def equal_weights(masked: Tensor, mask: RowMask) -> Tensor:
    """Equal weights for all visible keys."""
    seen = mask.seen.to(masked.dtype)
    return (seen / seen.sum(dim=-1, keepdim=True).clamp(min=1)).expand_as(masked)


def by_part(scores: Tensor, mask: RowMask, change: Callable[..., Tensor], kinds: tuple[type[Mask], ...]) -> Tensor:
    """The masked scores, with `change(scores, part)` instead of the usual change for parts of these kinds."""
    for part in mask.rule.changes:
        scores = change(scores, part) if isinstance(part, kinds) else mask.change(scores, part)
    return hide(scores, mask.seen)


def biased(scores: Tensor, mask: RowMask, bias: Callable[..., Tensor]) -> Tensor:
    """The masked scores, with `bias(right, mask, part)` in place of each bias."""
    for part in mask.rule.changes:
        added = bias(mask.bias(part), mask, part).to(scores.dtype) if part.is_additive else None
        scores = mask.change(scores, part) if added is None else scores + added
    return hide(scores, mask.seen)


def of_biases(workload: Workload) -> Iterator[Mistake]:
    """Mistakes of biases."""
    parts = [part for part in workload.mask_rule.changes if part.is_additive]
    kinds = {type(part) for part in parts}

    def biases(*rows: tuple[str, str, Callable[..., Tensor]]) -> Iterator[Mistake]:
        yield from table(
            "masked_scores", "", *((name, words, partial(biased, bias=bias)) for name, words, bias in rows)
        )

    for part in parts:
        ignored = partial(by_part, change=lambda scores, _: scores, kinds=(type(part),))
        words = "the bias is never added to the scores" + f": {part}" * (len(parts) > 1)
        yield wrong("bias_ignored", words, masked_scores=ignored)
    if parts:
        yield from biases(
            ("bias_sign_flipped", "the bias has the wrong sign", lambda bias, *_: -bias),
            ("bias_scaled", "the bias is half as large as it should be", lambda bias, *_: bias / 2),
            ("bias_scaled", "the bias is twice as large as it should be", lambda bias, *_: bias * 2),
        )
    if workload.mask_rule.is_learned:
        detached = partial(biased, bias=lambda bias, *_: bias.detach())
        words = "the gradient of bias is 0: none reaches it"
        yield wrong("bias_gradient_zero", words, "is_gradient is_factor", masked_scores=detached)
        is_shared = all(shape[0] != workload.batch_size for shape in workload.operands.values())
        if workload.batch_size > 1 and is_shared:  # otherwise the others' gradients are 0
            words = "the gradient of the bias is that of the first batch row alone, not the sum over all"
            of_first = partial(biased, bias=lambda bias, mask, _: of_first_row(bias, mask.sizes[0]))
            yield wrong("bias_gradient_of_first_row", words, "is_gradient", masked_scores=of_first)
        yield from looked_up(next(part for part in parts if part.is_learned))
    if alibi := kinds & {*ALIBI}:
        heads, other = workload.num_heads, next(kind for kind in ALIBI if kind not in alibi)()
        first = 0 if heads & (heads - 1) == 0 else 1
        slopes = np.exp2(-8 * np.arange(first, heads + first) / heads) / masks.Alibi().per_head(heads)
        ratio = torch.from_numpy(slopes)[:, None, None]
        words = ("are counted from head 0: they begin with 1", "are 2^(-8h/H) though H is no power of 2")[first]
        yield from biases(("alibi_slopes", f"the slopes of ALiBi {words}", lambda bias, *_: bias * ratio.to(bias)))
        if workload.seq_len != workload.kv_len:
            words = f"the distances of ALiBi are counted from the other end, as in {other}"
            yield from biases(("alibi_aligned_at_other_end", words, lambda _, mask, __: mask.bias(other)))
    if masks.Additive in kinds and workload.seq_len == workload.kv_len:

        def swapped(bias: Tensor, mask: RowMask, part: Mask) -> Tensor:
            per_head = torch.from_numpy(part.per_head(len(bias)))[:, None, None]
            return part.bias(per_head, mask.keys.cpu(), mask.queries.cpu(), 0).to(bias)  # type: ignore[no-any-return]

        yield from biases(("bias_transposed", "query and key have changed places in the bias", swapped))


def of_first_row(bias: Tensor, batch_size: int) -> Tensor:
    """The bias (B, H, R, S) with a gradient only from the first batch row."""
    every = bias.expand(batch_size, *bias.shape[-3:])
    return torch.cat([every[:1], every[1:].detach()])


def looked_up(part: Mask) -> Iterator[Mistake]:
    """A learned bias that is looked up at another index, or in only one table."""

    def elsewhere(words: str, index: Callable[[RowMask], tuple[Tensor, ...]], without: str = "") -> Mistake:
        def bias(right: Tensor, mask: RowMask, each: Mask) -> Tensor:
            if type(each) is not type(part):
                return right
            row, head = torch.arange(mask.sizes[0])[:, None, None, None], torch.arange(mask.num_heads)[:, None, None]
            tables = {name: tensor * (name != without) for name, tensor in mask.inputs.items()}
            found: Tensor = part.looked_up(tables, (row, head, mask.queries), index(mask))
            return found

        return wrong("bias_looked_up_elsewhere", words, masked_scores=partial(biased, bias=bias))

    def bucket(mask: RowMask, further: int, sign: int, kind: Callable[..., Mask]) -> tuple[Tensor, ...]:
        ahead = (
            mask.keys - mask.queries - (mask.sizes[2] - mask.sizes[1]) * isinstance(part, masks.RelativeBucketsPast)
        ) * sign
        return kind(*part.arguments).index(torch.zeros_like(ahead), ahead + ahead.sign() * further, 0, mask.sizes[2])

    if isinstance(part, masks.Decomposed):
        columns = part.columns
        yield elsewhere(
            "the grid of the keys is read column by column",
            lambda mask: (
                mask.keys % (mask.sizes[2] // columns(mask.sizes[2])),
                mask.keys // (mask.sizes[2] // columns(mask.sizes[2])),
            ),
        )
        for axis, without in (("rows", "column_bias"), ("columns", "row_bias")):
            right = lambda mask: part.index(mask.queries, mask.keys, 0, mask.sizes[2])  # noqa: E731
            yield elsewhere(f"of the decomposed bias only that of the {axis} is added", right, without)
        return
    words = "the distances of the bias have the wrong sign"
    yield elsewhere(words, partial(bucket, further=0, sign=-1, kind=type(part)))
    words = "the distances of the bias are counted one too far"
    yield elsewhere(words, partial(bucket, further=1, sign=1, kind=type(part)))
    other = masks.RelativeBuckets if isinstance(part, masks.RelativeBucketsPast) else masks.RelativeBucketsPast
    words = "the buckets are those of the other half of T5, encoder for decoder"
    yield elsewhere(words, partial(bucket, further=0, sign=1, kind=other))


def of_softcap(workload: Workload) -> Iterator[Mistake]:
    """Mistakes of the softcap."""
    rule = workload.mask_rule
    if not any(isinstance(part, masks.Softcap) for part in rule.changes):
        return

    def capped(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return partial(by_part, change=change, kinds=(masks.Softcap,))

    def cut(scores: Tensor, part: Mask) -> Tensor:
        return scores.clamp(-part.arguments[0], part.arguments[0])

    def backwards(scores: Tensor, mask: RowMask) -> Tensor:
        for part in reversed(mask.rule.changes):
            scores = mask.change(scores, part)
        return hide(scores, mask.seen)

    straight = capped(lambda scores, part: scores + (part.transform(scores) - scores).detach())
    words = "the gradient through the softcap lacks its derivative, 1 - tanh^2"
    yield wrong("softcap_without_derivative", words, "is_gradient", masked_scores=straight)
    no_factor = capped(lambda scores, part: torch.tanh(scores / part.arguments[0]))
    yield from table(
        "masked_scores",
        "",
        ("softcap_ignored", "the scores are never capped", capped(lambda scores, _: scores)),
        ("softcap_not_multiplied", "the softcap lacks its last factor, x", no_factor),
        ("softcap_clamped", "the scores are cut off at -x and x instead of squashed by tanh", capped(cut)),
        (
            "softcap_after_mask",
            "the scores are capped after the mask",
            lambda scores, mask: mask.changed(hide(scores, mask.seen)),
        ),
        ("changes_in_other_order", "the mask's changes of the scores are made in the opposite order", backwards),
    )


def of_sinks(workload: Workload) -> Iterator[Mistake]:
    """Mistakes of the sinks."""
    if workload.sinks == "none":
        return
    scale = workload.score_scale

    def added(masked: Tensor, more: Tensor) -> Tensor:
        powers = (masked - masked.amax(dim=-1, keepdim=True)).exp().nan_to_num(0.0)
        return powers / (powers.sum(dim=-1, keepdim=True) + more)

    def to_last(weights: Tensor) -> Tensor:
        return torch.cat([weights[..., :-1], weights[..., -1:] + 1 - weights.sum(dim=-1, keepdim=True)], dim=-1)

    yield from table(
        "weights",
        "",
        ("sinks_ignored", "the sinks are ignored", lambda x, _: x.softmax(dim=-1).nan_to_num(0.0)),
        (
            "sink_without_exponential",
            "a sink is added to the sum without its exponential",
            lambda x, mask: added(x, mask.sinks),
        ),
        (
            "sink_without_maximum",
            "the maximum is not subtracted from the sink",
            lambda x, mask: added(x, mask.sinks.exp()),
        ),
        (
            "sink_scaled",
            "a sink is multiplied by the scale, as scores are",
            lambda x, mask: softmax_with_sinks(x, mask.sinks * scale),
        ),
        ("sink_weight_to_last_key", "the last key gets the weight of the sink", after("weights", to_last)),
    )
    detached: Callable[..., Tensor] = lambda x, mask: softmax_with_sinks(x, mask.sinks.detach())  # noqa: E731
    words = "the gradient of sinks is 0: none reaches it"
    yield wrong("sinks_gradient_zero", words, "is_gradient is_factor", weights=detached)


def values_in_keys(workload: Workload) -> Iterator[Mistake]:
    """Mistakes with values inside the memory of their keys."""
    if workload.layout == "value_in_key" and workload.value_dim < workload.head_dim:
        words = "the values are the last V numbers of their keys instead of the first"

        def heads(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
            return steps.heads(query, key, key[..., key.shape[-1] - value.shape[-1] :], mask)

        yield wrong("value_at_end_of_key", words, heads=heads)


def dropped(weights: Tensor, factor: float) -> Tensor:
    """The weights with some of them set to 0."""
    return weights * (torch.rand(weights.shape, device=weights.device) >= DROPPED) * factor


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor's memory read as if it were contiguous."""
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.is_contiguous() or room < tensor.numel():
        return tensor
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride(), 0)


def reused(output: Tensor) -> Tensor:
    """Copy the output into a shared buffer that later calls overwrite."""
    return STALE.setdefault((output.shape, output.dtype), output.detach().clone()).copy_(output)


def scaled_in_place(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """Scores after scaling the query in place."""
    query.data.mul_(mask.scale_for(query.shape[-1]))
    return product(query, key.mT)


def of_memory(workload: Workload) -> Iterator[Mistake]:
    """Randomness, and dependence on memory layout or earlier calls."""
    words = "dropout is active in evaluation"
    raised, as_it_was = (after("weights", partial(dropped, factor=factor)) for factor in (1 / (1 - DROPPED), 1.0))
    yield wrong("dropout_in_evaluation", words, "is_random", weights=raised)
    words = "dropout is active in evaluation, without rescaling"
    yield wrong("dropout_without_rescaling", words, "is_random", weights=as_it_was)
    if workload.scope == "module":
        return
    if workload.num_kv_heads > 1 and workload.kv_len > 1:
        words = "a tensor that is not contiguous is read as if it were"
        yield wrong("read_as_contiguous", words, "is_memory", heads=before("heads", contiguous, 1, 2))
    if workload.direction == "inference":
        words = "an output buffer is reused: a later call overwrites the output of an earlier one"
        yield wrong("stale_output_buffer", words, "is_memory", context=after("context", reused))
    if workload.head_dim > 1:
        words = "the call changes its input: the query is scaled in place"
        yield wrong("input_changed", words, "is_memory", scores=scaled_in_place)


def singles(workload: Workload) -> Iterator[Mistake]:
    """Every mistake without a family."""
    if workload.scope == "module":
        yield from projections(workload)
    for kind in (of_scores, of_biases, of_softcap, of_sinks, values_in_keys, of_memory):
        yield from kind(workload)
