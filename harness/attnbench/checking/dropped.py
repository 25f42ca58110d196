"""The weights that a candidate uses under dropout, seen from outside: its output for values that are unit vectors.

Attention is linear in its values, so that column j of the output is the weight of the key whose value is unit vector j.
In scope `module` the projections are chosen so that it is so there, too: each token spells its place, the value
projection reads it, and the output projection leaves the merged heads as they are.

Shapes: N calls, B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width, D
embedding width.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import torch
from torch import Tensor

from attnbench.checking.case import TORCH_DTYPES, Case, build, copied
from attnbench.checking.deviation import allowed
from attnbench.checking.inputs import Inputs, draw_normal
from attnbench.checking.reference import Reference, refer_to
from attnbench.contract import Implementation
from attnbench.timing.prediction import at_length
from attnbench.workloads.workload import Workload

NUM_WEIGHTS = 2**13
"""So many weights are looked at, in at least four calls."""
MOST_KEYS = 16
"""With few keys every weight is far above what rounding makes of it, in half precision, too."""
LONGER_LEN = 35
TOLD = 2.5
"""A weight of so many times what it may be off is told from 0."""


@dataclass(frozen=True)
class Trial:
    """A candidate under dropout at a small workload: what its weights are without, and what it makes of them."""

    implementation: Implementation
    asked: Workload
    seed: int

    @cached_property
    def workload(self) -> Workload:
        """The workload with as many keys as one call can show."""
        asked = self.asked
        keys = min(asked.kv_len, asked.value_dim, MOST_KEYS)
        queries = keys if asked.seq_len == asked.kv_len else min(asked.seq_len, MOST_KEYS)
        mask = str(asked.mask_rule.at_other_length())
        return msgspec.structs.replace(_merged_width(asked), seq_len=queries, kv_len=keys, mask=mask)

    @cached_property
    def longer(self) -> Workload:
        """The workload without dropout at a length of several small tiles, or its own where that is shorter."""
        plain = msgspec.structs.replace(_merged_width(self.asked), dropout=0.0, direction="inference")
        return at_length(plain, LONGER_LEN) if plain.seq_len > LONGER_LEN else plain

    @cached_property
    def right(self) -> Reference:
        """The answer without dropout where values are unit vectors."""
        plain = msgspec.structs.replace(self.workload, dropout=0.0, direction="inference")
        return refer_to(plain, unit_inputs(plain, self.seed), self.seed)

    @cached_property
    def weights(self) -> Tensor:
        """The weights without dropout (B, H, T, S)."""
        return weights_in(self.right.expected["output"], self.workload)

    @property
    def rescale(self) -> float:
        """What every weight that is kept is multiplied by."""
        return 1 / (1 - self.workload.dropout)

    @property
    def off(self) -> float:
        """How far a weight that was dropped or rescaled may be off."""
        rounding = torch.finfo(TORCH_DTYPES[self.workload.dtype]).eps * float(self.weights.max())
        return (allowed("output", self.right) + rounding) * self.rescale

    @cached_property
    def told(self) -> Tensor:
        """Which weights (B, H, T, S) are large enough to be told from 0."""
        return self.weights * self.rescale > TOLD * self.off

    def case(self, inputs: Inputs | None = None, workload: Workload | None = None) -> Case:
        """A case on fresh copies of the unit vectors, or of other inputs, perhaps at another workload."""
        workload = workload or self.workload
        return build(workload, self.implementation, copied(inputs or self.right.inputs, workload))

    @cached_property
    def dropped(self) -> Tensor:
        """The weights of many calls (N, B, H, T, S)."""
        case = self.case()
        num_calls = max(4, -(-NUM_WEIGHTS // max(1, int(self.told.sum()))))
        with case.grad_mode():
            return torch.stack([weights_in(case.output().detach(), self.workload) for _ in range(num_calls)])

    @cached_property
    def zeros(self) -> Tensor:
        """Which of them are 0."""
        return self.dropped.abs() <= self.off


def _merged_width(workload: Workload) -> Workload:
    """In scope `module`: with D = H*V, so that the output projection may be the identity."""
    width = workload.num_heads * workload.value_dim if workload.scope == "module" else workload.embed_dim
    return msgspec.structs.replace(workload, embed_dim=width)


def merged_inputs(workload: Workload, seed: int) -> Inputs:
    """Normal inputs; in scope `module` with an output projection that leaves the merged heads as they are."""
    drawn = draw_normal(workload, seed)
    given = drawn.weights
    if workload.scope == "attention" or given.out is None:
        return drawn
    bias = None if given.out_bias is None else torch.zeros_like(given.out_bias)
    out = torch.eye(len(given.out), dtype=given.out.dtype)
    return Inputs(tensors=drawn.tensors, weights=replace(given, out=out, out_bias=bias))


def unit_inputs(workload: Workload, seed: int, *, alike: bool = False) -> Inputs:
    """Inputs whose values are unit vectors, key j's at column j; or, all `alike`, 1 everywhere."""
    drawn, keys = merged_inputs(workload, seed), torch.arange(workload.kv_len)
    columns = slice(None) if alike else keys
    if workload.scope == "attention":
        values = torch.zeros_like(drawn.tensors["value"])
        values[:, :, keys, columns] = 1.0
        changed = {"query": 0.5 * drawn.tensors["query"], "value": values}  # weights that are not far apart
        return Inputs(tensors=drawn.tensors | changed, weights=drawn.weights)
    source = "context" if "context" in drawn.tensors else "x"
    tokens = drawn.tensors[source].clone()
    tokens[..., keys] = torch.eye(workload.kv_len, dtype=tokens.dtype)  # each token spells its place
    given = drawn.weights
    values = torch.zeros_like(given.value)
    values[:, columns, keys] = 1.0
    bias = None if given.value_bias is None else torch.zeros_like(given.value_bias)
    weights = replace(given, query=0.5 * given.query, value=values, value_bias=bias)
    return Inputs(tensors=drawn.tensors | {source: tokens}, weights=weights)


def by_heads(output: Tensor, workload: Workload) -> Tensor:
    """An output, of either scope, as (B, H, T, V) in float64 on the CPU."""
    if workload.scope == "module":
        output = output.unflatten(-1, (workload.num_heads, workload.value_dim)).transpose(1, 2)
    return output.double().cpu()


def weights_in(output: Tensor, workload: Workload) -> Tensor:
    """The weights (B, H, T, S) that an output shows where values are unit vectors."""
    return by_heads(output, workload)[..., : workload.kv_len]


def unit_values(value: Tensor) -> Tensor:
    """Unit vectors (B, G, S, S) in place of values (B, G, S, V)."""
    return torch.eye(value.shape[-2], dtype=value.dtype, device=value.device).expand(*value.shape[:2], -1, -1)


def for_heads(value: Tensor, query: Tensor) -> Tensor:
    """Values (B, G, S, V) as each query head reads them (B, H, S, V)."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
