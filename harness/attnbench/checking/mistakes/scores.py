"""Mistakes of scores and weights: scale, softmax, hidden keys, biases, softcap, sinks, rotary positions, precision."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from attnbench.checking import oracle, steps
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake, after, before, hide, product, with_bias, with_change, wrong
from attnbench.contract import softmax_with_sinks
from attnbench.workloads import masks
from attnbench.workloads.workload import Workload

FILLS = (-10.0, -20.0, -100.0, -1e3, -1e4, -2e4, -4e4, -65504.0)
"""Scores of hidden keys instead of minus infinity."""
WEAK = -1e3
"""Higher fills show on normal inputs."""
FLOORS = (0.0, -10.0, -100.0, -1e3, -1e4, -65504.0)
"""Initial values of a running maximum instead of minus infinity."""
CLAMPS = (10.0, 20.0, 50.0, 80.0)
ROTARY_BASES = (10_000.0, 20_000.0, 100_000.0, 500_000.0, 1_000_000.0)
ALIBI = (masks.Alibi, masks.AlibiBottomRight)


def scales(workload: Workload) -> Iterator[Mistake]:
    """Scores with another scale, or none."""
    right, width, root = workload.score_scale, workload.head_dim, math.sqrt(workload.head_dim)
    rows = [
        ("no_scale", "the scores are not scaled, by 1/sqrt(K) say", 1.0),
        ("scale_ignored", "the scale that is given is ignored: the scores are divided by sqrt(K)", 1 / root),
        ("scaled_by_width", "the scores are divided by K, or twice by sqrt(K), instead of once by sqrt(K)", 1 / width),
        ("scaled_twice", "the scores are scaled twice", right**2),
        ("multiplied_by_root", "the scores are divided by the scale, 1/sqrt(K) say, instead of multiplied", 1 / right),
        (
            "scaled_by_embedding",
            "the scores are divided by sqrt(H*K) instead of sqrt(K)",
            (workload.num_heads * width) ** -0.5,
        ),
        ("scaled_by_value_width", "the scores are divided by the root of the values' width", workload.value_dim**-0.5),
        ("scale_and_root", "the scores are multiplied by the given scale, and divided by sqrt(K)", right / root),
    ]
    for other in (32, 64, 128):
        words = f"the scores are scaled for heads {other} wide, and they are {width} wide"
        rows.append(("scaled_by_other_width", words, other**-0.5))
    known = [right]
    for name, words, scale in rows:
        if not any(math.isclose(scale, other) for other in known):
            known.append(scale)
            yield wrong(name, words, scores=after("scores", partial(torch.mul, other=scale / right)))
    if workload.mask_rule.changes_scores and right != 1:
        words = "the scores are scaled after the bias is added or the softcap, not before"
        early: Callable[..., Tensor] = lambda query, key, mask: mask.changed(product(query, key.mT)) * right  # noqa: E731
        yield wrong("changed_before_scale", words, scores=early, masked_scores=lambda x, mask: hide(x, mask.seen))


def softmax_over(masked: Tensor, _: RowMask, dim: int) -> Tensor:
    """The softmax over another axis; hidden keys get no share."""
    powers = (masked - masked.amax(dim, keepdim=True)).exp().nan_to_num(0.0)
    return powers / powers.sum(dim, keepdim=True).clamp(min=torch.finfo(powers.dtype).tiny)


def exponentials(masked: Tensor, floor: float = -math.inf) -> Tensor:
    """Exponentials after subtracting the maximum, or at least `floor`; 0 if a query sees no key."""
    return (masked - masked.amax(dim=-1, keepdim=True).clamp(min=floor)).exp().nan_to_num(0.0)


def shares(powers: Tensor, more: float = 0.0, least: float = 0.0) -> Tensor:
    """Powers divided by their sum, plus `more` and at least `least`."""
    return powers / (powers.sum(dim=-1, keepdim=True) + more).clamp(min=least)


def softmaxes(workload: Workload) -> Iterator[Mistake]:
    """Softmaxes over other axes, without maximum or sum, or with an extra term in the sum."""
    for name, dim in (("queries", -2), ("heads", 1), ("batch", 0)):
        words, flags = f"the softmax runs over the {name} instead of the keys", "needs_all_rows" * (name == "queries")
        yield wrong(f"softmax_over_{name}", words, flags, weights=partial(softmax_over, dim=dim))
    shifted: Callable[..., Tensor] = lambda x, _: (x - math.log(x.shape[-1])).sigmoid()  # noqa: E731
    twice: Callable[..., Tensor] = lambda x, mask: steps.weights(hide(steps.weights(x, mask), mask.seen), mask)  # noqa: E731
    equal: Callable[..., Tensor] = lambda x, _: x.masked_fill(x.isfinite(), 0.0).softmax(-1).nan_to_num(0.0)  # noqa: E731
    padded = partial(torch.nn.functional.pad, pad=(0, 1))
    more = "the softmax's sum has one term too many, as if one more key had score 0"
    kinds: dict[str, tuple[str, Callable[..., Tensor]]] = {
        "there is no softmax: the scores themselves are the weights": (
            "no_softmax",
            lambda x, _: x.where(x.isfinite(), 0),
        ),
        "the exponentials are not divided by their sum": ("not_normalised", lambda x, _: exponentials(x)),
        more: ("one_more_in_the_sum", lambda x, _: padded(x).softmax(dim=-1)[..., :-1]),
        "a sigmoid takes the place of the softmax": ("sigmoid_for_softmax", lambda x, _: x.sigmoid()),
        "a sigmoid of scores - log(S) takes the place of the softmax": ("sigmoid_for_softmax", shifted),
        "the softmax is taken twice": ("softmax_twice", twice),
        "the softmax has powers of 2 for those of e": (
            "softmax_of_base_2",
            lambda x, mask: steps.weights(x * math.log(2), mask),
        ),
        "query and key play no part: the output is the mean of the values": ("query_and_key_ignored", equal),
        "the weights of head 0 are used in every head": (
            "first_heads_weights_for_all",
            lambda x, mask: steps.weights(x, mask)[:, :1].expand_as(x),
        ),
    }
    for words, (name, weights) in kinds.items():
        yield wrong(name, words, weights=weights)
    words = "the maximum is not subtracted before the exponential, which overflows where scores are large"
    for small, what in {
        0.0: "",
        1e-30: ", and a tiny number is added to the sum",
        1e-6: ", and 1e-6 is added to the sum",
    }.items():
        yield wrong("no_maximum", words + what, weights=lambda x, _, small=small: shares(x.exp(), small))
    for most in CLAMPS:
        words = f"scores are clamped, to {most:g} say, before an exponential without maximum"
        clamped = lambda x, m, most=most: shares(x.clamp(-most, most).exp().where(m.seen, 0.0))  # noqa: E731
        yield wrong("no_maximum", words, weights=clamped)
    for small in (1e-4, 1e-3, 1e-2):
        added = lambda x, _, small=small: shares(exponentials(x), small)  # noqa: E731
        yield wrong("eps_in_the_sum", f"{small:g} is added to the softmax's sum", weights=added)
    for floor in FLOORS:
        words = f"the maximum that is subtracted is {floor:g} at least: where all scores are lower, exponentials vanish"
        floored = lambda x, _, floor=floor: shares(exponentials(x, floor), least=torch.finfo(x.dtype).tiny)  # noqa: E731
        yield wrong("floor_of_the_maximum", words, weights=floored)
    if workload.seq_len == workload.kv_len:
        words = "query and key have changed places in the scores"
        swapped: Callable[..., Tensor] = lambda query, key, mask: steps.scores(key, query, mask)  # noqa: E731
        yield wrong("query_key_swapped", words, "needs_all_rows", scores=swapped)


def fills(workload: Workload) -> Iterator[Mistake]:
    """Hidden keys that have a score, or lose their weight too late."""
    if not workload.mask_rule.hides:
        return
    nothing: Callable[..., Tensor] = lambda x, m: x.softmax(dim=-1).where(m.seen.any(dim=-1, keepdim=True), 0)  # noqa: E731
    for fill in FILLS:
        name = "mask_too_weak" if fill > WEAK else "finite_fill"
        filled = lambda x, m, fill=fill: m.changed(x).where(m.seen, fill)  # noqa: E731
        about = f"about {fill:g}" if fill > WEAK else f"{fill:g} or lower"  # the weakest that explains it is named
        words = f"hidden keys get a score of {about} instead of minus infinity"
        yield wrong(name, words, masked_scores=filled, weights=nothing)
        added = lambda x, m, fill=fill: m.changed(x) + (~m.seen * fill).to(x.dtype)  # noqa: E731
        yield wrong(name, f"{fill:g} is added to the scores of hidden keys", masked_scores=added, weights=nothing)
    words = "the boolean mask is added to the scores as 0 and 1"
    yield wrong("mask_added_as_number", words, masked_scores=lambda x, m: m.changed(x) + m.seen.to(x.dtype))
    words = "the scores are multiplied by the mask: hidden keys have score 0"
    yield wrong("mask_multiplied", words, masked_scores=lambda x, m: m.changed(x) * m.seen.to(x.dtype))
    words = "the mask is applied after the softmax, so that the weights of the visible keys do not add up to 1"
    late: Callable[..., Tensor] = lambda x, m: x.softmax(dim=-1).where(m.seen, 0.0)  # noqa: E731
    yield wrong("mask_after_softmax", words, masked_scores=lambda x, m: m.changed(x), weights=late)


def extensions(workload: Workload) -> Iterator[Mistake]:
    """Mistakes of biases, softcap and sinks."""
    parts = [part for part in workload.mask_rule.changes if part.is_additive]
    for part in parts:
        words = "the bias is never added to the scores" + f": {part}" * (len(parts) > 1)
        without = with_bias(lambda bias, _, each, part=part: bias * (type(each) is not type(part)))  # type: ignore[misc]
        yield wrong("bias_ignored", words, masked_scores=without)
    if parts:
        yield wrong("bias_sign_flipped", "the bias has the wrong sign", masked_scores=with_bias(lambda x, *_: -x))
        words = "the biases are rounded to bfloat16 on the way"
        yield wrong("bfloat16_bias", words, masked_scores=with_bias(lambda bias, *_: coarse(bias)))
    if kinds := {type(part) for part in parts} & {*ALIBI}:
        first = 0 if workload.num_heads & (workload.num_heads - 1) == 0 else 1
        slopes = np.exp2(-8 * np.arange(first, workload.num_heads + first) / workload.num_heads)
        ratio = torch.from_numpy(slopes / masks.Alibi().per_head(workload.num_heads))[:, None, None]
        words = ("are counted from head 0: they begin with 1", "are 2^(-8h/H) though H is no power of 2")[first]
        steep = with_bias(lambda bias, *_: bias * ratio.to(bias))
        yield wrong("alibi_slopes", f"the slopes of ALiBi {words}", masked_scores=steep)
        other = next(kind for kind in ALIBI if kind not in kinds)()
        if workload.seq_len != workload.kv_len:
            words = f"the distances of ALiBi are counted from the other end, as in {other}"
            from_end = with_bias(lambda _, mask, __: mask.bias(other))
            yield wrong("alibi_aligned_at_other_end", words, masked_scores=from_end)
    if any(isinstance(part, masks.Softcap) for part in workload.mask_rule.changes):
        never = with_change(lambda scores, _, part: scores if isinstance(part, masks.Softcap) else None)
        yield wrong("softcap_ignored", "the scores are never capped", masked_scores=never)
        late: Callable[..., Tensor] = lambda scores, mask: mask.changed(hide(scores, mask.seen))  # noqa: E731
        yield wrong("softcap_after_mask", "the scores are capped after the mask", masked_scores=late)
    if workload.sinks != "none":
        plain: Callable[..., Tensor] = lambda x, _: x.softmax(dim=-1).nan_to_num(0.0)  # noqa: E731
        yield wrong("sinks_ignored", "the sinks are ignored", weights=plain)
        scaled: Callable[..., Tensor] = lambda x, m: softmax_with_sinks(x, m.sinks * workload.score_scale)  # noqa: E731
        yield wrong("sink_scaled", "a sink is multiplied by the scale, as scores are", weights=scaled)


def rotated(workload: Workload) -> Iterator[Mistake]:
    """Other rotary positions than the workload's."""
    for base in ROTARY_BASES if workload.head_dim % 2 == 0 else ():
        for style in ("in halves, as in Llama", "interleaved, as in GPT-J"):
            turn = partial(oracle.rotated, base=base, is_interleaved=style.startswith("inter"))
            words = f"query and key are rotated by their positions inside (rotary embedding, {style}, base {base:g})"

            def scores(query: Tensor, key: Tensor, mask: RowMask, turn: Callable[..., Tensor] = turn) -> Tensor:
                query, key, _ = oracle.in_place(workload, mask.rows, (query, key, key), -1)
                return steps.scores(turn(query, mask.rows), turn(key, mask.keys), mask)

            yield wrong("rotary_inside", words, scores=scores)


