"""Probes: kinds of inputs that expose mistakes.

A probe is a function that draws one kind of input for a workload; another seed gives other numbers of that kind. It
raises VacuousError if it cannot expose any mistake at the workload. To find mistakes, the kind of input matters more
than the tolerance (docs/checking.md). Shapes as in the contract.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Generator, Tensor

from attnbench.case import Inputs, draw_normal, generator
from attnbench.contract import repeat_heads
from attnbench.workloads.workload import Workload

TILE_LENS = (16, 64, 128)
"""Usual tile lengths of fused kernels; `draw_needles` chooses keys on both sides of the tiles' edges."""
LARGEST_LOGIT = 1e4  # largest absolute score of `draw_large`
HUGE_LOGITS = {
    "attention": {"float64": 1e6, "float32": 8e4, "bfloat16": 8e4},
    "module": {"float64": 1e6, "float32": 6e4},
}
"""Largest absolute scores of `draw_huge`, by scope and dtype. Correct code has errors of a few roundings of a score; in
float32 these would change a weight by half at scores of 1e6. In half of the rows, every visible score is below -4e4, so
that a fill value of -4e4 or more, used instead of minus infinity, hides nothing."""
SHIFTS = {"float64": 300.0, "float32": 300.0, "float16": 300.0, "bfloat16": 112.0}
"""Shifts of a query's scores in `draw_shifted`, by dtype. Exponentials of such scores overflow float32, or vanish;
bfloat16 lacks the digits for larger shifts."""
LARGEST_PRODUCT = 3e4
"""Largest product of a query and a key in float16: about half of the dtype's range, because some code applies the scale
only afterwards."""
POINTED, POINTED_OF_HUGE = 0.4, 0.2
"""Approximate difference between the score of the key that a query points at and its other scores, as a share of the
largest absolute score; POINTED_OF_HUGE is for `draw_huge`."""
LARGE_TOKENS = {"float16": 8.0, "bfloat16": 8.0, "float32": 30.0, "float64": 30.0}
"""Factor of the tokens in `draw_large`, by dtype. It is smaller in half precision: otherwise a rounding of a projected
query or key would decide which key gets the weight."""
OFFSETS = {"float16": 40.0, "bfloat16": 8.0}
"""Numbers that `draw_offset` adds to normal values, by dtype; a rounding of the sum is far below the values' spread."""
FLAT, MANY_KEYS = 0.3, 1024
"""The factor of queries, and the least number of keys, in `draw_offset`."""
TOKENS = ("query", "key", "value", "x", "context")
NEAR = "near"  # name of the inputs of `draw_near`, for the second call of some rules


class VacuousError(ValueError):
    """A probe, or a comparison with the reference, cannot expose any mistake at this workload."""


_drawn = lru_cache(maxsize=2)(draw_normal)  # all probes of a workload begin with the same numbers


def normal(workload: Workload, seed: int) -> Inputs:
    """Return copies of the inputs of `draw_normal`, which are drawn once for all probes of a workload."""
    return _drawn(workload, seed).map(torch.clone)


def forget_drawn() -> None:
    """Free the memory of the normal inputs that the probes of a workload share."""
    _drawn.cache_clear()


def draw_near(workload: Workload, seed: int) -> Inputs:
    """Draw the normal inputs with a new middle row in each tensor of TOKENS; all other rows are unchanged."""
    inputs, fresh = normal(workload, seed), normal(workload, seed + 1)
    tensors = {name: inputs.tensors[name].clone() for name in TOKENS if name in inputs.tensors}
    for name, tensor in tensors.items():
        middle = tensor.shape[-2] // 2
        tensor[..., middle, :] = fresh.tensors[name][..., middle, :]
    return replace(inputs, tensors=inputs.tensors | tensors)


def draw_needles(workload: Workload, seed: int) -> Inputs:
    """Draw queries that each point at one key (a needle): near the query, at an end, at a tile's edge, or at random.

    A query points at a key if nearly all of the query's weight is on this key. If code omits the key, the output shows
    it; an average of many values would hide it. Each row of the values encodes its index in signs, so a wrong row
    shows. In scope `module`, where inputs are projected, the inputs are normal ones times 3.
    """
    inputs = normal(workload, seed)
    if workload.scope == "module":
        return _times(inputs, 3.0)
    draws = generator(workload.seed, 3, seed)
    targets = needle_targets(workload, draws)  # (T,)
    aligned = repeat_heads(inputs.tensors["key"], workload.num_heads)[:, :, targets]  # (B,G,S,K) -> (B,H,T,K)
    query = 2.0 * aligned + 0.1 * inputs.tensors["query"]
    return replace(inputs, tensors=inputs.tensors | {"query": query, "value": marked(inputs.tensors["value"], draws)})


