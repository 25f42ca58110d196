"""Names that an implementation may import: canonical weights, the bound mask, the base module, Implementation.

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width, D embedding
width. Query head h reads key/value head h // (H / G), as in grouped-query attention (https://arxiv.org/abs/2305.13245).
"""

import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from functools import partial
from importlib.machinery import PathFinder
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.contract.bound_mask import BoundMask
from attnbench.contract.outside import repeat_heads
from attnbench.devices import device
from attnbench.storage.operator_kinds import BACKENDS
from attnbench.workloads.masks import attention_window, not_a_window
from attnbench.workloads.workload import FOLLOWS, Workload

__all__ = [
    "Attention",
    "BoundMask",
    "Implementation",
    "Weights",
    "Workload",
    "attention_window",
    "compile_whole",
    "compute_capability",
    "is_on",
    "missing_compiler",
    "missing_package",
    "not_a_window",
    "only_on",
    "repeat_heads",
    "softmax_with_sinks",
]


BIAS_NAMES = {"q": "query_bias", "k": "key_bias", "v": "value_bias", "out": "out_bias"}
"""The biases by their projections, as the axis `bias` names them."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The canonical weights of multi-head attention; every implementation packs them its own way.

    query (H, K, D), key (G, K, D), value (G, V, D), out (D, H*V) or None if the module has no output projection; biases
    query_bias (H, K), key_bias (G, K), value_bias (G, V), out_bias (D,) or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor | None = None
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    out_bias: Tensor | None = None

    @staticmethod
    def shapes(workload: Workload, embed_dim: int) -> dict[str, tuple[int, ...]]:
        """The shape of each of a workload's weights and biases, at any embedding width."""
        heads, groups, width = workload.num_heads, workload.num_kv_heads, workload.head_dim
        return {
            "query": (heads, width, embed_dim),
            "key": (groups, width, embed_dim),
            "value": (groups, workload.value_dim, embed_dim),
            "out": (embed_dim, heads * workload.value_dim),
            "query_bias": (heads, width),
            "key_bias": (groups, width),
            "value_bias": (groups, workload.value_dim),
            "out_bias": (embed_dim,),
        }

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Weights":
        """These weights with `change` applied to each tensor."""
        return Weights(**{name: change(tensor) for name, tensor in self.tensors().items()})

    def biased(self, parts: Collection[str]) -> "Weights":
        """These weights with only the biases of `parts`: q, k, v and out."""
        kept = {name for part, name in BIAS_NAMES.items() if part in parts}
        named = self.tensors().items()
        return Weights(**{name: tensor for name, tensor in named if not name.endswith("_bias") or name in kept})

    def filled(self) -> "Weights":
        """These weights, with zeros for missing biases of query, key or value if another of the three has one."""
        if not self.has_bias:
            return self
        zeros = {f"{name}_bias": torch.zeros_like(getattr(self, name)[..., 0]) for name in ("query", "key", "value")}
        return Weights(**(zeros | self.tensors()))

    @property
    def has_bias(self) -> bool:
        """Whether any input projection has a bias."""
        return any(bias is not None for bias in (self.query_bias, self.key_bias, self.value_bias))


