"""The kinds of input that the check tries. The input matters more than the tolerance (docs/method.md).

A probe is a function of a workload and a seed that draws one kind of input; another seed draws it afresh.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Generator, Tensor

from attnbench.checking.case import Inputs, draw_normal, generator
from attnbench.checking.oracle import row_mask
from attnbench.contract import repeat_heads
from attnbench.workloads.workload import Workload

TILE_LENS = (16, 64, 128)
"""Usual tile lengths of fused kernels: needles are placed on both sides of their edges."""
LARGEST_LOGIT = 1e4
LARGEST_PRODUCT = 3e4
"""Half of float16's range: an honest form may multiply query and key before it divides by sqrt(K)."""
POINTED = 0.4
"""The share of the largest logit by which a query's own key exceeds the others."""
LARGE_TOKENS = {"float16": 8.0, "bfloat16": 8.0, "float32": 30.0, "float64": 30.0}
"""In half precision less: a rounding of a projected query or key would decide between keys."""


class VacuousError(ValueError):
    """A probe cannot show anything at this workload."""


def draw_needles(workload: Workload, seed: int) -> Inputs:
    """Queries that each point at one key: itself, its neighbours, the first, the last, tile edges, a random one.

    An average of many values hides a missing key; a query whose whole weight lies on that key does not. Each value row
    spells its own number as signs, so that a misrouted row is visible. In scope `module`, where inputs are projected,
    they are the normal ones, three times as large.
    """
    inputs = draw_normal(workload, seed)
    if workload.scope == "module":
        return _times(inputs, 3.0)
    draws = generator(workload.seed, 3, seed)
    targets = needle_targets(workload, draws)  # (T,)
    aligned = repeat_heads(inputs.tensors["key"], workload.num_heads)[:, :, targets]  # (B,G,S,K) -> (B,H,T,K)
    query = 2.0 * aligned + 0.1 * inputs.tensors["query"]
    return replace(inputs, tensors=inputs.tensors | {"query": query, "value": marked(inputs.tensors["value"], draws)})


def needle_targets(workload: Workload, draws: Generator) -> Tensor:
    """The key that each query points at (T,), of a kind drawn for each: places, tile edges, edges of what it sees."""
    query_len, key_len = workload.seq_len, workload.kv_len
    own = torch.arange(query_len)
    edges = torch.tensor([edge for tile in TILE_LENS for edge in (tile - 1, tile)])
    seen_edges = [(seen[0].int().argmax(dim=-1), _last_seen(seen[0])) for _, seen in _seen_by_blocks(workload)]
    firsts, lasts = (torch.cat(each) for each in zip(*seen_edges, strict=True))  # in batch row 0
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


def _seen_by_blocks(workload: Workload) -> Iterator[tuple[Tensor, Tensor]]:
    """Query rows (R,), and which keys they see (B, R, S)."""
    for rows in torch.arange(workload.seq_len).split(1024):
        yield rows, row_mask(workload, rows).seen[:, 0]


def _last_seen(seen: Tensor) -> Tensor:
    """The last key that each query sees (...,); the last of all where it sees none."""
    return seen.shape[-1] - 1 - seen.flip(-1).int().argmax(dim=-1)


def marked(value: Tensor, draws: Generator) -> Tensor:
    """Values of the same shape (B, G, S, V): row (b, g, s) spells its number in binary, as signs; then random signs."""
    batch, groups, key_len, width = value.shape
    number = torch.arange(batch * groups * key_len).view(batch, groups, key_len, 1)
    num_digits = min(width, max(1, int(number.max()).bit_length()))
    digits = number.bitwise_right_shift(torch.arange(num_digits)) % 2  # (B,G,S,digits)
    rest = torch.randint(2, (batch, groups, key_len, width - num_digits), generator=draws)
    return torch.cat([digits, rest], dim=-1).to(value.dtype) * 2 - 1


def draw_large(workload: Workload, seed: int) -> Inputs:
    """Scores of up to 10 000 in size, of either sign: exponentials that overflow, maxima that are far below 0.

    Query i points at a key that it sees, with part of that size; the rest is added to all its scores, or taken from
    them. So an honest answer is sure of its key, however coarse its dtype. Where products of query and key must fit
    into float16, scores are smaller.
    """
    inputs = draw_normal(workload, seed)
    is_narrow = workload.dtype == "float16"
    if workload.scope == "module" or workload.head_dim == 1:
        return _times(inputs, LARGE_TOKENS[workload.dtype])
    draws = generator(workload.seed, 5, seed)
    root = math.sqrt(workload.head_dim)
    size = min(LARGEST_LOGIT, LARGEST_PRODUCT / root) if is_narrow else LARGEST_LOGIT
    key = inputs.tensors["key"].clone()
    key[..., 1:] *= root / key[..., 1:].norm(dim=-1, keepdim=True)
    key[..., 0] = root
    needles, visible = needle_targets(workload, draws), []
    for rows, seen in _seen_by_blocks(
        workload
    ):  # a query that does not see its own target has the last key that it sees
        target = needles[rows].expand(workload.batch_size, -1)
        visible.append(target.where(seen.gather(2, target[..., None])[..., 0], _last_seen(seen)))
    targets = torch.cat(visible, dim=1)[:, None, :, None]  # (B,1,T,1)
    spread = repeat_heads(key, workload.num_heads)
    query = spread.gather(2, targets.expand(-1, workload.num_heads, -1, workload.head_dim)) * (POINTED * size / root)
    query[..., 0] = (1 - POINTED) * size * (torch.randint(2, query.shape[:-1], generator=draws) * 2 - 1)
    return replace(inputs, tensors=inputs.tensors | {"query": query, "key": key})


def draw_equal(workload: Workload, seed: int) -> Inputs:
    """All queries alike and all keys alike: every visible key has the same weight, and a key too many shows.

    Raises:
        VacuousError: in scope `module`, where values would be alike as well.
    """
    if workload.scope == "module":
        raise VacuousError("where all tokens are alike, so are all values")
    inputs = draw_normal(workload, seed)
    query, key = (inputs.tensors[name][:, :, :1].expand_as(inputs.tensors[name]) for name in ("query", "key"))
    return replace(inputs, tensors=inputs.tensors | {"query": query.contiguous(), "key": key.contiguous()})


def _times(inputs: Inputs, factor: float) -> Inputs:
    return replace(inputs, tensors={name: factor * tensor for name, tensor in inputs.tensors.items()})


PROBES: dict[str, Callable[[Workload, int], Inputs]] = {
    "normal": draw_normal,
    "needles": draw_needles,
    "large": draw_large,
    "equal": draw_equal,
}
"""Every kind of input that the check tries, by name."""
