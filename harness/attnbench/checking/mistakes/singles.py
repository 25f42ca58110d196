"""Mistakes of their own: projections, what models add to attention, caches, rotary positions, dropout, memory, gradients."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import permutations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from attnbench.checking import steps
from attnbench.checking.case import block_table, cache_scales, paged
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake, hide, product, project, wrong
from attnbench.contract import Weights, repeat_heads, softmax_with_sinks
from attnbench.workloads import masks
from attnbench.workloads.masks import Mask
from attnbench.workloads.workload import Workload

PARTS = ("query", "key", "value")
DROPPED = 0.5
STALE: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
ROTARY_BASES = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)


def regrouped(regroup: Callable[[list[Tensor]], Iterable[Tensor]]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """A projection whose weights and biases (H, K, ...) of query, key and value are regrouped."""

    def projected(x: Tensor, context: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
        given, named = weights.tensors(), dict[str, Tensor]()
        for kind in ("", "_bias") if weights.has_bias else ("",):
            names = [f"{part}{kind}" for part in PARTS]
            named |= dict(zip(names, regroup([given[name] for name in names]), strict=True))
        return project(x, context, Weights(**named))

    return projected


def in_order(parts: list[Tensor], order: tuple[int, ...]) -> list[Tensor]:
    return [parts[place] for place in order]


def by_feature(parts: list[Tensor]) -> Iterable[Tensor]:
    """(H*K,) read as (K, H)."""
    return (part.flatten(0, 1).unflatten(0, (part.shape[1], part.shape[0])).transpose(0, 1) for part in parts)


def by_head(parts: list[Tensor]) -> Iterable[Tensor]:
    """All queries, all keys, all values read head by head."""
    num_heads, head_dim = parts[0].shape[:2]
    return torch.cat([part.flatten(0, 1) for part in parts]).unflatten(0, (num_heads, 3, head_dim)).unbind(dim=1)


def in_thirds(parts: list[Tensor]) -> Iterable[Tensor]:
    """Head by head read as all queries, all keys, all values."""
    packed = torch.stack(parts, dim=1).flatten(0, 2)  # (H,3,K,...) -> (H*3*K,...)
    return (part.unflatten(0, parts[0].shape[:2]) for part in packed.chunk(3))


def projections(workload: Workload) -> Iterator[Mistake]:
    """Mistakes of the projections, in scope `module`."""
    heads, groups, width, value = workload.num_heads, workload.num_kv_heads, workload.head_dim, workload.value_dim
    if workload.bias in {"all", "qkv"}:
        words = "the biases of the input projections are dropped"
        change = partial(lambda x, context, weights: project(x, context, weights.biased("out")))
        yield wrong("no_input_biases", words, projection=change)
    shapes = [(heads, width), (groups, width), (groups, value)]
    for order in list(permutations(range(3)))[1:]:
        if [shapes[place] for place in order] == shapes:
            names = "{}, {} and {}".format(*(PARTS[place] for place in order))
            words = f"query, key and value are projected with the weights of {names}, in that order"
            yield wrong("projections_in_wrong_order", words, projection=regrouped(partial(in_order, order=order)))
    if heads > 1:
        words = "heads are split in the wrong order: (K, H) instead of (H, K)"
        yield wrong("split_feature_by_feature", words, projection=regrouped(by_feature))
        words = "heads are merged in the wrong order: feature by feature instead of head by head"
        change = lambda context, weights: steps.output(context.transpose(1, 3), weights)  # (B,H,R,V) -> (B,V,R,H)
        yield wrong("merged_feature_by_feature", words, output=change)
        words = "heads are merged in the wrong order: the last head first"
        yield wrong("merged_in_reverse", words, output=lambda context, weights: steps.output(context.flip(1), weights))
    if heads > 1 and heads == groups and width == value:
        words = "weights packed as all queries, all keys, all values are read head by head"
        yield wrong("packed_read_head_by_head", words, projection=regrouped(by_head))
        words = "weights packed head by head are read as all queries, all keys, all values"
        yield wrong("packed_read_in_thirds", words, projection=regrouped(in_thirds))
    if heads > 1 and workload.seq_len > 1:
        words = "heads are merged by a view without a transpose: tokens and heads are mixed up"
        yield wrong("merged_without_transpose", words, "needs_all_rows", output=merged_by_view)
    if heads * value == workload.embed_dim:
        words = "the output projection is left out"
        yield wrong("no_output_projection", words, output=lambda c, w: steps.output(c, replace(w, out=None)))
        words = "the output projection's matrix is transposed"
        yield wrong("output_projection_transposed", words, output=lambda c, w: steps.output(c, replace(w, out=w.out.T)))
    words = "the output projection's bias is dropped"
    yield wrong("no_output_bias", words, output=lambda c, w: steps.output(c, replace(w, out_bias=None)))


def merged_by_view(context: Tensor, weights: Weights) -> Tensor:
    """(B, H, R, V) read as (B, R, H*V)."""
    batch_size, _, num_rows, _ = context.shape
    return steps.output(context.reshape(batch_size, 1, num_rows, -1), weights)


def rotated(tensor: Tensor, places: Tensor, base: float, *, is_interleaved: bool) -> Tensor:
    """Rotary positions (https://arxiv.org/abs/2104.09864): pairs of columns turned by place times frequency."""
    half = tensor.shape[-1] // 2
    angle = places[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos().to(tensor), angle.sin().to(tensor)
    one, other = (tensor[..., 0::2], tensor[..., 1::2]) if is_interleaved else tensor.chunk(2, dim=-1)
    pairs = (one * cos - other * sin, other * cos + one * sin)
    return torch.stack(pairs, dim=-1).flatten(-2) if is_interleaved else torch.cat(pairs, dim=-1)


def rotary(base: float, *, is_interleaved: bool) -> Mistake:
    """Rotary positions inside."""
    style = "interleaved, as in GPT-J" if is_interleaved else "in halves, as in Llama"

    def scores(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
        turn = partial(rotated, base=base, is_interleaved=is_interleaved)
        return steps.scores(turn(query, mask.rows), turn(key, mask.keys), mask)

    words = f"query and key are rotated by their positions inside (rotary embedding, {style}, base {base:.6g})"
    return replace(wrong("rotary_inside", words, scores=scores), fit=lambda x: rotary(base**x, is_interleaved=is_interleaved))


def of_scores(workload: Workload) -> Iterator[Mistake]:
    """Mistakes of the scores, and of the softcap."""
    for is_interleaved in (False, True) if workload.head_dim % 2 == 0 else ():
        yield from (rotary(base, is_interleaved=is_interleaved) for base in ROTARY_BASES)
    root = math.sqrt(workload.head_dim)
    lengths = {"length 1": 1 / root, "length 1, without a scale": 1.0, "a root mean square of 1": root}
    for words, scale in lengths.items() if workload.head_dim > 1 else ():

        def cosines(query: Tensor, key: Tensor, mask: RowMask, scale: float) -> Tensor:
            return product(normalize(query, dim=-1), normalize(key, dim=-1).transpose(-2, -1)) * scale

        words = f"query and key are normalised before their product (QK norm), to {words}"
        yield wrong("query_key_normalised", words, scores=partial(cosines, scale=scale))
    if workload.seq_len == workload.kv_len:
        words = "query and key have changed places in the scores: entry (i, j) holds the score of query j with key i"
        swapped = lambda query, key, mask: steps.scores(key, query, mask)
        yield wrong("query_key_swapped", words, "needs_all_rows", scores=swapped)
        if workload.seq_len > 1:
            words = "the weights are transposed: rows and columns have changed places"
            transposed = lambda masked, mask: steps.weights(masked, mask).transpose(-2, -1)
            yield wrong("weights_transposed", words, "needs_all_rows", weights=transposed)
    if workload.num_heads > 1:
        words = "the weights of head 0 are used in every head"
        first = lambda masked, mask: steps.weights(masked, mask)[:, :1].expand_as(masked)
        yield wrong("first_heads_weights_for_all", words, weights=first)


def by_part(scores: Tensor, mask: RowMask, change: Callable[..., Tensor], kinds: tuple[type[Mask], ...]) -> Tensor:
    """The masked scores where parts of these kinds change the scores by `change(scores, part)` instead."""
    for part in mask.rule.changes:
        scores = change(scores, part) if isinstance(part, kinds) else mask.change(scores, part)
    return hide(scores, mask.seen)


def of_changes(workload: Workload) -> Iterator[Mistake]:
    """Mistakes of biases and of the softcap."""
    rule = workload.mask_rule
    kinds = {type(part) for part in rule.changes}
    biases = tuple(kind for kind in kinds if kind is not masks.Softcap)

    def changed(name: str, words: str, change: Callable[..., Tensor], only: tuple[type[Mask], ...], flags: str = "") -> Mistake:
        return wrong(name, words, flags, masked_scores=partial(by_part, change=change, kinds=only))

    for kind in sorted(biases, key=lambda each: each.name):
        ignored = "the bias is never added to the scores" + f": {kind.name}" * (len(biases) > 1)
        yield changed("bias_ignored", ignored, lambda scores, _: scores, (kind,))
    if biases:

        def with_bias(name: str, words: str, bias: Callable[[Tensor, RowMask, Mask], Tensor]) -> Mistake:
            def masked(scores: Tensor, mask: RowMask) -> Tensor:
                add = lambda scores, part: scores + bias(mask.bias(part), mask, part).to(scores.dtype)
                return by_part(scores, mask, add, biases)

            return wrong(name, words, "is_gradient is_factor" * name.endswith("gradient_zero"), masked_scores=masked)

        yield with_bias("bias_sign_flipped", "the bias has the wrong sign", lambda bias, *_: -bias)
        for times in (0.5, 2.0, workload.score_scale):
            words = f"the bias is multiplied by {times:.4g}"
            yield with_bias("bias_scaled", words, partial(lambda bias, *_, times: bias * times, times=times))
        if rule.is_learned:
            words = "no gradient reaches the learned bias"
            yield with_bias("bias_gradient_zero", words, lambda bias, *_: bias.detach())
            yield from looked_up_elsewhere(workload)
        if workload.seq_len != workload.kv_len and (alibi := kinds & {masks.Alibi, masks.AlibiBottomRight}):
            other = masks.AlibiBottomRight() if masks.Alibi in alibi else masks.Alibi()
            words = f"the distances of ALiBi are counted from the other end: as in {other}"
            name = "alibi_aligned_at_end" if masks.Alibi in alibi else "alibi_aligned_at_start"
            yield with_bias(name, words, lambda _, mask, __: mask.bias(other))
        if kinds & {masks.Alibi, masks.AlibiBottomRight}:
            heads = workload.num_heads
            words = "the slopes of ALiBi are 2^(-8h/H) for a number of heads that is no power of 2"
            slopes = np.exp2(-8 * np.arange(1, heads + 1) / heads)
            name = "alibi_slopes_not_filled_up"
            if not heads & (heads - 1):
                words = "the slopes of ALiBi are counted from head 0, so that they begin with 1 instead of 2^(-8/H)"
                name, slopes = "alibi_slopes_from_one", np.exp2(-8 * np.arange(heads) / heads)
            ratio = torch.from_numpy(slopes / masks.Alibi().per_head(heads))[:, None, None]
            yield with_bias(name, words, lambda bias, *_: bias * ratio.to(bias))
        if masks.Additive in kinds and workload.seq_len == workload.kv_len:

            def swapped(bias: Tensor, mask: RowMask, part: Mask) -> Tensor:
                per_head = torch.from_numpy(part.per_head(len(bias)))[:, None, None]
                result: Tensor = part.bias(per_head, mask.keys.cpu(), mask.queries.cpu(), 0)
                return result.to(bias)

            yield with_bias("bias_transposed", "query and key have changed places in the bias", swapped)
    if masks.Softcap in kinds:
        cap = (masks.Softcap,)
        yield changed("softcap_ignored", "the scores are never capped", lambda scores, _: scores, cap)
        words = "the softcap lacks its last factor: tanh(score / x) without x"
        yield changed("softcap_not_multiplied", words, lambda scores, part: torch.tanh(scores / part.arguments[0]), cap)
        words = "the scores are cut off at -x and x instead of squashed by tanh"
        cut = lambda scores, part: scores.clamp(-part.arguments[0], part.arguments[0])
        yield changed("softcap_clamped", words, cut, cap)
        words = "the gradient through the softcap lacks its derivative, 1 - tanh^2"
        straight = lambda scores, part: scores + (part.transform(scores) - scores).detach()
        yield changed("softcap_without_derivative", words, straight, cap, "is_gradient")
        if rule.hides:
            words = "the scores are capped after the mask: a hidden key has the score -x of softcap(x) instead of -inf"
            yield wrong("softcap_after_mask", words, masked_scores=lambda scores, mask: mask.changed(hide(scores, mask.seen)))
        if len(rule.changes) > 1:

            def other_order(scores: Tensor, mask: RowMask) -> Tensor:
                for part in reversed(mask.rule.changes):
                    scores = mask.change(scores, part)
                return hide(scores, mask.seen)

            words = "the mask's changes of the scores are made in the opposite order: they run from left to right"
            yield wrong("changes_in_other_order", words, masked_scores=other_order)


def looked_up_elsewhere(workload: Workload) -> Iterator[Mistake]:
    """Learned biases that are looked up at another index, or in one table alone."""

    def looked_up(words: str, index: Callable[[RowMask, Mask], tuple[Tensor, ...]], without: str = "") -> Mistake:
        def masked(scores: Tensor, mask: RowMask) -> Tensor:
            row = torch.arange(mask.sizes[0])[:, None, None, None]
            head = torch.arange(mask.num_heads)[:, None, None]
            tables = {name: table * (name != without) for name, table in mask.inputs.items()}

            def change(scores: Tensor, part: Mask) -> Tensor:
                bias: Tensor = part.looked_up(tables, (row, head, mask.queries), index(mask, part))
                return scores + bias.to(scores.dtype)

            return by_part(scores, mask, change, LEARNED)

        return wrong("bias_looked_up_elsewhere", words, masked_scores=masked)

    def bucket(mask: RowMask, part: Mask, further: int, sign: int, kind: type[Mask] | None = None) -> tuple[Tensor, ...]:
        end = 0 if type(part) is masks.RelativeBuckets else mask.sizes[2] - mask.sizes[1]
        ahead = (mask.keys - mask.queries - end) * sign
        ahead = ahead + ahead.sign() * further
        table = part if kind is None else kind(*part.arguments)
        return table.index(torch.zeros_like(ahead), ahead, 0, mask.sizes[2])

    LEARNED = (masks.RelativeBuckets, masks.Decomposed)
    part = next(part for part in workload.mask_rule.parts if part.is_learned)
    if isinstance(part, masks.Decomposed):
        right = lambda mask, part: part.index(mask.queries, mask.keys, 0, mask.sizes[2])

        def columns(mask: RowMask, part: Mask) -> tuple[Tensor, ...]:
            rows = mask.sizes[2] // part.columns(mask.sizes[2])  # type: ignore[attr-defined]
            return mask.keys % rows, mask.keys // rows

        yield looked_up("of the decomposed bias only that of the rows is added", right, "column_bias")
        yield looked_up("of the decomposed bias only that of the columns is added", right, "row_bias")
        yield looked_up("the grid of the keys is read column by column instead of row by row", columns)
    elif workload.kv_len > 1:
        words = "the distances of the bias have the wrong sign: keys before the query are taken for keys after it"
        yield looked_up(words, partial(bucket, further=0, sign=-1))
        words = "the distances of the bias are counted one too far: neighbours have the bucket of the distance 2"
        yield looked_up(words, partial(bucket, further=1, sign=1))
        kind = masks.RelativeBuckets if type(part) is masks.RelativeBucketsPast else masks.RelativeBucketsPast
        words = "the buckets are those of the other half of T5: of the decoder for the encoder, or the other way round"
        yield looked_up(words, partial(bucket, further=0, sign=1, kind=kind))


def of_sinks(workload: Workload) -> Iterator[Mistake]:
    """Mistakes of the sinks."""
    if workload.sinks == "none":
        return

    def exponentials(masked: Tensor) -> Tensor:
        return (masked - masked.amax(dim=-1, keepdim=True)).exp().nan_to_num(0.0)

    def added(masked: Tensor, more: Tensor) -> Tensor:
        return exponentials(masked) / (exponentials(masked).sum(dim=-1, keepdim=True) + more)

    def to_last(masked: Tensor, mask: RowMask) -> Tensor:
        result = steps.weights(masked, mask)
        return torch.cat([result[..., :-1], result[..., -1:] + 1 - result.sum(dim=-1, keepdim=True)], dim=-1)

    forms: dict[tuple[str, str], Callable[..., Tensor]] = {
        ("sinks_ignored", "the sinks are ignored: the weights of a query's keys add up to 1"): (
            lambda masked, _: masked.softmax(dim=-1).nan_to_num(0.0)
        ),
        ("sink_without_exponential", "a sink is added to the softmax's sum as it is, without its exponential"): (
            lambda masked, mask: added(masked, mask.sinks)
        ),
        ("sink_without_maximum", "the maximum is subtracted from the scores, and not from the sink"): (
            lambda masked, mask: added(masked, mask.sinks.exp())
        ),
        ("sink_scaled", "a sink is multiplied by the scale, as scores are"): lambda masked, mask: softmax_with_sinks(
            masked, mask.sinks * workload.score_scale
        ),
        ("sink_weight_to_last_key", "the weight of a sink is not dropped: the last key gets it"): to_last,
        ("sinks_gradient_zero", "no gradient reaches the sinks"): lambda masked, mask: softmax_with_sinks(
            masked, mask.sinks.detach()
        ),
    }
    for (name, words), form in forms.items():
        yield wrong(name, words, "is_gradient is_factor" * name.endswith("gradient_zero"), weights=form)


def of_caches(workload: Workload) -> Iterator[Mistake]:
    """Mistakes of keys and values that are read from each other, from pages, or from 8 bits."""

    def read(words: str, name: str, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Mistake:
        return wrong(name, words, heads=lambda query, key, value, mask: steps.heads(query, *change(key, value), mask))

    if workload.layout == "value_in_key" and workload.value_dim < workload.head_dim:
        words = "the values are the last V numbers of their keys instead of the first"
        yield read(words, "value_at_end_of_key", lambda key, value: (key, key[..., key.shape[-1] - value.shape[-1] :]))
    if workload.page_size:
        table = block_table(workload)
        tables = {"the block table is ignored: a row's pages are read one after the other as they lie": (
            torch.arange(table.numel()).view(table.shape))}
        tables["each row reads the pages of the next one, and the last those of row 0"] = table.roll(-1, 0)
        tables["each row's pages are read in the opposite order"] = table.flip(1)
        for words, other in tables.items():

            def by_table(key: Tensor, value: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
                def gathered(tensor: Tensor) -> Tensor:
                    pages = paged(tensor, table.to(tensor.device), workload.page_size)[other.to(tensor.device)]
                    return pages.transpose(1, 2).flatten(2, 3)[:, :, : workload.kv_len]  # (B,pages,G,page,K) -> (B,G,S,K)

                return gathered(key), gathered(value)

            if not torch.equal(other, table):
                yield read(words, "pages_in_wrong_order", partial(by_table, other=other))
    if workload.cache_dtype != "same":

        def scale(tensor: Tensor) -> Tensor:
            return cache_scales(tensor)[:, None, None]

        def first(tensor: Tensor) -> Tensor:
            return tensor * (scale(tensor)[:1] / scale(tensor))

        yield read("the keys of the cache are not multiplied by their scale", "cache_scale_ignored", lambda k, v: (k / scale(k), v))
        words = "the values of the cache are not multiplied by their scale"
        yield read(words, "cache_scale_ignored", lambda k, v: (k, v / scale(v)))
        words = "the keys of the cache are multiplied by the scale of the values, and the other way round"
        yield read(words, "cache_scales_exchanged", lambda k, v: (k * scale(v) / scale(k), v * scale(k) / scale(v)))
        if workload.num_kv_heads > 1:
            words = "the scale of key/value head 0 is used for every head of the cache"
            yield read(words, "cache_scale_of_first_head", lambda k, v: (first(k), first(v)))


def some_dropped(masked: Tensor, mask: RowMask, factor: float) -> Tensor:
    """The weights, some of them 0."""
    return steps.weights(masked, mask) * (torch.rand(masked.shape, device=masked.device) >= DROPPED) * factor


def from_memory(workload: Workload) -> Iterator[Mistake]:
    """What is random, or depends on how tensors lie in memory or on earlier calls."""
    words = "dropout is active in evaluation: some weights are 0 and the others scaled up"
    scaled_up = partial(some_dropped, factor=1 / (1 - DROPPED))
    yield wrong("dropout_in_evaluation", words, "is_random", weights=scaled_up)
    words = "dropout is active in evaluation, and without rescaling: some weights are 0, the others as they were"
    yield wrong("dropout_without_rescaling", words, "is_random", weights=partial(some_dropped, factor=1.0))
    if workload.scope == "module":
        return

    def contiguous(tensor: Tensor) -> Tensor:
        room = tensor.untyped_storage().nbytes() // tensor.element_size()
        if tensor.is_contiguous() or room < tensor.numel():
            return tensor
        return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride(), 0)

    def stale(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
        result = steps.context(weights, value, mask)
        return STALE.setdefault((result.shape, result.dtype), result.detach().clone()).copy_(result)

    def scaled_in_place(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
        query.data.mul_(mask.scale_for(query.shape[-1]))
        return product(query, key.transpose(-2, -1))

    if workload.num_kv_heads > 1 and workload.kv_len > 1:
        as_it_lies = lambda query, key, value, mask: steps.heads(query, contiguous(key), contiguous(value), mask)
        words = "a tensor that is not contiguous is read as if it were"
        yield wrong("read_as_contiguous", words, "is_memory", heads=as_it_lies)
    if workload.direction == "inference":
        words = "an output buffer is reused: a later call overwrites the output of an earlier one"
        yield wrong("stale_output_buffer", words, "is_memory", context=stale)
    if workload.head_dim > 1:
        words = "the call changes its input: the query is scaled in place"
        yield wrong("input_changed", words, "is_memory", scores=scaled_in_place)


def backward(workload: Workload) -> Iterator[Mistake]:
    """Mistakes in the backward pass alone that are no factor of a gradient."""
    if workload.direction == "inference":
        return

    def uncorrected(masked: Tensor, mask: RowMask) -> Tensor:
        finite = masked.nan_to_num(0.0, 0.0, 0.0)
        return masked.softmax(dim=-1).nan_to_num(0.0).detach() * (finite - finite.detach() + 1)

    def later_half(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
        half = weights.shape[2] // 2
        return torch.cat([product(weights[:, :, :half], value.detach()), product(weights[:, :, half:], value)], dim=2)

    def first_of_group(tensor: Tensor, times: int) -> Tensor:
        rest = tensor.detach()[:, :, None].expand(-1, -1, times - 1, -1, -1)
        return torch.cat([tensor[:, :, None], rest], dim=2).flatten(1, 2)

    def recomputed(query: Tensor, key: Tensor, value: Tensor, mask: RowMask, dtype: torch.dtype) -> Tensor:
        def rounded(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
            right = steps.scores(query, key, mask)
            return right + (right.to(dtype).to(right.dtype) - right).detach()

        rough = steps.attend(query, key, value, mask, {"scores": rounded})["context"]
        return rough + (steps.attend(query, key, value, mask)["context"] - rough).detach()

    for dtype in (torch.bfloat16, torch.float16) if workload.dtype.startswith("float") else ():
        words = f"the backward pass recomputes the scores in {str(dtype).removeprefix('torch.')}"
        yield wrong("recomputed_in_half", words, "is_gradient", whole=partial(recomputed, dtype=dtype))
    words = "the gradient through the softmax lacks its second term: weights * (grad - sum(weights * grad))"
    yield wrong("softmax_gradient_without_correction", words, "is_gradient", weights=uncorrected)
    if workload.seq_len > 1:
        words = "the gradient of the values sums over the later half of the queries alone"
        yield wrong("gradient_of_value_partly_lost", words, "is_gradient needs_all_rows", context=later_half)
    if workload.num_kv_heads < workload.num_heads:
        times = workload.num_heads // workload.num_kv_heads
        words = "a shared key/value head receives the gradient of its group's first query head alone"
        change = lambda query, key, value, mask: (first_of_group(key, times), first_of_group(value, times))
        yield wrong("gradient_from_first_of_group", words, "is_gradient", heads=change)


def singles(workload: Workload) -> Iterator[Mistake]:
    """Every mistake of its own."""
    if workload.scope == "module":
        yield from projections(workload)
    yield from of_scores(workload)
    yield from of_changes(workload)
    yield from of_sinks(workload)
    yield from of_caches(workload)
    yield from from_memory(workload)
    yield from backward(workload)
    words = "query and key play no part: each output is the plain mean of the values that the query sees"
    mean = lambda weights, value, mask: product(
        (seen := mask.seen.to(value.dtype)) / seen.sum(dim=-1, keepdim=True).clamp(min=1), value
    )
    yield wrong("query_and_key_ignored", words, context=mean)
