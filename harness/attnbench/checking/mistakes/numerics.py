"""Mistakes of scale, normalisation and precision."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake, after, before, hide, product, with_bias, wrong
from attnbench.workloads.workload import Workload

FILLS = (-10.0, -100.0, -1e3, -1e4, -2e4, -4e4, -65504.0)
"""Scores of hidden keys instead of minus infinity."""
FLOORS = (0.0, -10.0, -100.0, -1e3, -1e4, -65504.0)
"""Initial values of a running maximum instead of minus infinity."""
WEAK = -1e3
"""Higher fills show on normal inputs."""
LONG = 1024


def scaled(scale: float) -> Mistake:
    """Scores times a number that the diagnosis fits."""
    words = f"the scores are {scale:.6g} times what they should be, as if the softmax had a temperature"
    return replace(wrong("scores_scaled", words, scores=after("scores", lambda x: scale * x)), fit=scaled)


def scales(workload: Workload) -> Iterator[Mistake]:
    """Scores with another scale, or none."""
    right, width, root = workload.score_scale, workload.head_dim, math.sqrt(workload.head_dim)
    embedding = workload.num_heads * width
    rows = [
        ("no_scale", "the scores are not scaled, by 1/sqrt(K) say", 1.0),
        ("scale_ignored", "the scale that is given is ignored: the scores are divided by sqrt(K)", 1 / root),
        ("scaled_by_width", "the scores are divided by K, or twice by sqrt(K), instead of once by sqrt(K)", 1 / width),
        ("scaled_twice", "the scores are scaled twice", right**2),
        ("multiplied_by_root", "the scores are divided by the scale, 1/sqrt(K) say, instead of multiplied", 1 / right),
        ("scaled_by_embedding", "the scores are divided by sqrt(H*K) instead of sqrt(K)", 1 / math.sqrt(embedding)),
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
            yield wrong(name, words, scores=after("scores", lambda x, ratio=scale / right: ratio * x))  # type: ignore[misc]
    yield scaled(1.25)
    if workload.mask_rule.changes_scores and right != 1:
        words = "the scores are scaled after the bias is added or the softcap, not before"
        early: Callable[..., Tensor] = lambda query, key, mask: mask.changed(product(query, key.mT)) * right  # noqa: E731
        yield wrong("changed_before_scale", words, scores=early, masked_scores=lambda x, mask: hide(x, mask.seen))


def softmax_over(masked: Tensor, _: RowMask, dims: tuple[int, ...]) -> Tensor:
    """The softmax over the axes `dims`; hidden keys get no share."""
    powers = (masked - masked.amax(dims, keepdim=True)).exp().nan_to_num(0.0)
    return powers / powers.sum(dims, keepdim=True).clamp(min=torch.finfo(powers.dtype).tiny)


def exponentials(masked: Tensor) -> Tensor:
    """Exponentials after subtracting the maximum; 0 if a query sees no key."""
    return (masked - masked.amax(dim=-1, keepdim=True)).exp().nan_to_num(0.0)


def shares(powers: Tensor, more: float = 0.0, least: float = 0.0) -> Tensor:
    """Powers divided by their sum, plus `more` and at least `least`."""
    return powers / (powers.sum(dim=-1, keepdim=True) + more).clamp(min=least)


def floored(masked: Tensor, _: RowMask, floor: float) -> Tensor:
    """Exponentials after subtracting a maximum that is at least `floor`."""
    powers = (masked - masked.amax(dim=-1, keepdim=True).clamp(min=floor)).exp()
    return shares(powers, least=torch.finfo(masked.dtype).tiny)


def clamped(masked: Tensor, mask: RowMask, most: float) -> Tensor:
    """Exponentials of clamped scores, without a maximum."""
    return shares(masked.clamp(-most, most).exp().where(mask.seen, 0.0))


def normalisations(_: Workload) -> Iterator[Mistake]:
    """Softmaxes over other axes, without maximum or sum, or with an extra term in the sum."""
    for name, dims in (("queries", (-2,)), ("heads", (1,)), ("batch", (0,)), ("queries_and_keys", (-2, -1))):
        words = f"the softmax runs over the {name} instead of the keys".replace("_and_keys", " and keys together")
        flags = "needs_all_rows" * name.startswith("queries")
        yield wrong(f"softmax_over_{name}", words, flags, weights=partial(softmax_over, dims=dims))
    words = "there is no softmax: the scores themselves are the weights"
    yield wrong("no_softmax", words, weights=lambda x, _: x.where(x.isfinite(), 0))
    words = "the exponentials are not divided by their sum"
    yield wrong("not_normalised", words, weights=lambda x, _: exponentials(x))
    words = "relu takes the place of the exponential"
    yield wrong("relu_for_softmax", words, weights=lambda x, _: shares(x.relu(), least=1e-30))
    words = "the softmax has powers of 2 for those of e"
    yield wrong("softmax_of_base_2", words, weights=lambda x, mask: steps.weights(x * math.log(2), mask))
    words = "the softmax's sum has one term too many, as if one more key had score 0"
    padded = partial(torch.nn.functional.pad, pad=(0, 1))
    yield wrong("one_more_in_the_sum", words, weights=lambda x, _: padded(x).softmax(dim=-1)[..., :-1])
    words = "a sigmoid {}takes the place of the softmax"
    yield wrong("sigmoid_for_softmax", words.format(""), weights=lambda x, _: x.sigmoid())
    shifted: Callable[..., Tensor] = lambda x, _: (x - math.log(x.shape[-1])).sigmoid()  # noqa: E731
    yield wrong("sigmoid_for_softmax", words.format("of scores - log(S) "), weights=shifted)
    twice: Callable[..., Tensor] = lambda x, mask: steps.weights(hide(steps.weights(x, mask), mask.seen), mask)  # noqa: E731
    yield wrong("softmax_twice", "the softmax is taken twice", weights=twice)
    words = "the maximum is not subtracted before the exponential, which overflows where scores are large"
    for more, what in {
        0.0: "",
        1e-30: ", and a tiny number is added to the sum",
        1e-6: ", and 1e-6 is added to the sum",
    }.items():
        yield wrong("no_maximum", words + what, weights=lambda x, _, more=more: shares(x.exp(), more))
    words = "scores are clamped, to 50 say, before an exponential without maximum"
    for most in (10.0, 20.0, 50.0, 80.0):
        yield wrong("no_maximum", words, weights=partial(clamped, most=most))
    for small in (1e-4, 1e-3, 1e-2):
        added = lambda x, _, small=small: shares(exponentials(x), small)  # noqa: E731
        yield wrong("eps_in_the_sum", f"{small:g} is added to the softmax's sum", weights=added)
    for floor in FLOORS:
        words = f"the maximum that is subtracted is {floor:g} at least: where all scores are lower, exponentials vanish"
        yield wrong("floor_of_the_maximum", words, weights=partial(floored, floor=floor))


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


def coarse(tensor: Tensor) -> Tensor:
    """Round the tensor to bfloat16 and back."""
    return tensor.bfloat16().to(tensor.dtype)


def rounded_powers(masked: Tensor, mask: RowMask, *, is_sum: bool) -> Tensor:
    """Exponentials rounded before they are divided by their sum, or by the sum of the rounded ones."""
    right = steps.weights(masked, mask)
    largest = right.amax(dim=-1, keepdim=True)
    powers = coarse((right / largest).nan_to_num(0.0))
    return (powers / powers.sum(dim=-1, keepdim=True)).nan_to_num(0.0) if is_sum else powers * largest


def rounded_sums(weights: Tensor, value: Tensor, _: RowMask, tile: int, *, is_online: bool) -> Tensor:
    """A running sum over the keys, rounded after each tile; an online softmax's is in units of its largest weight."""
    total = torch.zeros(*weights.shape[:-1], value.shape[-1], dtype=value.dtype, device=value.device)
    unit = torch.full_like(weights[..., :1], torch.finfo(weights.dtype).tiny)
    for share, mixed in zip(weights.split(tile, dim=-1), value.split(tile, dim=-2), strict=True):
        largest = torch.maximum(unit, share.amax(dim=-1, keepdim=True)) if is_online else torch.ones_like(unit)
        total, unit = coarse(total * (unit / largest if is_online else 1) + product(share / largest, mixed)), largest
    return total * unit