class Attention(nn.Module):
    """Multi-head attention with the canonical weights; a subclass defines `attend`.

    A subclass with its own projections overrides `make_layers`, `pack` and `project` together.

    `dropout` is the share of attention weights that every call drops after the softmax, while the others are divided by
    1 - dropout; the harness sets it if the Implementation says `has_dropout`.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        weights = weights.filled()  # missing ones among the three biases are 0
        self.num_heads, self.head_dim, self.embed_dim = weights.query.shape
        self.num_kv_heads, self.value_dim, _ = weights.value.shape
        self.has_bias = weights.has_bias
        self.dropout = 0.0
        self.make_layers()
        self.out = out_layer(weights)
        self.to(device=weights.query.device, dtype=weights.query.dtype)
        self.load_state_dict(self.pack(weights) | self.pack_out(weights))

    def make_layers(self) -> None:
        """Create the input projections; by default one linear layer each for query, key and value."""
        self.query = nn.Linear(self.embed_dim, self.num_heads * self.head_dim, bias=self.has_bias)
        self.key = nn.Linear(self.embed_dim, self.num_kv_heads * self.head_dim, bias=self.has_bias)
        self.value = nn.Linear(self.embed_dim, self.num_kv_heads * self.value_dim, bias=self.has_bias)

    def pack(self, weights: Weights) -> dict[str, Tensor]:
        """The input projections' state dict from the canonical weights, by differentiable steps only.

        The check sends gradients back through this function, to compare gradients of packed weights.
        """
        rows = {name: tensor.flatten(0, 1) for name, tensor in weights.tensors().items() if not name.startswith("out")}
        state: dict[str, Tensor] = {}  # (H,K,D) -> (H*K,D), (H,K) -> (H*K,)
        for name in ("query", "key", "value"):
            state |= linear(name, rows[name], rows.get(f"{name}_bias"))
        return state

    def pack_out(self, weights: Weights) -> dict[str, Tensor]:
        """The output projection's state dict from the canonical weights; empty if there is none."""
        return out_state(weights, "out")

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D), (B, S, D) -> query (B, H, T, K), key (B, G, S, K), value (B, G, S, V)."""
        query = self.query(x).unflatten(-1, (self.num_heads, self.head_dim))  # (B,T,H*K) -> (B,T,H,K)
        key = self.key(context).unflatten(-1, (self.num_kv_heads, self.head_dim))  # (B,S,G*K) -> (B,S,G,K)
        value = self.value(context).unflatten(-1, (self.num_kv_heads, self.value_dim))  # (B,S,G*V) -> (B,S,G,V)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # heads before tokens

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        raise NotImplementedError(f"{type(self).__name__} has no attend")

    def forward(self, x: Tensor, context: Tensor | None = None, *, mask: BoundMask) -> Tensor:
        """(B, T, D) and, for cross-attention, (B, S, D) -> (B, T, D), or (B, T, H*V) without an output projection."""
        query, key, value = self.project(x, x if context is None else context)
        attended = self.attend(query, key, value, mask)  # (B,H,T,V)
        merged = attended.transpose(1, 2).flatten(2)  # (B,H,T,V) -> (B,T,H*V)
        output: Tensor = merged if self.out is None else self.out(merged)
        has_backward = attended.requires_grad or not query.requires_grad
        return output if has_backward else output.detach()  # there is no backward pass through the projections either


def out_layer(weights: Weights) -> nn.Linear | None:
    """An output projection of the size of these weights; None if they have none."""
    if weights.out is None:
        return None
    embed_dim, width = weights.out.shape
    return nn.Linear(width, embed_dim, bias=weights.out_bias is not None)


def linear(name: str, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    """The entries of a linear layer in a state dict; `name` may have {} in place of `weight` and `bias`."""
    path = name if "{}" in name else f"{name}.{{}}"
    entries = {path.replace("{}", "weight"): weight}
    return entries if bias is None else entries | {path.replace("{}", "bias"): bias}


def out_state(weights: Weights, name: str | None) -> dict[str, Tensor]:
    """The entries of the output projection (D, H*V), (D,); empty if there is none."""
    return {} if name is None or weights.out is None else linear(name, weights.out, weights.out_bias)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys, the last axis, with `sinks` as the score of one more key whose value is 0.

    `sinks` broadcasts to (..., T, 1), as (H, 1, 1) does for scores (B, H, T, S); without sinks it is the plain softmax.
    A query that sees no key gives 0 with sinks, and NaN without.

    Source: gpt-oss, https://arxiv.org/abs/2508.10925, section 2.2, and `sdpa` in
    https://github.com/openai/gpt-oss/blob/main/gpt_oss/torch/model.py
    """
    if sinks is None:
        return scores.softmax(dim=-1)
    one_more = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, one_more], dim=-1).softmax(dim=-1)[..., :-1]


def supports_everything(workload: Workload) -> str | None:  # noqa: ARG001 - the signature of `unsupported`
    """Return None: every workload is supported."""
    return None


Axes = Mapping[str, int | float | str]
"""Values of axes of a workload."""