def coarse(tensor: Tensor) -> Tensor:
    """Round the tensor to bfloat16 and back."""
    return tensor.bfloat16().to(tensor.dtype)


def roundings(workload: Workload) -> Iterator[Mistake]:
    """Intermediate results rounded to bfloat16; in half precision, rounded scores are within honest errors."""
    if workload.dtype not in {"float32", "float64"}:
        return
    everything = {"scores": before("scores", coarse, 0, 1), "context": before("context", coarse, 0, 1)}
    kinds: dict[str, dict[str, Callable[..., object]]] = {
        "queries, keys, weights and values": everything,
        "queries and keys": {"scores": before("scores", coarse, 0, 1)},
        "scores": {"scores": after("scores", coarse)},
        "weights": {"context": before("context", coarse, 0)},
        "values": {"context": before("context", coarse, 1)},
        "results": {"context": after("context", coarse)},
    }
    for what, changes in kinds.items():
        words = f"the {what} are rounded to bfloat16 on the way"
        yield wrong("bfloat16_inside", words, "is_rounding", **changes)


def wrong_scores(workload: Workload) -> Iterator[Mistake]:
    """Every mistake of the scores and weights."""
    for kind in (scales, softmaxes, fills, extensions, rotated, roundings):
        yield from kind(workload)