def roundings(workload: Workload) -> Iterator[Mistake]:
    """Intermediate results rounded to bfloat16; in half precision, rounded scores are within honest errors."""
    if workload.dtype in {"float32", "float64"}:
        of_products: Callable[..., Tensor] = lambda q, k, m: coarse(product(q, k.mT)) * m.scale_for(q.shape[-1])  # noqa: E731
        with_sum, alone = partial(rounded_powers, is_sum=True), partial(rounded_powers, is_sum=False)
        rows: list[tuple[str, str, str, Callable[..., object]]] = [
            ("scores", "scores", "queries", before("scores", coarse, 0)),
            ("scores", "scores", "keys", before("scores", coarse, 1)),
            ("scores", "scores", "products of queries and keys", of_products),
            ("scores", "scores", "scores", after("scores", coarse)),
            ("exponentials", "weights", "exponentials of the scores", alone),
            ("exponentials", "weights", "exponentials of the scores, and so their sum,", with_sum),
            ("inside", "context", "weights", before("context", coarse, 0)),
            ("inside", "context", "values", before("context", coarse, 1)),
            ("inside", "context", "results", after("context", coarse)),
        ]
        if workload.scope == "module":
            of_weights = before("projection", lambda weights: weights.map(coarse), 2)
            of_output = before("output", lambda weights: weights.map(coarse), 1)
            rows.append(("projections", "projection", "tokens", before("projection", coarse, 0, 1)))
            rows.append(("projections", "projection", "projection weights", of_weights))
            rows.append(("output_projection", "output", "output's weights", of_output))
        for name, step, what, change in rows:
            words = f"the {what} are rounded to bfloat16 on the way"
            yield wrong(f"bfloat16_{name}", words, "is_rounding", **{step: change})
        if workload.mask_rule.changes_scores:
            words = "the biases are rounded to bfloat16 on the way"
            yield wrong("bfloat16_bias", words, masked_scores=with_bias(lambda bias, *_: coarse(bias)))
    if workload.dtype == "bfloat16" and workload.kv_len < LONG:
        return
    tiles = {"every key": 1} | {f"every {tile} keys": tile for tile in (16, 32, 64, 128) if tile < workload.kv_len}
    tiles["all keys, before the division by their sum"] = workload.kv_len
    for words, tile in tiles.items():
        for is_online in (False, True) if tile < workload.kv_len else (True,):
            text = f"the sum over the keys is accumulated in bfloat16, rounded after {words}"
            text += " of an online softmax" * (is_online and tile < workload.kv_len)
            change = partial(rounded_sums, tile=tile, is_online=is_online)
            yield wrong("bfloat16_sums", text, "is_rounding", context=change)


def wrong_numerics(workload: Workload) -> Iterator[Mistake]:
    """Every mistake of scale, normalisation and precision."""
    for kind in (scales, normalisations, fills, roundings):
        yield from kind(workload)
