"""The catalogue of mistakes in the backward pass only: the output is right, and some gradients are wrong.

A mistake is the textbook form (checking/steps.py) in which the step `backward pass` returns the right context with
a wrong gradient. Notation as in FlashAttention-2: O is the context and dO its gradient, P the weights, dP = dO V^T,
delta = rowsum(dO * O), and the gradient of the scores is dS = P * (dP - delta). Shapes as in the contract; R query
rows. Source: https://arxiv.org/abs/2307.08691, algorithm 2.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.mistakes import CAUSAL, TILE_LENS
from attnbench.checking.oracle import RowMask, project
from attnbench.checking.steps import Mistake, wrong
from attnbench.workloads.workload import Workload

Results = dict[str, Tensor]
"""The results of the steps of the textbook form, by the step's name."""
LEAST_TILE = 16  # shortest tile, in queries or keys, that a backward pass may leave out


def moved(scores: Tensor) -> Tensor:
    """Return zeros (B, H, R, S) whose gradient passes to `scores`, except where a score is -inf (a hidden key)."""
    return (scores - scores.detach()).where(scores.isfinite(), 0.0)


def recomputed(
    results: Results,
    _: RowMask,
    *,
    weights: Callable[[Results], Tensor] = lambda results: results["weights"],
    scores: Callable[[Results], Tensor] = lambda results: results["masked scores"],
    has_delta: bool = True,
    is_own: bool = False,
) -> Tensor:
    """Return the right context (B, H, R, V); its gradient is that of FlashAttention's backward pass with an error.

    That pass recomputes the weights P: here they are `weights(results)`. The gradient dS flows to `scores(results)`.
    If `has_delta` is False, delta is left out. If `is_own` is True, delta is rowsum(P * dP) with the recomputed P,
    instead of rowsum(dO * O). Notation as in this module's docstring.
    """
    again, value = weights(results).detach(), results["value"]
    flow = again * moved(scores(results))
    if has_delta:
        flow = flow - (again if is_own else results["weights"].detach()) * flow.sum(dim=-1, keepdim=True)
    return results["context"].detach() + flow @ value.detach() + again @ (value - value.detach())


def over_queries(results: Results, _: RowMask) -> Tensor:
    """Return the right context; in its gradient, delta is the sum of P * dP over the queries instead of the keys."""
    weights, value = results["weights"].detach(), results["value"]
    flow = weights * moved(results["masked scores"])
    flow = flow - weights * flow.sum(dim=-2, keepdim=True)
    return results["context"].detach() + flow @ value.detach() + weights @ (value - value.detach())


def partly(results: Results, mask: RowMask, *, frozen: tuple[str, ...], chosen: Callable[..., Tensor]) -> Tensor:
    """Return the context; its gradient does not flow through the chosen query-key pairs to the operands in `frozen`.

    `chosen` maps indices of heads, queries and keys to booleans that broadcast to (H, R, S): True for chosen pairs.
    """
    every = {name: results[name] for name in ("query", "key", "value")}
    fixed = every | {name: results[name].detach() for name in frozen}
    place = chosen(torch.arange(results["query"].shape[1])[:, None, None], mask.queries, mask.keys)
    scores = steps.scores(fixed["query"], fixed["key"], mask).where(
        place, steps.scores(every["query"], every["key"], mask)
    )
    weights = steps.weights(steps.masked_scores(scores, mask), mask)
    share = (weights * place) @ fixed["value"] + (weights * ~place) @ every["value"]
    return results["context"].detach() + share - share.detach()


def unmasked(results: Results, mask: RowMask, *, seen: Callable[[RowMask], Tensor], is_own: bool) -> Tensor:
    """Return the context; its backward pass uses the wrong mask `seen`, but the right logsumexp (see `recomputed`)."""
    whole = mask.changed(results["scores"])
    logs = results["masked scores"].logsumexp(dim=-1, keepdim=True)
    weights = steps.hide(whole - logs, seen(mask)).exp().nan_to_num(0.0, 0.0)
    return recomputed(results, mask, weights=lambda _: weights, scores=lambda _: whole, is_own=is_own)


