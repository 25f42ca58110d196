"""Inputs and weights of a workload, drawn in float64 on the CPU from its seed: the same numbers on every machine."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from attnbench.contract import Weights
from attnbench.workloads.workload import Workload


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
    tensors = {}
    for name, shape in Weights.shapes(workload, width).items():
        fan_in = shape[1] if name == "out" else width
        tensors[name] = torch.randn(*shape, generator=draws, dtype=torch.float64) / math.sqrt(fan_in)
    return Weights(**tensors).biased(workload.bias)  # drawn all the same, so that the others keep their values


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
    drawn = Inputs(tensors=tensors, weights=draw_weights(workload))
    return laid_out(drawn, workload).map(torch.Tensor.contiguous)  # equal where heads or batch rows share their memory


def laid_out(inputs: Inputs, workload: Workload) -> Inputs:
    """The same values in the workload's layout; where they lie so already, the tensors themselves.

    `transposed`: query, key and value are views of (B, T, H, K), as a projection yields them. `expanded`: key and value
    are those of head 0, expanded over the others with stride 0; `broadcast`: those of batch row 0, over the others.
    """
    tensors = dict(inputs.tensors)
    match workload.layout:
        case "transposed":
            tensors = {name: each.transpose(1, 2).contiguous().transpose(1, 2) for name, each in tensors.items()}
        case "expanded":
            tensors |= {name: tensors[name][:, :1].contiguous().expand_as(tensors[name]) for name in ("key", "value")}
        case "broadcast":
            tensors |= {name: tensors[name][:1].contiguous().expand_as(tensors[name]) for name in ("key", "value")}
    return Inputs(tensors=tensors, weights=inputs.weights)
