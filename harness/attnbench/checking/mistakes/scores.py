"""Mistakes before the softmax: projections, heads, the scores and their scale, what a mask adds, caps and hides."""

import functools
import math
import operator
from collections.abc import Callable, Iterable
from itertools import permutations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from attnbench.checking import steps
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Condition, has_several, hide, is_square, mistake, product, project
from attnbench.contract import Weights, repeat_heads
from attnbench.workloads import masks
from attnbench.workloads.masks import Mask, Padding, Softcap
from attnbench.workloads.workload import Workload

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
PARTS = ("query", "key", "value")
ALIBI = (masks.Alibi, masks.AlibiBottomRight)
BIASES = (*ALIBI, masks.Additive, masks.RelativeBuckets, masks.RelativeBucketsPast)
WINDOWS = (masks.SlidingWindow, masks.SlidingWindowBottomRight)
AT_THE_END: dict[type[Mask], type[Mask]] = {
    masks.Causal: masks.CausalBottomRight,
    masks.SlidingWindow: masks.SlidingWindowBottomRight,
}
AT_THE_START = {end: start for start, end in AT_THE_END.items()}
Kinds = tuple[type[Mask], ...]


def packs_equal_heads(workload: Workload) -> bool:
    """Whether query, key and value have as many heads, of the same width."""
    return workload.num_heads == workload.num_kv_heads and workload.head_dim == workload.value_dim


def project_regrouped(
    x: Tensor, context: Tensor, weights: Weights, regroup: Callable[[list[Tensor]], Iterable[Tensor]]
) -> Triple:
    """Project with the rows (H, K, ...) of query, key and value regrouped: those of the weights and of the biases."""
    given = weights.filled().tensors()
    named: dict[str, Tensor] = {}
    for kind in ("", "_bias") if weights.has_bias else ("",):
        names = [f"{part}{kind}" for part in PARTS]
        named |= dict(zip(names, regroup([given[name] for name in names]), strict=True))
    return project(x, context, Weights(**named))


def is_wide(workload: Workload) -> bool:
    """Whether a rounding to bfloat16 inside is a mistake.

    In float16 it is 4 times coarser, which is within what honest forms do to their scores.
    """
    return workload.dtype in {"float32", "float64"}


def coarse(tensor: Tensor) -> Tensor:
    """The values rounded to bfloat16."""
    return tensor.bfloat16().to(tensor.dtype)


@mistake("projection")
def no_input_biases(x: Tensor, context: Tensor, weights: Weights) -> Triple:
    """The biases of the input projections are dropped."""
    return project(x, context, Weights(query=weights.query, key=weights.key, value=weights.value))


@mistake("projection", has_several("num_heads", "seq_len"), needs_all_rows=True)
def projected_without_transpose(x: Tensor, context: Tensor, weights: Weights) -> Triple:
    """Heads are split by a view or reshape without a transpose: (B, T, H*K) read as (B, H, T, K)."""
    query, key, value = (made.transpose(1, 2).reshape(made.shape) for made in project(x, context, weights))
    return query, key, value


@mistake("projection", has_several("num_heads", "head_dim"))
def split_feature_by_feature(x: Tensor, context: Tensor, weights: Weights) -> Triple:
    """Heads are split in the wrong order: (K, H) instead of (H, K)."""

    def regroup(parts: list[Tensor]) -> Iterable[Tensor]:  # (H*K,) read as (K,H)
        return (part.flatten(0, 1).unflatten(0, (part.shape[1], part.shape[0])).transpose(0, 1) for part in parts)

    return project_regrouped(x, context, weights, regroup)


def wrong_orders(workload: Workload) -> dict[str, tuple[int, ...]]:
    """Every wrong order in which each part has weights of its own shape, as in "key, query and value": (1, 0, 2)."""
    groups, width, value = workload.num_kv_heads, workload.head_dim, workload.value_dim
    shapes = [(workload.num_heads, width), (groups, width), (groups, value)]
    orders = [order for order in permutations(range(3)) if [shapes[place] for place in order] == shapes]
    return {"{}, {} and {}".format(*(PARTS[place] for place in order)): order for order in orders[1:]}


