"""Scale, normalisation and precision."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake, hide, product, wrong
from attnbench.workloads.workload import Workload

FILLS = {"-10": -10.0, "-100": -100.0, "-1000": -1e3, "-10000": -1e4, "-20000": -2e4, "-40000": -4e4, "-65504": -65504.0}
"""What hidden keys get in place of minus infinity."""
FLOORS = {"0": 0.0, "-10": -10.0, "-100": -100.0, "-1000": -1e3, "-10000": -1e4, "-65504": -65504.0}
"""Where a running maximum starts in place of minus infinity."""
LONG = 1024
Round = Callable[[Tensor], Tensor]


def scaled(query: Tensor, key: Tensor, mask: RowMask, factor: float) -> Tensor:
    """The right scores times a number."""
    return factor * steps.scores(query, key, mask)


def temperature(factor: float) -> Mistake:
    """Scores times a number that the diagnosis fits."""
    words = f"the scores are {factor:.6g} times what they should be, as if the softmax had a temperature"
    return wrong("scores_scaled", words, scores=partial(scaled, factor=factor))


def scales(workload: Workload) -> Iterator[Mistake]:
    """Scores that are scaled by something else, or not at all."""
    right, width = workload.score_scale, workload.head_dim
    heads, root = workload.num_heads, math.sqrt(width)
    named = {
        "the scores are not scaled: they are not divided by sqrt(K), or multiplied by the scale that was given": 1.0,
        "the scale that was given is ignored: the scores are divided by sqrt(K)": 1 / root,
        "the scores are divided by K, or twice by sqrt(K), instead of once by sqrt(K)": 1 / width,
        "the scores are scaled twice": right**2,
        "the scores are divided by the scale instead of multiplied, by 1/sqrt(K) if none was given": 1 / right,
        "the scores are divided by the root of all heads' width, sqrt(H*K), instead of one head's": 1 / (root * heads**0.5),
        "the scores are divided by the root of the values' width, sqrt(V)": workload.value_dim**-0.5,
        "the scores are multiplied by the given scale, and also divided by sqrt(K)": right / root,
        **{f"the scores are scaled for heads {each} wide, and they are {width} wide": each**-0.5 for each in (32, 64, 128, 256)},
    }
    names = ("no_scale", "scale_ignored", "scaled_by_width", "scaled_twice", "multiplied_by_root", "scaled_by_embedding")
    known = [right]
    for (words, scale), name in zip(named.items(), [*names, *["scaled_by_other_width"] * len(named)], strict=False):
        if not any(math.isclose(scale, each) for each in known):
            known.append(scale)
            yield wrong(name, words, scores=partial(scaled, factor=scale / right))
    yield replace(temperature(1.25), fit=temperature)
    if workload.mask_rule.changes_scores and right != 1:
        yield wrong(
            "changed_before_scale",
            "the scores are given their bias, or capped, before they are scaled, by 1/sqrt(K) say, instead of after it",
            scores=lambda query, key, mask: (
                mask.changed(product(query, key.transpose(-2, -1))) * mask.scale_for(query.shape[-1])
            ),
            masked_scores=lambda scores, mask: hide(scores, mask.seen),
        )


def softmax_over(masked: Tensor, mask: RowMask, dims: tuple[int, ...]) -> Tensor:
    """The softmax over some axes; hidden keys have no share."""
    powers = (masked - masked.amax(dims, keepdim=True)).exp().nan_to_num(0.0)
    return powers / powers.sum(dims, keepdim=True).clamp(min=torch.finfo(powers.dtype).tiny)


def powers(masked: Tensor) -> Tensor:
    """Exponentials with the maximum subtracted, 0 where a query sees no key."""
    return (masked - masked.amax(dim=-1, keepdim=True)).exp().nan_to_num(0.0)


def floored(masked: Tensor, mask: RowMask, floor: float) -> Tensor:
    """Exponentials where the subtracted maximum is no lower than a number."""
    raised = (masked - masked.amax(dim=-1, keepdim=True).clamp(min=floor)).exp()
    return raised / raised.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(masked.dtype).tiny)


def normalisations(workload: Workload) -> Iterator[Mistake]:
    """Softmaxes over something else, without maximum or sum, or with something more in the sum."""
    axes = {"queries": (-2,), "heads": (1,), "batch": (0,), "queries_and_keys": (-2, -1)}
    for name, dims in axes.items():
        words = f"the softmax runs over the {name} instead of the keys".replace("_and_keys", " and keys together")
        flags = "needs_all_rows" if -2 in dims else ""
        yield wrong(f"softmax_over_{name}", words, flags, weights=partial(softmax_over, dims=dims))
    forms: dict[tuple[str, str], Callable[[Tensor, RowMask], Tensor]] = {
        ("no_softmax", "there is no softmax: the scores themselves are the weights"): lambda masked, _: masked.where(
            masked.isfinite(), 0.0
        ),
        ("not_normalised", "the exponentials are not divided by their sum"): lambda masked, _: powers(masked),
        ("relu_for_softmax", "relu takes the place of the exponential"): lambda masked, _: (
            masked.relu() / masked.relu().sum(dim=-1, keepdim=True).clamp(min=1e-30)
        ),
        ("softmax_of_base_2", "the softmax has powers of 2 for those of e"): lambda masked, mask: steps.weights(
            masked * math.log(2), mask
        ),
        ("one_more_in_the_sum", "the softmax's sum has one term too many, as if one more key had score 0"): (
            lambda masked, _: torch.cat([masked, torch.zeros_like(masked[..., :1])], dim=-1).softmax(dim=-1)[..., :-1]
        ),
        ("sigmoid_for_softmax", "a sigmoid takes the place of the softmax, so that weights do not add up to 1"): (
            lambda masked, _: masked.sigmoid()
        ),
        ("sigmoid_for_softmax", "a sigmoid of the scores - log(S) takes the place of the softmax"): lambda masked, _: (
            masked - math.log(masked.shape[-1])
        ).sigmoid(),
        ("softmax_twice", "the softmax is taken twice"): lambda masked, mask: steps.weights(
            hide(steps.weights(masked, mask), mask.seen), mask
        ),
    }
    for (name, words), form in forms.items():
        yield wrong(name, words, weights=form)
    maximum = "the maximum is not subtracted before the exponential, which overflows where scores are large"
    guards: dict[str, Callable[[Tensor], Tensor]] = {"": lambda total: total}
    for words, small in (("1e-6", 1e-6), ("a tiny number", 1e-30)):
        guards[f"{maximum}, and {words} is added to the sum"] = partial(torch.add, other=small)
    for words, guard in guards.items():
        yield wrong("no_maximum", words or maximum, weights=partial(plain, guard=guard))
    for most in (10.0, 20.0, 50.0, 80.0):
        words = "scores are clamped, to 50 say, before an exponential without maximum"
        yield wrong("no_maximum", words, weights=partial(plain, guard=guards[""], most=most))
    for small in (1e-4, 1e-3, 1e-2):
        words = f"{small:g} is added to the softmax's sum"
        yield wrong("eps_in_the_sum", words, weights=partial(with_eps, eps=small))
    for words, floor in FLOORS.items():
        words = f"the maximum that is subtracted is at least {words}: where all scores are lower, the exponentials vanish"
        yield wrong("floor_of_the_maximum", words, weights=partial(floored, floor=floor))


def plain(masked: Tensor, mask: RowMask, guard: Callable[[Tensor], Tensor], most: float = math.inf) -> Tensor:
    """Exponentials of the scores as they are, divided by their sum."""
    raised = masked.clamp(-most, most).exp().masked_fill(~mask.seen, 0.0) if most < math.inf else masked.exp()
    return raised / guard(raised.sum(dim=-1, keepdim=True))


def with_eps(masked: Tensor, mask: RowMask, eps: float) -> Tensor:
    """The softmax with a number more in its sum."""
    raised = powers(masked)
    return raised / (raised.sum(dim=-1, keepdim=True) + eps)


def fills(workload: Workload) -> Iterator[Mistake]:
    """Hidden keys that have a score, or lose their weight too late."""
    if not workload.mask_rule.hides:
        return
    for words, fill in FILLS.items():

        def masked(scores: Tensor, mask: RowMask, fill: float) -> Tensor:
            return mask.changed(scores).masked_fill(~mask.seen, fill)

        def weights(masked: Tensor, mask: RowMask) -> Tensor:
            return masked.softmax(dim=-1).masked_fill(~mask.seen.any(dim=-1, keepdim=True), 0.0)

        name = "mask_too_weak" if fill > -1e3 else "finite_fill"
        text = f"hidden keys get a score of about {words} instead of minus infinity"
        yield wrong(name, text, masked_scores=partial(masked, fill=fill), weights=weights)
        text = f"{words} is added to the scores of hidden keys"
        added = partial(lambda scores, mask, fill: mask.changed(scores) + ~mask.seen * fill, fill=fill)
        yield wrong(name, text, masked_scores=added, weights=weights)
    others: dict[tuple[str, str], Callable[[Tensor, RowMask], Tensor]] = {
        ("mask_added_as_number", "the boolean mask is added to the scores as 0 and 1 instead of hiding keys"): (
            lambda scores, mask: mask.changed(scores) + mask.seen.to(scores.dtype)
        ),
        ("mask_multiplied", "the scores are multiplied by the mask: a hidden key has score 0 instead of minus infinity"): (
            lambda scores, mask: mask.changed(scores) * mask.seen.to(scores.dtype)
        ),
    }
    for (name, words), change in others.items():
        yield wrong(name, words, masked_scores=change)
    yield wrong(
        "mask_after_softmax",
        "the mask is applied after the softmax, so that the weights of the visible keys do not add up to 1",
        masked_scores=lambda scores, mask: mask.changed(scores),
        weights=lambda masked, mask: masked.softmax(dim=-1).masked_fill(~mask.seen, 0.0),
    )


def to(dtype: torch.dtype) -> Round:
    """Round to a dtype, and keep one's own."""
    return lambda tensor: tensor.to(dtype).to(tensor.dtype)