def exponentials(results: Results) -> Tensor:
    """Return the exponentials of the softmax, before they are divided by their sum."""
    masked = results["masked scores"]
    return (masked - masked.amax(dim=-1, keepdim=True)).exp().nan_to_num(0.0)


def uncapped(results: Results) -> Tensor:
    """Return the scores without the mask's changes, such as a softcap, but with -inf at hidden keys."""
    return results["scores"].where(results["masked scores"].isfinite(), -torch.inf)


def over_key_width(results: Results, mask: RowMask, *, chosen: tuple[str, ...], width: int) -> Tensor:
    """Return the context; in gradients of the operands in `chosen`, dP = dO V^T sums only the first `width` columns."""
    query, key, value = (results[name] for name in ("query", "key", "value"))
    cut = value.detach() * (torch.arange(value.shape[-1]) < width)
    context = results["context"].detach()
    for names, of_scores in ((chosen, cut), ({"query", "key"} - {*chosen}, value.detach())):
        q, k = (x if name in names else x.detach() for name, x in (("query", query), ("key", key)))
        masked = steps.masked_scores(steps.scores(q, k, mask), mask)
        flow = results["weights"].detach() * moved(masked)
        late = results["weights"].detach() * flow.sum(dim=-1, keepdim=True)
        context = context + flow @ of_scores - late @ value.detach()
    return context + results["weights"].detach() @ (value - value.detach())