def _reason_against(
    unsupported: Callable[[Workload], str | None], built_in: Callable[[], Axes], workload: Workload
) -> str | None:
    """The first axis that has another value built in, or the implementation's own reason."""
    for axis, value in built_in().items():
        if axis not in {"mask", "scope", "bias"} and workload.with_axes({axis: value}) != workload:  # these say more
            hint = ", or pass on the context in call" * (axis == "kv_len")
            return f"{axis}={value or FOLLOWS[axis]} is built in: add --set {axis}={value or FOLLOWS[axis]}{hint}"
    return unsupported(workload)


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """The content of a file in implementations/: how to build the module, its source and its limits.

    A module without `attend` takes part in scope `module` only.

    Raises:
        ValueError: there is no such backend.
    """

    build: Callable[[Weights], nn.Module]  # an `Attention`, or any module with forward(x, context=None, *, mask)
    source: str
    unsupported: Callable[[Workload], str | None] = supports_everything  # a reason, or None
    executed_flops: Callable[[Workload], int | None] = lambda _: None  # those of a call, hidden pairs included, or None
    backend: str = ""  # promised backend of SDPA, one of BACKENDS: if another runs, it is a fallback and is not timed
    has_dropout: bool = False  # drops weights by its module's `dropout`, a number or an nn.Dropout
    compiles: bool = False  # a new size costs seconds: few lengths are tried before the workload's own
    distributes: bool = False  # computes with the workload's `world_size` ranks; any other uses one
    copies: str = ""  # copies inside the timed call that suit the kernel: a note next to its times
    built_in: Callable[[], Axes] = dict  # as {"mask": "causal"}: a check uses it, and a run for all participants
    is_approximate: bool = False  # meant to be close to attention: its error is shown, neither judged nor ranked

    def __post_init__(self) -> None:
        if self.backend not in {"", *BACKENDS}:
            raise ValueError(f"backend={self.backend} is not allowed: it is one of {', '.join(BACKENDS)}, or empty")
        reason = partial(_reason_against, self.unsupported, self.built_in)
        object.__setattr__(self, "unsupported", reason)


def is_on(kind: str, workload: Workload) -> bool:
    """Whether torch computes the workload on that kind of device, such as "cuda"."""
    return device(workload.device).torch_device.partition(":")[0] == kind


def only_on(kind: str, workload: Workload, what: str) -> str | None:
    """Return why `what`, with kernels only for that kind of device, cannot run the workload, or None."""
    return None if is_on(kind, workload) else f"{what} runs on {kind.upper()} alone"


def compute_capability(workload: Workload) -> tuple[int, int] | None:
    """The GPU's compute capability, (9, 0) for Hopper; None if there is no GPU to query."""
    return device(workload.device).compute_capability()


def missing_package(module: str, distribution: str = "") -> str | None:
    """Return why `module` cannot be imported, or None; `distribution` is its name for pip if that differs.

    Nothing is imported: a package that is installed but broken is an error only of the cells that need it.
    """
    if module in sys.modules:
        return None
    package, *rest = module.split(".")
    found = importlib.util.find_spec(package) if package not in sys.modules else sys.modules[package].__spec__
    while found is not None and rest:
        found = PathFinder.find_spec(f"{found.name}.{rest.pop(0)}", found.submodule_search_locations)
    is_missing = found is None or found.origin is None  # a folder without code, as what another package shares with it
    return f"{distribution or package} is not installed" if is_missing else None


def missing_compiler(name: str) -> str | None:
    """Return why torch.compile cannot create kernels for a device, given by its name in a workload, or None."""
    return device(name).missing_compiler()


class NotOneGraphError(Exception):
    """A function cannot be captured as one graph; the message says where it breaks."""


def compile_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled at its first call, and again for other sizes, strides, dtypes and gradient modes.

    It compiles whole graphs at fixed sizes or raises; it never falls back to eager silently: after `recompile_limit`
    compilations PyTorch would run a function eagerly, with only a warning, so the limit is lifted, and reaching it is
    an error.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html, on recompilation:
    https://docs.pytorch.org/docs/stable/compile/programming_model.recompilation.html

    Raises, when called:
        torch._dynamo.exc.Unsupported: it cannot be captured as one graph.
    """
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 10_000
    dynamo.fail_on_recompile_limit_hit = True
    functorch.donated_buffer = False  # direction `backward` runs the backward pass of one graph many times
    inductor.cpp.enable_kernel_profile = True  # gives generated kernels their own names in profiles
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False, fullgraph=True)
    return compiled