def needle_targets(workload: Workload, draws: Generator) -> Tensor:
    """Choose the index of the key that each query points at (T,), from the places that `draw_needles` describes."""
    query_len, key_len = workload.seq_len, workload.kv_len
    own = torch.arange(query_len)
    edges = torch.tensor([edge for tile in TILE_LENS for edge in (tile - 1, tile)])
    sizes = workload.batch_size, query_len, key_len
    firsts, lasts, _ = (torch.from_numpy(each[0]) for each in workload.mask_rule.seen_keys(*sizes))  # in batch row 0
    random = torch.randint(key_len, (query_len,), generator=draws)
    choices = torch.stack(
        [
            own,
            own - 1,
            own + 1,
            own + key_len - query_len,
            torch.zeros_like(own),
            torch.full_like(own, key_len - 1),
            edges[own % len(edges)],
            (own // TILE_LENS[1] + 1) * TILE_LENS[1],
            random,
            (random * (own + 1)) // query_len,
            *(firsts, firsts - 1, lasts, lasts + 1),
        ]
    )
    turn = torch.randint(len(choices), (query_len,), generator=draws)
    return choices.clamp(0, key_len - 1).gather(0, turn[None])[0]


def marked(value: Tensor, draws: Generator) -> Tensor:
    """Return values (B, G, S, V) of -1 and 1: each row encodes its index in binary, followed by random signs."""
    batch, groups, key_len, width = value.shape
    number = torch.arange(batch * groups * key_len).view(batch, groups, key_len, 1)
    num_digits = min(width, max(1, int(number.max()).bit_length()))
    digits = number.bitwise_right_shift(torch.arange(num_digits)) % 2  # (B,G,S,digits)
    rest = torch.randint(2, (batch, groups, key_len, width - num_digits), generator=draws)
    return torch.cat([digits, rest], dim=-1).to(value.dtype) * 2 - 1


def draw_large(workload: Workload, seed: int) -> Inputs:
    """Draw inputs with scores of up to 10,000 in size: exponentials overflow, or the largest score is far below 0.

    Each query points at a visible key: this key's score gets a share POINTED of the size, and is clearly the largest in
    any dtype. The rest of the size is added to all scores of the query, or subtracted. LARGEST_PRODUCT limits scores in
    float16. In scope `module`, or with K = 1, the tokens are normal ones times LARGE_TOKENS.
    """
    if workload.scope == "module" or workload.head_dim == 1:
        return _times(normal(workload, seed), LARGE_TOKENS[workload.dtype])
    is_narrow = workload.dtype == "float16"
    most = LARGEST_PRODUCT * workload.score_scale
    return _pointed(workload, seed, min(LARGEST_LOGIT, most) if is_narrow else LARGEST_LOGIT)


def draw_huge(workload: Workload, seed: int) -> Inputs:
    """Draw inputs with scores beyond the usual clamps: the largest that the dtype can still distinguish.

    In scope `module` all scores of a query are shifted up or down by the same amount. Only outputs are compared,
    because at such scores even correct code loses the digits of its gradients.

    Raises:
        VacuousError: the dtype has too few digits, or tokens or keys have width 1.
    """
    if not (size := HUGE_LOGITS[workload.scope].get(workload.dtype, 0.0)):
        raise VacuousError(f"{workload.dtype} has no digits left at larger scores")
    _require_width(workload)
    if workload.scope == "module":
        return _shifted(draw_large(workload, seed), size, workload, generator(workload.seed, 6, seed))
    return _pointed(workload, seed, size, POINTED_OF_HUGE)


def draw_shifted(workload: Workload, seed: int) -> Inputs:
    """Draw normal inputs, and shift all scores of a query far down or up by the same amount.

    The shift does not change the right weights, none of which is nearly 1. It changes the weights of code that does not
    subtract the row's maximum, starts from a finite maximum, clamps scores, or recomputes them with fewer digits.
    """
    _require_width(workload)
    size = SHIFTS[workload.dtype]
    if workload.scope == "attention" and workload.dtype == "float16":
        size = min(size, LARGEST_PRODUCT * workload.score_scale)
    return _shifted(normal(workload, seed), size, workload, generator(workload.seed, 9, seed))


def _require_width(workload: Workload) -> None:
    """Raise VacuousError if tokens or keys have width 1: the column that shifts the scores would be the only one."""
    if (workload.embed_dim if workload.scope == "module" else workload.head_dim) == 1:
        raise VacuousError("tokens or keys of one number cannot all have large scores")


def _signs(shape: tuple[int, ...], draws: Generator) -> Tensor:
    return torch.randint(2, shape, generator=draws) * 2.0 - 1


def _pointed(workload: Workload, seed: int, size: float, share: float = POINTED) -> Inputs:
    """Draw normal inputs whose queries point at visible keys, with scores of up to `size` in size: see `draw_large`."""
    inputs, root = normal(workload, seed), math.sqrt(workload.head_dim)
    of_one = size / (workload.head_dim * workload.score_scale)  # because keys have length sqrt(K)
    draws = generator(workload.seed, 5, seed)
    key = inputs.tensors["key"].clone()
    key[..., 1:] *= root / key[..., 1:].norm(dim=-1, keepdim=True)
    needles = needle_targets(workload, draws).numpy()
    rule, sizes = workload.mask_rule, (workload.batch_size, workload.seq_len, workload.kv_len)
    row, place = np.arange(workload.batch_size)[:, None], np.arange(workload.seq_len)
    is_seen = rule.sees(row, place, needles, rule.table(*sizes), workload.kv_len - workload.seq_len)
    # A query that does not see its own target points at the last key that it sees.
    visible = torch.from_numpy(np.where(is_seen, needles, rule.seen_keys(*sizes)[1]))
    targets = visible[:, None, :, None]  # (B,1,T,1)
    spread = repeat_heads(key, workload.num_heads)
    query = spread.gather(2, targets.expand(-1, workload.num_heads, -1, workload.head_dim)) * (share * of_one)
    pointed = replace(inputs, tensors=inputs.tensors | {"query": query, "key": key})
    return _shifted(pointed, (1 - share) * size, workload, draws)


def _shifted(inputs: Inputs, shift: float, workload: Workload, draws: Generator) -> Inputs:
    """Shift all scores of each query up or down by `shift`, with a random sign.

    In scope `attention`, column 0 is the same number in all keys; the scaled product of it and column 0 of a query is
    the shift. In scope `module`, feature 0 of a query's token becomes the sign, and feature 1 of a key's token becomes
    1. Of these two features, the query projection reads only feature 0, and the key projection only feature 1.
    """
    scale = workload.score_scale
    if workload.scope == "attention":
        query, key = inputs.tensors["query"].clone(), inputs.tensors["key"].clone()
        key[..., 0] = math.sqrt(workload.head_dim)
        query[..., 0] = shift / (math.sqrt(workload.head_dim) * scale) * _signs(query.shape[:-1], draws)
        return replace(inputs, tensors=inputs.tensors | {"query": query, "key": key})
    x, source = inputs.tensors["x"].clone(), "context" if "context" in inputs.tensors else "x"
    x[..., 0] = _signs(x.shape[:-1], draws)
    tensors = inputs.tensors | {"x": x}
    keys = tensors[source].clone() if source == "context" else x
    keys[..., 1] = 1.0
    weights = inputs.weights.map(torch.clone)
    each = math.sqrt(shift / (weights.query.shape[1] * scale))  # K * each**2 * scale is the shift
    weights.query[:, :, :2] = torch.tensor([each, 0.0])
    weights.key[:, :, :2] = torch.tensor([0.0, each])
    return Inputs(tensors=tensors | {source: keys}, weights=weights)


def draw_equal(workload: Workload, seed: int) -> Inputs:
    """Draw equal queries and equal keys: visible keys have the same weight, and an extra key changes all weights."""
    if workload.scope == "module":
        raise VacuousError("if all tokens are equal, all values are, too")
    inputs = normal(workload, seed)
    query, key = (inputs.tensors[name][:, :, :1].expand_as(inputs.tensors[name]) for name in ("query", "key"))
    return replace(inputs, tensors=inputs.tensors | {"query": query.contiguous(), "key": key.contiguous()})


def draw_offset(workload: Workload, seed: int) -> Inputs:
    """Draw similar scores over many keys, and values far from 0: sums in half precision then lose digits."""
    if workload.scope == "module" or workload.dtype not in OFFSETS or workload.kv_len < MANY_KEYS:
        raise VacuousError("only sums of many numbers in half precision show it")
    inputs = normal(workload, seed)
    moved = {"query": FLAT * inputs.tensors["query"], "value": inputs.tensors["value"] + OFFSETS[workload.dtype]}
    return replace(inputs, tensors=inputs.tensors | moved)


def _times(inputs: Inputs, factor: float) -> Inputs:
    times = {name: factor * tensor for name, tensor in inputs.tensors.items() if name in TOKENS}
    return replace(inputs, tensors=inputs.tensors | times)


PROBES: dict[str, Callable[[Workload, int], Inputs]] = {
    "normal": normal,
    "needles": draw_needles,
    "large": draw_large,
    "huge": draw_huge,
    "shifted": draw_shifted,
    "offset": draw_offset,
    "equal": draw_equal,
}
"""Every kind of input in the check, by name: f(workload, seed) -> inputs in float64."""
IN_TURN = ("large", "huge", "shifted", "equal")
"""Kinds of input that take turns over the workloads of a long check (see `covering.turns`)."""
