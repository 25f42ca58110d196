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
from attnbench.checking.steps import Mistake, after, before, hide, product, with_bias, with_change, wrong
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


def regrouped(regroup: Callable[[list[Tensor]], Iterable[Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    """A projection whose weights and biases (H, K, ...) of query, key and value are regrouped."""

    def projected(x: Tensor, context: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        tensors, named = weights.filled().tensors(), dict[str, Tensor]()
        for kind in ("", "_bias") if weights.has_bias else ("",):
            names = [f"{part}{kind}" for part in PARTS]
            named |= dict(zip(names, regroup([tensors[name] for name in names]), strict=True))
        return oracle.project(x, context, Weights(**named))

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
            names = "{}, {} and {}".format(*(PARTS[at] for at in order))
            words = f"query, key and value are projected with the weights of {names}, in that order"
            change = regrouped(lambda parts, order=order: [parts[place] for place in order])  # type: ignore[misc]
            yield wrong("projections_in_wrong_order", words, projection=change)
    unbiased = before("projection", lambda weights: weights.biased("out"), 2)
    yield wrong("no_input_biases", "the biases of the input projections are dropped", projection=unbiased)
    words = "heads are split in the wrong order: (K, H) instead of (H, K)"
    yield wrong("split_feature_by_feature", words, projection=regrouped(by_feature))
    if heads == groups and width == value:
        words = "weights packed as all queries, keys, values are read head by head"
        yield wrong("packed_read_head_by_head", words, projection=regrouped(by_head))
        words = "weights packed head by head are read as all queries, keys, values"
        yield wrong("packed_read_in_thirds", words, projection=regrouped(in_thirds))
    words = "heads are merged feature by feature instead of head by head"
    by_features = before("output", lambda x: x.transpose(1, 3), 0)  # (B,H,R,V) -> (B,V,R,H)
    yield wrong("merged_feature_by_feature", words, output=by_features)
    words = "heads are merged by a view without a transpose"
    by_view = before("output", lambda x: x.reshape(x.shape[0], 1, x.shape[2], -1), 0)  # (B,H,R,V) read as (B,R,H*V)
    yield wrong("merged_without_transpose", words, "needs_all_rows", output=by_view)
    words = "the output projection's bias is dropped"
    yield wrong("no_output_bias", words, output=before("output", partial(replace, out_bias=None), 1))
    if heads * value == workload.embed_dim:
        words = "the output projection is left out"
        yield wrong("no_output_projection", words, output=before("output", partial(replace, out=None), 1))
        words = "the output projection's matrix is transposed"
        transposed = before("output", lambda weights: replace(weights, out=weights.out.T), 1)
        yield wrong("output_projection_transposed", words, output=transposed)


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
    zeros: Callable[..., Tensor] = lambda x, mask: hide(torch.zeros_like(x), mask.seen)  # noqa: E731
    equal: Callable[..., Tensor] = lambda x, mask: zeros(x, mask).softmax(dim=-1).nan_to_num(0.0)  # noqa: E731
    yield wrong("query_and_key_ignored", words, weights=equal)


def of_biases(workload: Workload) -> Iterator[Mistake]:
    """Mistakes of biases."""
    parts = [part for part in workload.mask_rule.changes if part.is_additive]
    kinds, is_square = {type(part) for part in parts}, workload.seq_len == workload.kv_len

    def biased(name: str, words: str, bias: Callable[..., Tensor], flags: str = "") -> Mistake:
        return wrong(name, words, flags, masked_scores=with_bias(bias))

    for part in parts:
        words = "the bias is never added to the scores" + f": {part}" * (len(parts) > 1)
        yield biased("bias_ignored", words, lambda bias, _, each, part=part: bias * (type(each) is not type(part)))
    if parts:
        yield biased("bias_sign_flipped", "the bias has the wrong sign", lambda bias, *_: -bias)
        yield biased("bias_scaled", "the bias is half as large as it should be", lambda bias, *_: bias / 2)
        yield biased("bias_scaled", "the bias is twice as large as it should be", lambda bias, *_: bias * 2)
    if workload.mask_rule.is_learned:
        words = "the gradient of bias is 0: none reaches it"
        yield biased("bias_gradient_zero", words, lambda bias, *_: bias.detach(), "is_gradient is_factor")
        is_shared = all(shape[0] != workload.batch_size for shape in workload.operands.values())
        if workload.batch_size > 1 and is_shared:  # otherwise the others' gradients are 0
            words = "the gradient of the bias is that of the first batch row alone, not the sum over all"
            of_first = lambda bias, *_: torch.cat([bias[:1], bias[1:].detach()])  # noqa: E731
            yield biased("bias_gradient_of_first_row", words, of_first, "is_gradient")
        yield from looked_up(next(part for part in parts if part.is_learned))
    if alibi := kinds & {*ALIBI}:
        heads, other = workload.num_heads, next(kind for kind in ALIBI if kind not in alibi)()
        first = 0 if heads & (heads - 1) == 0 else 1
        slopes = np.exp2(-8 * np.arange(first, heads + first) / heads) / masks.Alibi().per_head(heads)
        ratio = torch.from_numpy(slopes)[:, None, None]
        words = ("are counted from head 0: they begin with 1", "are 2^(-8h/H) though H is no power of 2")[first]
        yield biased("alibi_slopes", f"the slopes of ALiBi {words}", lambda bias, *_: bias * ratio.to(bias))
        if not is_square:
            words = f"the distances of ALiBi are counted from the other end, as in {other}"
            yield biased("alibi_aligned_at_other_end", words, lambda _, mask, __: mask.bias(other))
    if masks.Additive in kinds and is_square:

        def swapped(bias: Tensor, mask: RowMask, part: Mask) -> Tensor:
            per_head = torch.from_numpy(part.per_head(mask.num_heads))[:, None, None]
            return part.bias(per_head, mask.keys.cpu(), mask.queries.cpu(), 0).to(bias)  # type: ignore[no-any-return]

        yield biased("bias_transposed", "query and key have changed places in the bias", swapped)


def looked_up(part: Mask) -> Iterator[Mistake]:
    """A learned bias that is looked up at another index, or in only one table."""

    def elsewhere(words: str, index: Callable[[RowMask], tuple[Tensor, ...]], without: str = "") -> Mistake:
        def bias(right: Tensor, mask: RowMask, each: Mask) -> Tensor:
            if type(each) is not type(part):
                return right
            row, head = torch.arange(mask.sizes[0])[:, None, None, None], torch.arange(mask.num_heads)[:, None, None]
            tables = {name: tensor * (name != without) for name, tensor in mask.inputs.items()}
            numbers: Tensor = part.looked_up(tables, (row, head, mask.queries), index(mask))
            return numbers

        return wrong("bias_looked_up_elsewhere", words, masked_scores=with_bias(bias))

    if isinstance(part, masks.Decomposed):

        def by_column(mask: RowMask) -> tuple[Tensor, ...]:
            rows = mask.sizes[2] // part.columns(mask.sizes[2])
            return mask.keys % rows, mask.keys // rows

        yield elsewhere("the grid of the keys is read column by column", by_column)
        for axis, without in (("rows", "column_bias"), ("columns", "row_bias")):
            right = lambda mask: part.index(mask.queries, mask.keys, 0, mask.sizes[2])  # noqa: E731
            yield elsewhere(f"of the decomposed bias only that of the {axis} is added", right, without)
        return
    is_past = isinstance(part, masks.RelativeBucketsPast)

    def bucket(mask: RowMask, further: int, sign: int, kind: Callable[..., Mask]) -> tuple[Tensor, ...]:
        ahead = (mask.keys - mask.queries - (mask.sizes[2] - mask.sizes[1]) * is_past) * sign
        return kind(*part.arguments).index(torch.zeros_like(ahead), ahead + ahead.sign() * further, 0, mask.sizes[2])

    words = "the distances of the bias have the wrong sign"
    yield elsewhere(words, partial(bucket, further=0, sign=-1, kind=type(part)))
    words = "the distances of the bias are counted one too far"
    yield elsewhere(words, partial(bucket, further=1, sign=1, kind=type(part)))
    words = "the buckets are those of the other half of T5, encoder for decoder"
    other = masks.RelativeBuckets if is_past else masks.RelativeBucketsPast
    yield elsewhere(words, partial(bucket, further=0, sign=1, kind=other))


def of_softcap(workload: Workload) -> Iterator[Mistake]:
    """Mistakes of the softcap."""
    if not any(isinstance(part, masks.Softcap) for part in workload.mask_rule.changes):
        return

    def capped(change: Callable[[Tensor, Mask, float], Tensor]) -> Callable[..., Tensor]:
        def changed(scores: Tensor, _: RowMask, part: Mask) -> Tensor | None:
            return change(scores, part, part.arguments[0]) if isinstance(part, masks.Softcap) else None

        return with_change(changed)

    def backwards(scores: Tensor, mask: RowMask) -> Tensor:
        for part in reversed(mask.rule.changes):
            scores = mask.change(scores, part)
        return hide(scores, mask.seen)

    straight = capped(lambda scores, part, _: scores + (part.transform(scores) - scores).detach())
    words = "the gradient through the softcap lacks its derivative, 1 - tanh^2"
    yield wrong("softcap_without_derivative", words, "is_gradient", masked_scores=straight)
    yield wrong("softcap_ignored", "the scores are never capped", masked_scores=capped(lambda scores, *_: scores))
    no_factor = capped(lambda scores, _, most: torch.tanh(scores / most))
    yield wrong("softcap_not_multiplied", "the softcap lacks its last factor, x", masked_scores=no_factor)
    words = "the scores are cut off at -x and x instead of squashed by tanh"
    yield wrong("softcap_clamped", words, masked_scores=capped(lambda scores, _, most: scores.clamp(-most, most)))
    late: Callable[..., Tensor] = lambda scores, mask: mask.changed(hide(scores, mask.seen))  # noqa: E731
    yield wrong("softcap_after_mask", "the scores are capped after the mask", masked_scores=late)
    words = "the mask's changes of the scores are made in the opposite order"
    yield wrong("changes_in_other_order", words, masked_scores=backwards)


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

    yield wrong("sinks_ignored", "the sinks are ignored", weights=lambda x, _: x.softmax(dim=-1).nan_to_num(0.0))
    words = "a sink is added to the sum without its exponential"
    yield wrong("sink_without_exponential", words, weights=lambda x, mask: added(x, mask.sinks))
    words = "the maximum is not subtracted from the sink"
    yield wrong("sink_without_maximum", words, weights=lambda x, mask: added(x, mask.sinks.exp()))
    words = "a sink is multiplied by the scale, as scores are"
    yield wrong("sink_scaled", words, weights=lambda x, mask: softmax_with_sinks(x, mask.sinks * scale))
    words = "the last key gets the weight of the sink"
    yield wrong("sink_weight_to_last_key", words, weights=after("weights", to_last))
    words = "the gradient of sinks is 0: none reaches it"
    detached: Callable[..., Tensor] = lambda x, mask: softmax_with_sinks(x, mask.sinks.detach())  # noqa: E731
    yield wrong("sinks_gradient_zero", words, "is_gradient is_factor", weights=detached)


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
    raised, plain = (after("weights", partial(dropped, factor=factor)) for factor in (1 / (1 - DROPPED), 1.0))
    yield wrong("dropout_in_evaluation", words, "is_random", weights=raised)
    yield wrong("dropout_without_rescaling", f"{words}, without rescaling", "is_random", weights=plain)
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
    if workload.layout == "value_in_key" and workload.value_dim < workload.head_dim:
        words = "the values are the last V numbers of their keys instead of the first"
        last: Callable[..., object] = lambda q, k, v, m: steps.heads(q, k, k[..., k.shape[-1] - v.shape[-1] :], m)  # noqa: E731
        yield wrong("value_at_end_of_key", words, heads=last)


def singles(workload: Workload) -> Iterator[Mistake]:
    """Every mistake without a family."""
    if workload.scope == "module":
        yield from projections(workload)
    for kind in (of_scores, of_biases, of_softcap, of_sinks, of_memory):
        yield from kind(workload)
