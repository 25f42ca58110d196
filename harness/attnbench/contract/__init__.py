"""All that an implementation may import: the canonical weights, the mask at hand, the module to extend and the plug.

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width, D embedding
width. Query head h reads key/value head h // (H / G), as in grouped-query attention (https://arxiv.org/abs/2305.13245).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from torch import Tensor, nn

from attnbench.contract.bound_mask import BoundMask
from attnbench.contract.compiled import compile_whole
from attnbench.contract.requirements import missing_compiler, missing_package
from attnbench.storage.operator_kinds import BACKENDS
from attnbench.workloads.counts import dense_flops, product_flops
from attnbench.workloads.masks import Causal, CausalBottomRight, Mask, Padding, SlidingWindow
from attnbench.workloads.masks.attention_window import band, no_band
from attnbench.workloads.workload import Workload

__all__ = [
    "Attention",
    "BoundMask",
    "Causal",
    "CausalBottomRight",
    "Implementation",
    "Mask",
    "Padding",
    "SlidingWindow",
    "Weights",
    "Workload",
    "band",
    "compile_whole",
    "dense_flops",
    "missing_compiler",
    "missing_package",
    "nn",
    "no_band",
    "product_flops",
    "repeat_heads",
]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The canonical weights of multi-head attention; every implementation packs them its own way.

    query (H, K, D), key (G, K, D), value (G, V, D), out (D, H*V) or None where the module stops before it; biases
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

    def tensors(self) -> dict[str, Tensor]:
        """Those that are not None, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Weights":
        """The same weights with `change` applied to each tensor."""
        return Weights(**{name: change(tensor) for name, tensor in self.tensors().items()})

    def biased(self, bias: str) -> "Weights":
        """The same weights with the biases of the axis `bias` alone: all, qkv, out or none."""
        kept = {"all": ("qkv", "out"), "none": ()}.get(bias, (bias,))
        named = {
            name: tensor
            for name, tensor in self.tensors().items()
            if not name.endswith("_bias") or ("out" if name == "out_bias" else "qkv") in kept
        }
        return Weights(**named)

    @property
    def has_bias(self) -> bool:
        """Whether the three input projections have biases (all do, or none)."""
        return self.query_bias is not None


class Attention(nn.Module):
    """Multi-head attention with the canonical weights; a subclass says how to attend.

    Override `attend` alone, or, where the projections are the point, `make_layers`, `pack` and `project` together.

    `dropout` is the share of the attention weights that every call drops after the softmax, the others divided by 1
    minus it; the harness sets it where `Implementation.has_dropout` says that the module obeys.
    """

    def __init__(self, weights: Weights) -> None:
        """Take the sizes of `weights`, make the layers and load them."""
        super().__init__()
        self.num_heads, self.head_dim, self.embed_dim = weights.query.shape
        self.num_kv_heads, self.value_dim, _ = weights.value.shape
        self.has_bias = weights.has_bias
        self.dropout = 0.0
        self.make_layers()
        self.out: nn.Linear | None = None
        if weights.out is not None:
            width = self.num_heads * self.value_dim
            self.out = nn.Linear(width, weights.out.shape[0], bias=weights.out_bias is not None)
        self.to(device=weights.query.device, dtype=weights.query.dtype)
        self.load_state_dict(self.pack(weights) | self.pack_out(weights))

    def make_layers(self) -> None:
        """Make the input projections; here one linear layer each for query, key and value."""
        self.query = nn.Linear(self.embed_dim, self.num_heads * self.head_dim, bias=self.has_bias)
        self.key = nn.Linear(self.embed_dim, self.num_kv_heads * self.head_dim, bias=self.has_bias)
        self.value = nn.Linear(self.embed_dim, self.num_kv_heads * self.value_dim, bias=self.has_bias)

    def pack(self, weights: Weights) -> dict[str, Tensor]:
        """The input projections' state dict from the canonical weights, by differentiable steps only.

        The check sends gradients back through this function, so that gradients of packed weights can be compared.
        """
        named = {name: tensor for name, tensor in weights.tensors().items() if not name.startswith("out")}
        layers = {
            f"{name.removesuffix('_bias')}.{'bias' if name.endswith('_bias') else 'weight'}": tensor
            for name, tensor in named.items()
        }
        return {name: tensor.flatten(0, 1) for name, tensor in layers.items()}  # (H,K,D) -> (H*K,D), (H,K) -> (H*K,)

    def pack_out(self, weights: Weights) -> dict[str, Tensor]:
        """The output projection's state dict from the canonical weights; empty where there is none."""
        named = {"out.weight": weights.out, "out.bias": weights.out_bias}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

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
        return merged if self.out is None else self.out(merged)


def repeat_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """(B, G, S, K) -> (B, H, S, K): each key/value head repeated for the query heads that read it; itself if G == H."""
    group_size = num_heads // tensor.shape[1]
    return tensor if group_size == 1 else tensor.repeat_interleave(group_size, dim=1)


def uncounted(workload: Workload) -> int | None:  # noqa: ARG001 - the signature of `executed_flops`
    """Nobody has counted: returns None, and reports say "unknown"."""
    return None


def everything(workload: Workload) -> str | None:  # noqa: ARG001 - the signature of `unsupported`
    """Support every workload: returns no reason against any."""
    return None


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """What a plug holds: how to build the module from canonical weights, where the idea is from, what it cannot do.

    `build` returns an `Attention`, or any module with `forward(x, context=None, *, mask)`; a module without `attend`
    takes part in scope `module` only. `unsupported` returns a reason, or None where the workload is supported.
    `executed_flops` says what one call really computes, hidden pairs included, or None where nobody can tell:
    `dense_flops` for the textbook form, `product_flops` for what skips some.
    `backend` is the one of PyTorch's SDPA backends that the name promises (a value of BACKENDS): where another runs, it
    is a fallback and has no time.
    `has_dropout` says that the module drops attention weights with the probability in its attribute `dropout`, which
    is a number or an `nn.Dropout`.
    One that `compiles` does so for every new size, for seconds: it is tried at few lengths before its own.
    `known_failures` excuses what a kernel does to values that are not finite: rule of the check -> why (ADR 16).

    Raises:
        ValueError: there is no such backend.
    """

    build: Callable[[Weights], nn.Module]
    source: str
    unsupported: Callable[[Workload], str | None] = everything
    executed_flops: Callable[[Workload], int | None] = uncounted
    backend: str = ""
    has_dropout: bool = False
    compiles: bool = False
    known_failures: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the backend."""
        if self.backend not in {"", *BACKENDS}:
            raise ValueError(f"backend={self.backend} is not allowed: it is one of {', '.join(BACKENDS)}, or empty")