def rounded_powers(masked: Tensor, mask: RowMask, coarse: Round, *, is_sum: bool) -> Tensor:
    """The exponentials rounded before they are divided by their sum, or by the sum of what is left of them."""
    right = steps.weights(masked, mask)
    largest = right.amax(dim=-1, keepdim=True)
    raised = coarse((right / largest).nan_to_num(0.0))
    return (raised / raised.sum(dim=-1, keepdim=True)).nan_to_num(0.0) if is_sum else raised * largest


def rounded_bias(scores: Tensor, mask: RowMask, coarse: Round) -> Tensor:
    """What is added to the scores, rounded."""
    for part in mask.rule.changes:
        scores = scores + coarse(mask.bias(part).to(scores.dtype)) if part.is_additive else mask.change(scores, part)
    return hide(scores, mask.seen)


def rounded_sums(weights: Tensor, value: Tensor, mask: RowMask, coarse: Round, tile: int, *, is_online: bool) -> Tensor:
    """A running sum over the keys, rounded after each tile; an online softmax's is in units of its largest weight."""
    total = torch.zeros(*weights.shape[:-1], value.shape[-1], dtype=value.dtype, device=value.device)
    before = torch.full_like(weights[..., :1], torch.finfo(weights.dtype).tiny)
    for share, mixed in zip(weights.split(tile, dim=-1), value.split(tile, dim=-2), strict=True):
        if is_online:
            largest = torch.maximum(before, share.amax(dim=-1, keepdim=True))
            total, before = coarse(total * (before / largest) + product(share / largest, mixed)), largest
        else:
            total = coarse(total + product(share, mixed))
    return total * before if is_online else total