def gathered_over_others(results: Results, mask: RowMask, *, names: tuple[str, ...], readers: int) -> Tensor:
    """Return the right context with a wrong gradient of the operands in `names`: it sums the wrong query heads.

    The gradient of key/value head g sums query heads g, g + G, ..., instead of the `readers` = H / G query heads that
    read this head.
    """
    number = results["query"].shape[1]
    head = torch.arange(number)
    place = head % (number // readers) * readers + head // (number // readers)
    operands = {name: results[name] for name in ("query", "key", "value")}
    for name in names:
        fixed = operands[name].detach()
        operands[name] = fixed + (operands[name] - fixed)[:, place]
    weights = steps.weights(steps.masked_scores(steps.scores(operands["query"], operands["key"], mask), mask), mask)
    share = weights @ operands["value"]
    return results["context"].detach() + share - share.detach()


def by_rounded_logs(results: Results, dtype: torch.dtype) -> Tensor:
    """Recompute the weights from the scores and a logsumexp that was rounded to `dtype`."""
    masked = results["masked scores"]
    logs = masked.logsumexp(dim=-1, keepdim=True).to(dtype).to(masked.dtype)
    return (masked - logs).exp().nan_to_num(0.0, 0.0)


def cuts(length: int) -> Iterator[int]:
    """Yield edges of tiles, as indices below `length`, at which a backward pass may stop early."""
    tiles = [tile for tile in TILE_LENS if LEAST_TILE <= tile < length]
    yield from sorted({*tiles, *((length - 1) // tile * tile for tile in tiles)})


def tiles(workload: Workload) -> Iterator[Mistake]:
    """Yield mistakes that omit the last queries in gradients of key or value, or the last keys in that of the query."""
    for first, frozen in itertools.product(cuts(workload.seq_len), (("key", "value"), ("key",), ("value",))):
        late = lambda _, query, __, first=first: query >= first  # noqa: E731
        detail = f"queries from {first} on, in the gradient of {' and '.join(frozen)}"
        yield wrong("backward_tiles_dropped", detail, backward_pass=partial(partly, frozen=frozen, chosen=late))
    for first in cuts(workload.kv_len):
        far = lambda _, __, key, first=first: key >= first  # noqa: E731
        detail = f"keys from {first} on, in the gradient of query"
        yield wrong("backward_tiles_dropped", detail, backward_pass=partial(partly, frozen=("query",), chosen=far))


def groups(workload: Workload) -> Iterator[Mistake]:
    """Yield mistakes in which gradients of key or value sum the wrong query heads, or only one head of each group."""
    readers = workload.num_heads // workload.num_kv_heads
    for which, frozen in itertools.product(
        {"first": 0, "last": readers - 1}.items() if readers > 1 else (), (("key", "value"), ("key",), ("value",))
    ):
        others = lambda head, _, __, place=which[1]: head % readers != place  # noqa: E731
        detail = f"only the {which[0]} query head of a group counts, in the gradient of {' and '.join(frozen)}"
        yield wrong("group_not_summed", detail, backward_pass=partial(partly, frozen=frozen, chosen=others))
    for names in (("key", "value"), ("key",), ("value",)) if min(readers, workload.num_kv_heads) > 1 else ():
        detail = f"in the gradient of {' and '.join(names)}"
        change = partial(gathered_over_others, names=names, readers=readers)
        yield wrong("group_of_other_heads", detail, backward_pass=change)


def other_masks(workload: Workload) -> Iterator[tuple[str, str, Callable[[RowMask], Tensor]]]:
    """Yield (mistake's name, detail, mask) for wrong masks of the backward pass: no mask, or a wrong causal mask."""
    parts = workload.mask_rule.parts
    if workload.mask_rule.hides:
        yield "backward_without_mask", "", lambda mask: torch.ones_like(mask.seen)
    for kind, end in CAUSAL.items() if not any(isinstance(part, tuple(CAUSAL)) for part in parts) else ():
        words = f"it is causal, {end}" if workload.seq_len != workload.kv_len else "it is causal"
        yield "backward_mask", words, lambda mask, kind=kind: mask.seen & mask.seen_under(kind())  # type: ignore[misc]
    for kind, end in CAUSAL.items() if workload.seq_len != workload.kv_len else ():
        if any(isinstance(part, tuple(CAUSAL)) and not isinstance(part, kind) for part in parts):
            yield "backward_mask", f"it is {end}", lambda mask, kind=kind: mask.seen_under(kind())  # type: ignore[misc]


def backward_catalogue(workload: Workload) -> Iterator[Mistake]:
    """Yield every mistake of the backward pass alone that is possible at this workload."""
    if workload.scope == "module":
        apart = lambda x, context, weights: project(x, context.detach(), weights)  # noqa: E731
        yield wrong("context_detached", projection=apart)
    if workload.sinks != "none":
        alone = lambda results: results["masked scores"].softmax(dim=-1).nan_to_num(0.0)  # noqa: E731
        for is_own in (False, True):
            yield wrong("backward_without_sinks", backward_pass=partial(recomputed, weights=alone, is_own=is_own))
    else:
        yield wrong("softmax_gradient_over_queries", needs_all_rows=True, backward_pass=over_queries)
        yield wrong("no_delta", backward_pass=partial(recomputed, has_delta=False))
        for is_own, detail in ((False, ""), (True, "in delta, too")):
            change = partial(recomputed, weights=exponentials, is_own=is_own)
            yield wrong("recomputed_without_denominator", detail, backward_pass=change)
            for name, words, seen in other_masks(workload):
                yield wrong(
                    name,
                    "; ".join(filter(None, (words, detail))),
                    backward_pass=partial(unmasked, seen=seen, is_own=is_own),
                )
        widths = {-(-workload.head_dim // tile) * tile for tile in (1, 16, 32, 64)}
        for width, chosen in itertools.product(sorted(widths), (("query", "key"), ("query",), ("key",))):
            if width < workload.value_dim:
                detail = f"{width} of {workload.value_dim}, in the gradient of {' and '.join(chosen)}"
                change = partial(over_key_width, chosen=chosen, width=width)
                yield wrong("gradient_over_key_width", detail, backward_pass=change)
        for dtype in (torch.float16, torch.bfloat16):
            weights = partial(by_rounded_logs, dtype=dtype)
            detail = str(dtype).removeprefix("torch.")
            yield wrong("half_logsumexp", detail, backward_pass=partial(recomputed, weights=weights))
        if not workload.mask_rule.is_additive:
            yield wrong("softcap_without_derivative", backward_pass=partial(recomputed, scores=uncapped))
    yield from groups(workload)
    yield from tiles(workload)