@mistake("projection", choices=wrong_orders)
def projections_in_wrong_order(x: Tensor, context: Tensor, weights: Weights, choice: tuple[int, ...]) -> Triple:
    """Query, key and value are projected with the weights of {choice}, in that order."""
    return project_regrouped(x, context, weights, lambda parts: [parts[place] for place in choice])


@mistake("projection", has_several("num_heads"), packs_equal_heads)
def packed_read_head_by_head(x: Tensor, context: Tensor, weights: Weights) -> Triple:
    """Weights packed as all queries, all keys, all values are read head by head."""

    def regroup(parts: list[Tensor]) -> Iterable[Tensor]:
        num_heads, head_dim = parts[0].shape[:2]
        read = torch.cat([part.flatten(0, 1) for part in parts]).unflatten(0, (num_heads, 3, head_dim))
        return read[:, 0], read[:, 1], read[:, 2]

    return project_regrouped(x, context, weights, regroup)


@mistake("projection", has_several("num_heads"), packs_equal_heads)
def packed_read_in_thirds(x: Tensor, context: Tensor, weights: Weights) -> Triple:
    """Weights packed head by head are read as all queries, all keys, all values."""

    def regroup(parts: list[Tensor]) -> Iterable[Tensor]:
        packed = torch.stack(parts, dim=1).flatten(0, 2)  # (H,3,K,...) -> (H*3*K,...)
        return (part.unflatten(0, parts[0].shape[:2]) for part in packed.chunk(3))

    return project_regrouped(x, context, weights, regroup)


@mistake("projection", is_wide, is_rounding=True, choices=lambda _: {"tokens": "x", "projection weights": "weights"})
def bfloat16_projections(x: Tensor, context: Tensor, weights: Weights, choice: str) -> Triple:
    """The {choice} are rounded to bfloat16 on the way."""
    if choice == "x":
        return project(coarse(x), coarse(context), weights)
    return project(x, context, weights.map(coarse))


@mistake("heads", lambda workload: 1 < workload.num_kv_heads < workload.num_heads)
def kv_heads_interleaved(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """Query head h reads key/value head h % G instead of h // (H / G): repeat instead of repeat_interleave."""
    times = query.shape[1] // key.shape[1]
    return key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1)