def roundings(workload: Workload) -> Iterator[Mistake]:
    """What is rounded to bfloat16 on the way; in float16 that is within what honest forms do to their scores."""
    coarse, flag = to(torch.bfloat16), "is_rounding"
    if workload.dtype in {"float32", "float64"}:
        wider: dict[tuple[str, str], dict[str, Callable[..., object]]] = {
            ("bfloat16_scores", "queries"): {"scores": lambda query, key, mask: steps.scores(coarse(query), key, mask)},
            ("bfloat16_scores", "keys"): {"scores": lambda query, key, mask: steps.scores(query, coarse(key), mask)},
            ("bfloat16_scores", "products of queries and keys"): {
                "scores": lambda query, key, mask: (
                    coarse(product(query, key.transpose(-2, -1))) * mask.scale_for(query.shape[-1])
                )
            },
            ("bfloat16_scores", "scores"): {"scores": lambda *operands: coarse(steps.scores(*operands))},
            ("bfloat16_exponentials", "exponentials of the scores"): {
                "weights": partial(rounded_powers, coarse=coarse, is_sum=False)
            },
            ("bfloat16_exponentials", "exponentials of the scores, and with them their sum,"): {
                "weights": partial(rounded_powers, coarse=coarse, is_sum=True)
            },
            ("bfloat16_inside", "weights and values"): {
                "context": lambda weights, value, mask: coarse(steps.context(coarse(weights), coarse(value), mask))
            },
            ("bfloat16_inside", "weights"): {
                "context": lambda weights, value, mask: steps.context(coarse(weights), value, mask)
            },
            ("bfloat16_inside", "values"): {
                "context": lambda weights, value, mask: steps.context(weights, coarse(value), mask)
            },
            ("bfloat16_inside", "results"): {"context": lambda *operands: coarse(steps.context(*operands))},
        }
        if workload.mask_rule.changes_scores:
            wider["bfloat16_bias", "biases"] = {"masked scores": partial(rounded_bias, coarse=coarse)}
        if workload.scope == "module":
            wider["bfloat16_projections", "tokens"] = {
                "projection": lambda x, context, weights: steps.project(coarse(x), coarse(context), weights)
            }
            wider["bfloat16_projections", "projection weights"] = {
                "projection": lambda x, context, weights: steps.project(x, context, weights.map(coarse))
            }
            wider["bfloat16_output_projection", "output's weights"] = {
                "output": lambda context, weights: steps.output(context, weights.map(coarse))
            }
        for (name, what), changes in wider.items():
            underscored = {step.replace(" ", "_"): change for step, change in changes.items()}
            yield wrong(name, f"the {what} are rounded to bfloat16 on the way", flag, **underscored)
    if workload.dtype == "bfloat16" and workload.kv_len < LONG:
        return
    tiles = {"every key": 1} | {f"every {tile} keys": tile for tile in (16, 32, 64, 128) if tile < workload.kv_len}
    sums = [(words, tile, False) for words, tile in tiles.items()]
    sums += [(f"{words} of an online softmax", tile, True) for words, tile in tiles.items()]
    sums.append(("all keys, before the division by their sum", workload.kv_len, True))
    for words, tile, is_online in sums:
        change = partial(rounded_sums, coarse=coarse, tile=tile, is_online=is_online)
        text = f"the sum over the keys is accumulated in bfloat16, rounded after {words}"
        yield wrong("bfloat16_sums", text, flag, context=change)


def wrong_numerics(workload: Workload) -> Iterator[Mistake]:
    """Every mistake of scale, normalisation and precision."""
    yield from scales(workload)
    yield from normalisations(workload)
    yield from fills(workload)
    yield from roundings(workload)
