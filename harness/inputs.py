"""Inputs and weights of a workload, drawn in float64 on the CPU from its seed: the same numbers on every machine.

A probe is a function that draws one kind of input; the input matters more than the tolerance (docs/method.md).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from harness.contract import Weights
from harness.records import Workload

TILE_LENS = (16, 64, 128)
"""Usual tile lengths of fused kernels: needles are placed on both sides of their edges."""
NEEDLE_SHARPNESS = 2.0


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a call receives, by name and in order, and the canonical weights.

    Scope `attention`: query (B, H, T, K), key (B, G, S, K), value (B, G, S, V).
    Scope `module`: x (B, T, D) and, where S differs from T, context (B, S, D).
    """

    tensors: dict[str, Tensor]
    weights: Weights

    def map(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """The same inputs and weights with `change` applied to each tensor."""
        tensors = {name: change(tensor) for name, tensor in self.tensors.items()}
        return Inputs(tensors=tensors, weights=self.weights.map(change))


def generator(*seeds: int) -> Generator:
    """A generator on the CPU for this combination of whole numbers."""
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 1_000_003 + seed + 1) % 2**63
    return Generator().manual_seed(mixed)


def draw_weights(workload: Workload) -> Weights:
    """Canonical weights with variance 1 / fan-in in float64, with the biases that the workload asks for."""
    draws = generator(workload.seed, 1)
    width = workload.embed_dim if workload.scope == "module" else 1  # scope attention reads their other sizes alone
    heads, groups = workload.num_heads, workload.num_kv_heads
    merged = heads * workload.value_dim

    def normal(*shape: int, fan_in: int) -> Tensor:
        return torch.randn(*shape, generator=draws, dtype=torch.float64) / math.sqrt(fan_in)

    weights = Weights(
        query=normal(heads, workload.head_dim, width, fan_in=width),
        key=normal(groups, workload.head_dim, width, fan_in=width),
        value=normal(groups, workload.value_dim, width, fan_in=width),
        out=normal(width, merged, fan_in=merged),
        query_bias=normal(heads, workload.head_dim, fan_in=width),
        key_bias=normal(groups, workload.head_dim, fan_in=width),
        value_bias=normal(groups, workload.value_dim, fan_in=width),
        out_bias=normal(width, fan_in=width),
    )
    return weights.biased(workload.bias)  # drawn all the same, so that the others keep their values


def draw_normal(workload: Workload, seed: int) -> Inputs:
    """Independent standard normal values."""
    draws = generator(workload.seed, 2, seed)
    batch, heads, groups = workload.batch_size, workload.num_heads, workload.num_kv_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws, dtype=torch.float64)

    if workload.scope == "module":
        tensors = {"x": normal(batch, workload.seq_len, workload.embed_dim)}
        if workload.kv_len != workload.seq_len:
            tensors["context"] = normal(batch, workload.kv_len, workload.embed_dim)
    else:
        tensors = {
            "query": normal(batch, heads, workload.seq_len, workload.head_dim),
            "key": normal(batch, groups, workload.kv_len, workload.head_dim),
            "value": normal(batch, groups, workload.kv_len, workload.value_dim),
        }
    return Inputs(tensors=tensors, weights=draw_weights(workload))


def draw_needles(workload: Workload, seed: int) -> Inputs:
    """Queries that each point at one key: itself, its neighbours, the first, the last, tile edges, a random one.

    An average of many values hides a missing key; a query whose whole weight lies on that key does not.
    In scope `module` the projections stand between, and the inputs are the normal ones, three times as large.
    """
    inputs = draw_normal(workload, seed)
    if workload.scope == "module":
        tensors = {name: 3 * tensor for name, tensor in inputs.tensors.items()}
        return Inputs(tensors=tensors, weights=inputs.weights)
    key = inputs.tensors["key"]
    targets = needle_targets(workload, generator(workload.seed, 3, seed))  # (T,)
    groups = torch.arange(workload.num_heads) // (workload.num_heads // workload.num_kv_heads)
    aligned = key[:, groups][:, :, targets]  # (B,G,S,K) -> (B,H,T,K)
    noise = 0.1 * inputs.tensors["query"]
    return Inputs(tensors=inputs.tensors | {"query": NEEDLE_SHARPNESS * aligned + noise}, weights=inputs.weights)


def needle_targets(workload: Workload, draws: Generator) -> Tensor:
    """The key that each query points at (T,): the kinds of target take turns, and start at a random one."""
    query_len, key_len = workload.seq_len, workload.kv_len
    own = torch.arange(query_len)
    edges = torch.tensor([edge for tile in TILE_LENS for edge in (tile - 1, tile)])
    random = torch.randint(key_len, (query_len,), generator=draws)
    kinds = torch.stack(
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
        ]
    )
    turn = torch.randint(len(kinds), (query_len,), generator=draws)
    return kinds.clamp(0, key_len - 1).gather(0, turn[None])[0]


PROBES: dict[str, Callable[[Workload, int], Inputs]] = {"normal": draw_normal, "needles": draw_needles}
"""Every kind of input that the check tries, by name; a seed draws it afresh."""