@mistake("heads", has_several("num_kv_heads"))
def first_kv_head_for_all(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """Every query head reads key/value head 0."""
    shape = (-1, query.shape[1], -1, -1)
    return key[:, :1].expand(shape), value[:, :1].expand(shape)


@mistake("heads", has_several("num_kv_heads"))
def first_value_head_for_all(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """Every head mixes the values of head 0."""
    return repeat_heads(key, query.shape[1]), value[:, :1].expand(-1, query.shape[1], -1, -1)


def both_ways(heads: int) -> dict[str, int]:
    """By how many heads something may be rolled, by a name: of two heads, either way is the same."""
    ways = {"the head before it": 1, "the head after it": -1}
    return ways if heads > 2 else {"the other head": 1}  # noqa: PLR2004 - of two, one is the other


@mistake("heads", has_several("num_kv_heads"), choices=lambda workload: both_ways(workload.num_kv_heads))
def kv_heads_rolled(query: Tensor, key: Tensor, value: Tensor, mask: RowMask, choice: int) -> Pair:
    """The key/value heads are rolled: each is read in place of {choice}."""
    return repeat_heads(key.roll(-choice, 1), query.shape[1]), repeat_heads(value.roll(-choice, 1), query.shape[1])


@mistake("heads", has_several("kv_len"))
def value_of_next_key(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Pair:
    """Each key is answered with the value of the key after it."""
    return repeat_heads(key, query.shape[1]), repeat_heads(value.roll(-1, dims=2), query.shape[1])


def divided_by(divisor: float, query: Tensor, key: Tensor) -> Tensor:
    """Query @ key / divisor."""
    return product(query, key.transpose(-2, -1)) / divisor


def has_usual_scale(workload: Workload) -> bool:
    """Whether scores are to be divided by sqrt(K)."""
    return workload.scale == 0


@mistake("scores", lambda workload: workload.scale != 1)
def no_scale(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The scores are not scaled: they are not divided by sqrt(K), or multiplied by what is asked for."""
    return product(query, key.transpose(-2, -1))


@mistake("scores", has_usual_scale)
def scaled_by_width(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The scores are divided by K, or twice by sqrt(K), instead of once by sqrt(K)."""
    return divided_by(query.shape[-1], query, key)


@mistake("scores", has_usual_scale)
def scaled_by_embedding(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The scores are divided by the root of all heads' width, sqrt(H*K), instead of one head's, sqrt(K)."""
    return divided_by(math.sqrt(query.shape[1] * query.shape[-1]), query, key)


@mistake("scores", has_usual_scale)
def multiplied_by_root(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The scores are multiplied by sqrt(K) instead of divided."""
    return divided_by(1 / math.sqrt(query.shape[-1]), query, key)


@mistake("scores", is_fitted=True, choices=lambda _: {"1.25": 1.25})
def scores_scaled(query: Tensor, key: Tensor, mask: RowMask, choice: float) -> Tensor:
    """The scores are {choice} times what they should be, as if the softmax had a temperature."""
    return choice * steps.scores(query, key, mask)


def normalisations(workload: Workload) -> dict[str, float]:
    """What the usual query-key normalisations multiply a cosine by."""
    root = math.sqrt(workload.head_dim)
    return {
        "length 1": 1 / root,
        "length 1, without a scale": 1.0,
        "a root mean square of 1": root,
    }


@mistake("scores", has_several("head_dim"), choices=normalisations)
def query_key_normalised(query: Tensor, key: Tensor, mask: RowMask, choice: float) -> Tensor:
    """Query and key are normalised before their product (QK norm), to {choice}."""
    return divided_by(1 / choice, normalize(query, dim=-1), normalize(key, dim=-1))


@mistake("scores", is_square, needs_all_rows=True)
def query_key_swapped(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """Query and key have changed places in the scores: entry (i, j) holds the score of query j with key i."""
    return steps.scores(key, query, mask)


ROUNDED_BEFORE = {each: each for each in ("queries", "keys", "products of queries and keys", "scores")}


@mistake("scores", is_wide, is_rounding=True, choices=lambda _: ROUNDED_BEFORE)
def bfloat16_scores(query: Tensor, key: Tensor, mask: RowMask, choice: str) -> Tensor:
    """The {choice} are rounded to bfloat16 on the way."""
    query, key = coarse(query) if choice == "queries" else query, coarse(key) if choice == "keys" else key
    if choice == "products of queries and keys":
        return coarse(product(query, key.transpose(-2, -1))) * mask.scale_for(query.shape[-1])
    made = steps.scores(query, key, mask)
    return coarse(made) if choice == "scores" else made


def has(*kinds: type[Mask], square: bool | None = None) -> Condition:
    """Whether a part of a workload's mask is of these kinds and, where `square` is given, whether T == S is as well."""
    return lambda workload: (
        square in {None, is_square(workload)} and any(type(part) in kinds for part in workload.mask_rule.parts)
    )


def hides(workload: Workload) -> bool:
    """Whether the mask hides keys."""
    return workload.mask_rule.hides


def mixes_slopes(workload: Workload) -> bool:
    """Whether ALiBi takes its slopes from two rows, since the number of heads is no power of 2."""
    return bool(workload.num_heads & (workload.num_heads - 1))


def changing(scores: Tensor, mask: RowMask, kinds: Kinds, change: Callable[[Tensor, Mask], Tensor]) -> Tensor:
    """The masked scores where parts of these kinds change the scores by `change(scores, part)` instead."""
    for part in mask.rule.changes:
        scores = change(scores, part) if type(part) in kinds else mask.change(scores, part)
    return hide(scores, mask.seen)


def adding(scores: Tensor, mask: RowMask, bias: Callable[[Tensor, Mask], Tensor], kinds: Kinds = BIASES) -> Tensor:
    """The masked scores where parts of these kinds add `bias(right, part)` instead of the right bias (H, R, S)."""
    return changing(scores, mask, kinds, lambda scores, part: scores + bias(mask.bias(part), part).to(scores.dtype))


def only_hidden(scores: Tensor, mask: RowMask) -> Tensor:
    """Hide keys, change no scores."""
    return hide(scores, mask.seen)


@mistake(
    "scores",
    lambda workload: workload.score_scale != 1,
    lambda workload: workload.mask_rule.changes_scores,
    also={"masked scores": only_hidden},
)
def changed_before_scale(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """The scores are given their bias, or capped, before they are scaled, by 1/sqrt(K) say, instead of after it."""
    return mask.changed(product(query, key.transpose(-2, -1))) * mask.scale_for(query.shape[-1])


@mistake("masked scores", has(Softcap), lambda workload: len(workload.mask_rule.changes) > 1)
def changes_in_other_order(scores: Tensor, mask: RowMask) -> Tensor:
    """The mask's changes of the scores are made in the opposite order: they run from left to right."""
    for part in reversed(mask.rule.changes):
        scores = mask.change(scores, part)
    return only_hidden(scores, mask)


@mistake("masked scores", has(*BIASES))
def bias_ignored(scores: Tensor, mask: RowMask) -> Tensor:
    """The bias that the mask asks for is never added to the scores."""
    return changing(scores, mask, BIASES, lambda scores, _: scores)


@mistake("masked scores", has(*BIASES))
def bias_sign_flipped(scores: Tensor, mask: RowMask) -> Tensor:
    """The bias has the wrong sign: what should be taken from a score is added to it."""
    return adding(scores, mask, lambda bias, _: -bias)


@mistake("masked scores", has_several("num_heads"), has(*BIASES))
def bias_of_first_head_for_all(scores: Tensor, mask: RowMask) -> Tensor:
    """The bias of head 0 is used in every head."""
    return adding(scores, mask, lambda bias, _: bias[:1].expand_as(bias))


@mistake("masked scores", has_several("num_heads"), has(*BIASES))
def bias_heads_reversed(scores: Tensor, mask: RowMask) -> Tensor:
    """Each head has the bias of another: they are in the opposite order."""
    return adding(scores, mask, lambda bias, _: bias.flip(0))


@mistake("masked scores", has_several("num_heads", least=3), has(*BIASES))  # of two: reversed
def bias_of_next_head(scores: Tensor, mask: RowMask) -> Tensor:
    """Each head has the bias of the next one, and the last that of head 0."""
    return adding(scores, mask, lambda bias, _: bias.roll(-1, 0))


def regroupings(workload: Workload) -> dict[str, int]:
    """The numbers of heads in a row, by which the heads can be arranged in a rectangle."""
    heads = workload.num_heads
    return {f"({each}, {heads // each})": each for each in range(2, heads) if heads % each == 0}


@mistake("masked scores", has(*BIASES), choices=regroupings)
def bias_heads_regrouped(scores: Tensor, mask: RowMask, choice: int) -> Tensor:
    """The heads of the bias are taken as {choice} and transposed: a head of a group has the bias of another group."""
    return adding(scores, mask, lambda bias, _: bias.unflatten(0, (choice, -1)).transpose(0, 1).flatten(0, 1))


@mistake("masked scores", has(masks.Additive, square=True))
def bias_transposed(scores: Tensor, mask: RowMask) -> Tensor:
    """Query and key have changed places in the bias."""

    def bias(right: Tensor, part: Mask) -> Tensor:
        per_head = torch.from_numpy(part.per_head(len(right)))[:, None, None].to(right.device)
        swapped: Tensor = part.bias(per_head, mask.keys, mask.queries, 0)
        return swapped

    return adding(scores, mask, bias, (masks.Additive,))


def with_slopes(scores: Tensor, mask: RowMask, slopes: npt.NDArray[np.float64]) -> Tensor:
    """ALiBi with other slopes (H,): what it adds is proportional to them."""

    def bias(right: Tensor, part: Mask) -> Tensor:
        return right * torch.from_numpy(slopes / part.per_head(len(right))).to(right.device)[:, None, None]

    return adding(scores, mask, bias, ALIBI)


@mistake("masked scores", has(*ALIBI), lambda workload: not mixes_slopes(workload))
def alibi_slopes_from_one(scores: Tensor, mask: RowMask) -> Tensor:
    """The slopes of ALiBi are counted from head 0, so that they begin with 1 instead of 2^(-8/H)."""
    return with_slopes(scores, mask, np.exp2(-8 * np.arange(mask.num_heads) / mask.num_heads))


@mistake("masked scores", has(*ALIBI), mixes_slopes)
def alibi_slopes_not_filled_up(scores: Tensor, mask: RowMask) -> Tensor:
    """The slopes of ALiBi are 2^(-8h/H) for a number of heads that is no power of 2."""
    return with_slopes(scores, mask, np.exp2(-8 * np.arange(1, mask.num_heads + 1) / mask.num_heads))


@mistake("masked scores", has(masks.Alibi, square=False))
def alibi_aligned_at_end(scores: Tensor, mask: RowMask) -> Tensor:
    """The distances of ALiBi are counted from the end (bottom-right) instead of the start (top-left)."""
    return adding(scores, mask, lambda *_: mask.bias(masks.AlibiBottomRight()), (masks.Alibi,))


@mistake("masked scores", has(masks.AlibiBottomRight, square=False))
def alibi_aligned_at_start(scores: Tensor, mask: RowMask) -> Tensor:
    """The distances of ALiBi are counted from the start (top-left) instead of the end (bottom-right)."""
    return adding(scores, mask, lambda *_: mask.bias(masks.Alibi()), (masks.AlibiBottomRight,))


@mistake("masked scores", has(Softcap))
def softcap_ignored(scores: Tensor, mask: RowMask) -> Tensor:
    """The scores are never capped."""
    return changing(scores, mask, (Softcap,), lambda scores, _: scores)


@mistake("masked scores", has(Softcap), hides)
def softcap_after_mask(scores: Tensor, mask: RowMask) -> Tensor:
    """The scores are capped after the mask: a hidden key has the score -x of softcap(x) instead of -inf."""
    return mask.changed(only_hidden(scores, mask))


@mistake(
    "masked scores",
    lambda workload: any(part.arguments[0] > 1 for part in workload.mask_rule.changes if type(part) is Softcap),
)
def softcap_not_multiplied(scores: Tensor, mask: RowMask) -> Tensor:
    """The softcap lacks its last factor: tanh(score / x) without x."""
    return changing(scores, mask, (Softcap,), lambda scores, part: torch.tanh(scores / part.arguments[0]))


@mistake("masked scores", has(Softcap))
def softcap_clamped(scores: Tensor, mask: RowMask) -> Tensor:
    """The scores are cut off at -x and x instead of squashed by tanh."""
    return changing(scores, mask, (Softcap,), lambda scores, part: scores.clamp(-part.arguments[0], part.arguments[0]))


@mistake("masked scores", has(Softcap), is_gradient=True)
def softcap_without_derivative(scores: Tensor, mask: RowMask) -> Tensor:
    """The gradient through the softcap lacks its derivative, 1 - tanh^2."""
    return changing(scores, mask, (Softcap,), lambda scores, part: scores + (part.transform(scores) - scores).detach())


def showing(scores: Tensor, mask: RowMask, seen: Callable[[Mask], Tensor], *kinds: type[Mask]) -> Tensor:
    """The masked scores where the parts of these kinds show `seen(part)` instead, while the others stay."""
    parts = [part for part in mask.rule.parts if part.hides]
    shown = (seen(part) if type(part) in kinds else mask.seen_under(part) for part in parts)
    return hide(mask.changed(scores), functools.reduce(operator.and_, shown))


@mistake("masked scores", hides, lambda workload: type(workload.mask_rule) is not Padding)
def mask_ignored(scores: Tensor, mask: RowMask) -> Tensor:
    """The mask never reaches the softmax: hidden keys get weight."""
    return mask.changed(scores)


@mistake("masked scores", has(Padding))
def padding_ignored(scores: Tensor, mask: RowMask) -> Tensor:
    """Padding is ignored: the keys past each row's length get weight."""
    return showing(scores, mask, lambda _: torch.ones_like(mask.seen), Padding)


def parts_to_ignore(workload: Workload) -> dict[str, str]:
    """The parts of which one alone may be forgotten, but for padding, which has a mistake of its own."""
    parts = [part for part in workload.mask_rule.parts if part.hides]
    return {str(part): str(part) for part in parts if type(part) is not Padding and len(parts) > 1}


@mistake("masked scores", choices=parts_to_ignore)
def mask_part_ignored(scores: Tensor, mask: RowMask, choice: str) -> Tensor:
    """A part of the mask is ignored, {choice}: what it alone hides gets weight."""
    others = (part for part in mask.rule.parts if part.hides and str(part) != choice)
    return hide(mask.changed(scores), functools.reduce(operator.and_, map(mask.seen_under, others)))


def zero_where_hidden(masked: Tensor, mask: RowMask) -> Tensor:
    """Softmax over all keys, then 0 for the hidden ones."""
    return masked.softmax(dim=-1).masked_fill(~mask.seen, 0.0)


@mistake("masked scores", hides, also={"weights": zero_where_hidden})
def mask_after_softmax(scores: Tensor, mask: RowMask) -> Tensor:
    """The mask is applied after the softmax, so that the weights of the visible keys do not add up to 1."""
    return mask.changed(scores)


@mistake("masked scores", hides)
def mask_inverted(scores: Tensor, mask: RowMask) -> Tensor:
    """The mask is inverted: visible keys are hidden, hidden ones visible (True means visible)."""
    return hide(mask.changed(scores), ~mask.seen)


@mistake("masked scores", hides)
def mask_added_as_number(scores: Tensor, mask: RowMask) -> Tensor:
    """The boolean mask is added to the scores as 0 and 1 instead of hiding keys."""
    return mask.changed(scores) + mask.seen.to(scores.dtype)


@mistake("masked scores", hides)
def mask_multiplied(scores: Tensor, mask: RowMask) -> Tensor:
    """The scores are multiplied by the mask: a hidden key has score 0 instead of minus infinity."""
    return mask.changed(scores) * mask.seen.to(scores.dtype)


@mistake("masked scores", hides)
def mask_too_weak(scores: Tensor, mask: RowMask) -> Tensor:
    """Hidden keys get a score of about -10 instead of minus infinity."""
    return mask.changed(scores).masked_fill(~mask.seen, -10.0)


@mistake("masked scores", has(masks.Causal, masks.CausalBottomRight, *WINDOWS, square=True))
def causal_flipped(scores: Tensor, mask: RowMask) -> Tensor:
    """The causal triangle is flipped: a query sees itself and what comes after it."""
    return showing(scores, mask, lambda _: mask.keys >= mask.queries, masks.Causal, masks.CausalBottomRight, *WINDOWS)


@mistake("masked scores", has(masks.Causal))
def causal_sees_next(scores: Tensor, mask: RowMask) -> Tensor:
    """The causal mask is off by one: a query sees the key after its own as well."""
    return showing(scores, mask, lambda _: mask.keys <= mask.queries + 1, masks.Causal)


@mistake("masked scores", has(masks.Causal))
def causal_misses_own(scores: Tensor, mask: RowMask) -> Tensor:
    """The causal mask is off by one: a query does not see its own key."""
    return showing(scores, mask, lambda _: mask.keys < mask.queries, masks.Causal)


@mistake("masked scores", has(*AT_THE_END, square=False))
def bottom_right_for_top_left(scores: Tensor, mask: RowMask) -> Tensor:
    """The causal mask or window is aligned at the end (bottom-right) instead of the start (top-left)."""
    return showing(scores, mask, lambda part: mask.seen_under(AT_THE_END[type(part)](*part.arguments)), *AT_THE_END)


@mistake("masked scores", has(*AT_THE_START, square=False))
def top_left_for_bottom_right(scores: Tensor, mask: RowMask) -> Tensor:
    """The causal mask or window is aligned at the start (top-left) instead of the end (bottom-right)."""
    return showing(scores, mask, lambda part: mask.seen_under(AT_THE_START[type(part)](*part.arguments)), *AT_THE_START)


@mistake("masked scores", has(*WINDOWS))
def window_one_short(scores: Tensor, mask: RowMask) -> Tensor:
    """The window is one key too short."""

    def seen(part: Mask) -> Tensor:
        length = part.arguments[0] - 1
        return mask.seen_under(type(part)(length)) if length > 0 else torch.zeros_like(mask.seen)

    return showing(scores, mask, seen, *WINDOWS)


@mistake("masked scores", has(*WINDOWS))
def window_one_long(scores: Tensor, mask: RowMask) -> Tensor:
    """The window is one key too long."""
    return showing(scores, mask, lambda part: mask.seen_under(type(part)(part.arguments[0] + 1)), *WINDOWS)


def row_lengths(part: Mask, mask: RowMask) -> Tensor:
    """The number of keys of each batch row that are no padding (B, 1, 1, 1)."""
    return torch.from_numpy(part.table(*mask.sizes))[:, None, None, None].to(mask.device)


@mistake("masked scores", has(Padding))
def padding_one_short(scores: Tensor, mask: RowMask) -> Tensor:
    """Each row's last true key is taken for padding."""
    return showing(scores, mask, lambda part: mask.keys < row_lengths(part, mask) - 1, Padding)


@mistake("masked scores", has(Padding))
def padding_one_long(scores: Tensor, mask: RowMask) -> Tensor:
    """Each row's first padded key is taken for a true one."""
    return showing(scores, mask, lambda part: mask.keys < row_lengths(part, mask) + 1, Padding)


@mistake("masked scores", has(Padding, square=True))
def padding_of_queries(scores: Tensor, mask: RowMask) -> Tensor:
    """The padding is applied to the queries instead of the keys."""
    return showing(scores, mask, lambda part: mask.queries < row_lengths(part, mask), Padding)


@mistake("masked scores", has_several("batch_size"), has(Padding, masks.PaddingToNothing, masks.Boolean, masks.Ragged))
def first_rows_mask_for_all(scores: Tensor, mask: RowMask) -> Tensor:
    """The mask of batch row 0 is used for every row."""
    return hide(mask.changed(scores), mask.seen[:1])


CAUSAL = (masks.Causal, masks.CausalBottomRight, *WINDOWS)


def alignments(workload: Workload) -> dict[str, masks.Mask]:
    """The causal masks that differ at a workload, by how they are described."""
    if is_square(workload):
        return {"": masks.Causal()}
    return {", aligned at the start": masks.Causal(), ", aligned at the end": masks.CausalBottomRight()}


@mistake(
    "masked scores",
    has_several("kv_len"),
    lambda workload: not has(*CAUSAL)(workload),
    choices=alignments,
)
def causal_unasked(scores: Tensor, mask: RowMask, choice: Mask) -> Tensor:
    """A causal mask is applied that was not asked for{choice}."""
    return hide(mask.changed(scores), mask.seen & mask.seen_under(choice))


def shifts(_: Workload) -> dict[str, tuple[int, str]]:
    """A shift by one key either way, and what becomes of the key at the end that is left."""
    ways = {"the key after": 1, "the key before": -1}
    ends = {"": "kept", ", and the one at the end is hidden": "hidden", ", round the end": "rolled"}
    return {f"{way}{words}": (step, end) for way, step in ways.items() for words, end in ends.items()}


@mistake(
    "masked scores",
    hides,
    has_several("kv_len"),
    lambda workload: type(workload.mask_rule) not in {masks.Causal, Padding},  # theirs have names of their own
    choices=shifts,
)
def mask_shifted(scores: Tensor, mask: RowMask, choice: tuple[int, str]) -> Tensor:
    """The mask is shifted by one key: what it says of a key holds for {choice}."""
    step, end = choice
    seen = mask.seen.roll(step, -1)
    place = 0 if step > 0 else -1
    if end == "kept":
        seen[..., place] = mask.seen[..., place]
    elif end == "hidden":
        seen[..., place] = False
    return hide(mask.changed(scores), seen)
