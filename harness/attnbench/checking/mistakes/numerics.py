"""Mistakes of scale, normalisation and precision."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake, after, before, hide, product, table, wrong
from attnbench.contract import Weights
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
    rows = [
        ("no_scale", "the scores are not scaled, by 1/sqrt(K) say", 1.0),
        ("scale_ignored", "the scale that is given is ignored: the scores are divided by sqrt(K)", 1 / root),
        ("scaled_by_width", "the scores are divided by K, or twice by sqrt(K), instead of once by sqrt(K)", 1 / width),
        ("scaled_twice", "the scores are scaled twice", right**2),
        ("multiplied_by_root", "the scores are divided by the scale, 1/sqrt(K) say, instead of multiplied", 1 / right),
        (
            "scaled_by_embedding",
            "the scores are divided by sqrt(H*K) instead of sqrt(K)",
            1 / math.sqrt(workload.num_heads * width),
        ),
        ("scaled_by_value_width", "the scores are divided by the root of the values' width", workload.value_dim**-0.5),
        ("scale_and_root", "the scores are multiplied by the given scale, and divided by sqrt(K)", right / root),
    ]
    widths = {
        other: f"the scores are scaled for heads {other} wide, and they are {width} wide" for other in (32, 64, 128)
    }
    rows += [("scaled_by_other_width", words, other**-0.5) for other, words in widths.items()]
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


def normalisations(_: Workload) -> Iterator[Mistake]:
    """Softmaxes over other axes, without maximum or sum, or with an extra term in the sum."""
    for name, dims in (("queries", (-2,)), ("heads", (1,)), ("batch", (0,)), ("queries_and_keys", (-2, -1))):
        words = f"the softmax runs over the {name} instead of the keys".replace("_and_keys", " and keys together")
        flags = "needs_all_rows" * name.startswith("queries")
        yield wrong(f"softmax_over_{name}", words, flags, weights=partial(softmax_over, dims=dims))
    maximum = "the maximum is not subtracted before the exponential, which overflows where scores are large"
    extra = "the softmax's sum has one term too many, as if one more key had score 0"
    yield from table(
        "weights",
        "",
        (
            "no_softmax",
            "there is no softmax: the scores themselves are the weights",
            lambda x, _: x.where(x.isfinite(), 0),
        ),
        ("not_normalised", "the exponentials are not divided by their sum", lambda x, _: exponentials(x)),
        ("relu_for_softmax", "relu takes the place of the exponential", lambda x, _: shares(x.relu(), least=1e-30)),
        (
            "softmax_of_base_2",
            "the softmax has powers of 2 for those of e",
            lambda x, m: steps.weights(x * math.log(2), m),
        ),
        ("one_more_in_the_sum", extra, lambda x, _: torch.nn.functional.pad(x, (0, 1)).softmax(dim=-1)[..., :-1]),
        ("sigmoid_for_softmax", "a sigmoid takes the place of the softmax", lambda x, _: x.sigmoid()),
        (
            "sigmoid_for_softmax",
            "a sigmoid of scores - log(S) takes the place of the softmax",
            lambda x, _: (x - math.log(x.shape[-1])).sigmoid(),
        ),
        (
            "softmax_twice",
            "the softmax is taken twice",
            lambda x, m: steps.weights(hide(steps.weights(x, m), m.seen), m),
        ),
        ("no_maximum", maximum, lambda x, _: shares(x.exp())),
        ("no_maximum", f"{maximum}, and a tiny number is added to the sum", lambda x, _: shares(x.exp(), 1e-30)),
        ("no_maximum", f"{maximum}, and 1e-6 is added to the sum", lambda x, _: shares(x.exp(), 1e-6)),
    )
    for most in (10.0, 20.0, 50.0, 80.0):
        clamped = lambda x, m, most=most: shares(x.clamp(-most, most).exp().where(m.seen, 0.0))  # noqa: E731
        yield wrong(
            "no_maximum", "scores are clamped, to 50 say, before an exponential without maximum", weights=clamped
        )
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
    yield from table(
        "masked_scores",
        "",
        (
            "mask_added_as_number",
            "the boolean mask is added to the scores as 0 and 1",
            lambda x, m: m.changed(x) + m.seen.to(x.dtype),
        ),
        (
            "mask_multiplied",
            "the scores are multiplied by the mask: hidden keys have score 0",
            lambda x, m: m.changed(x) * m.seen.to(x.dtype),
        ),
    )
    words = "the mask is applied after the softmax, so that the weights of the visible keys do not add up to 1"
    late: Callable[..., Tensor] = lambda x, m: x.softmax(dim=-1).where(m.seen, 0.0)  # noqa: E731
    yield wrong("mask_after_softmax", words, masked_scores=lambda x, m: m.changed(x), weights=late)


def coarse(tensor: Tensor) -> Tensor:
    """Round the tensor to bfloat16 and back."""
    return tensor.bfloat16().to(tensor.dtype)


def coarse_weights(weights: Weights) -> Weights:
    """Round every weight to bfloat16."""
    return weights.map(coarse)


def rounded_powers(masked: Tensor, mask: RowMask, *, is_sum: bool) -> Tensor:
    """Exponentials rounded before they are divided by their sum, or by the sum of the rounded ones."""
    right = steps.weights(masked, mask)
    largest = right.amax(dim=-1, keepdim=True)
    powers = coarse((right / largest).nan_to_num(0.0))
    return (powers / powers.sum(dim=-1, keepdim=True)).nan_to_num(0.0) if is_sum else powers * largest


def rounded_bias(scores: Tensor, mask: RowMask) -> Tensor:
    """The masked scores with a rounded bias."""
    for part in mask.rule.changes:
        scores = scores + coarse(mask.bias(part).to(scores.dtype)) if part.is_additive else mask.change(scores, part)
    return hide(scores, mask.seen)


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
        says = "the {} are rounded to bfloat16 on the way"
        rows: list[tuple[str, str, str, Callable[..., object]]] = [
            ("scores", "scores", "queries", before("scores", coarse, 0)),
            ("scores", "scores", "keys", before("scores", coarse, 1)),
            (
                "scores",
                "scores",
                "products of queries and keys",
                lambda q, k, m: coarse(product(q, k.mT)) * m.scale_for(q.shape[-1]),
            ),
            ("scores", "scores", "scores", after("scores", coarse)),
            ("weights", "exponentials", "exponentials of the scores", partial(rounded_powers, is_sum=False)),
            (
                "weights",
                "exponentials",
                "exponentials of the scores, and so their sum,",
                partial(rounded_powers, is_sum=True),
            ),
            ("context", "inside", "weights", before("context", coarse, 0)),
            ("context", "inside", "values", before("context", coarse, 1)),
            ("context", "inside", "results", after("context", coarse)),
        ]
        if workload.scope == "module":
            rows.append(("projection", "projections", "tokens", before("projection", coarse, 0, 1)))
            rows.append(("projection", "projections", "projection weights", before("projection", coarse_weights, 2)))
            rows.append(("output", "output_projection", "output's weights", before("output", coarse_weights, 1)))
        for step, name, what, change in rows:
            yield wrong(f"bfloat16_{name}", says.format(what), "is_rounding", **{step: change})
        if workload.mask_rule.changes_scores:
            yield wrong("bfloat16_bias", says.format("biases"), masked_scores=rounded_bias)
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


KINDS = [scales, normalisations, fills, roundings]


def wrong_numerics(workload: Workload) -> Iterator[Mistake]:
    """Every mistake of scale, normalisation and precision."""
    for kind in KINDS:
        yield from kind(workload)
