"""The interface that implementations import: `Weights`, `BoundMask`, the base module `Attention`, `Implementation`.

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width, D embedding
width. Query head h reads key/value head h // (H / G), as in grouped-query attention (https://arxiv.org/abs/2305.13245).
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.contract.bound_mask import BoundMask
from attnbench.contract.layouts import Weights, split
from attnbench.contract.outside import repeat_heads
from attnbench.devices import device
from attnbench.devices.kernels import BACKENDS
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
    "device",
    "is_on",
    "missing_package",
    "not_a_window",
    "only_on",
    "repeat_heads",
]


class Attention(nn.Module):
    """Multi-head attention whose linear layers get the values of `Weights`; a subclass defines `attend`.

    `dropout` is the probability that a call drops an attention weight after the softmax; the other weights are divided
    by 1 - dropout. The harness sets it if the Implementation has `has_dropout`.
    """

    layout = split("query", "key", "value", out="out")

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.num_heads, self.head_dim, _ = weights.query.shape
        self.num_kv_heads, self.value_dim, _ = weights.value.shape
        self.dropout = 0.0
        self.query = linear_layer(weights.query.flatten(0, 1), weights.query_bias)
        self.key = linear_layer(weights.key.flatten(0, 1), weights.key_bias)
        self.value = linear_layer(weights.value.flatten(0, 1), weights.value_bias)
        self.out = None if weights.out is None else linear_layer(weights.out, weights.out_bias)
        self.load_state_dict(self.pack(weights))

    def pack(self, weights: Weights) -> dict[str, Tensor]:
        """Convert the canonical weights to the state dict of this module, by differentiable steps only.

        The check differentiates this function to convert gradients of parameters to gradients of canonical weights.
        """
        return self.layout.state(weights)

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (B, T, D) and context (B, S, D) to query (B, H, T, K), key (B, G, S, K), value (B, G, S, V)."""
        query = self.query(x).unflatten(-1, (self.num_heads, self.head_dim))  # (B,T,H*K) -> (B,T,H,K)
        key = self.key(context).unflatten(-1, (self.num_kv_heads, self.head_dim))  # (B,S,G*K) -> (B,S,G,K)
        value = self.value(context).unflatten(-1, (self.num_kv_heads, self.value_dim))  # (B,S,G*V) -> (B,S,G,V)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # heads before tokens

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Compute the output (B, H, T, V) from query (B, H, T, K), key (B, G, S, K) and value (B, G, S, V)."""
        raise NotImplementedError(f"{type(self).__name__} has no attend")

    def forward(self, x: Tensor, context: Tensor | None = None, *, mask: BoundMask) -> Tensor:
        """Map x (B, T, D) and context (B, S, D), by default x, to (B, T, D), or to (B, T, H*V) without `out`."""
        query, key, value = self.project(x, x if context is None else context)
        attended = self.attend(query, key, value, mask)  # (B,H,T,V)
        merged = attended.transpose(1, 2).flatten(2)  # (B,H,T,V) -> (B,T,H*V)
        output: Tensor = merged if self.out is None else self.out(merged)
        has_backward = attended.requires_grad or not query.requires_grad
        return output if has_backward else output.detach()  # else the projection would hide the missing backward


def linear_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Create a linear layer with the shapes, but not the values, of a weight (rows, D) and a bias (rows,) or None."""
    num_rows, width = weight.shape
    return nn.Linear(width, num_rows, bias=bias is not None, device=weight.device, dtype=weight.dtype)


def _differs(workload: Workload, axis: str, value: float | str) -> bool:
    """Return whether setting `axis` to `value` changes the workload; also true if the workload cannot have `value`."""
    try:
        return workload.with_axes({axis: value}) != workload
    except ValueError:
        return True


EXPLAINED = {"mask", "scope", "bias", "direction"}
"""Axes for which a built-in value is only a default. The implementation's own `unsupported` refuses other masks, scopes
and biases; a module with a cache is checked for inference by default, but may have gradients."""


def _reason_against(
    unsupported: Callable[[Workload], str | None],
    built_in: Callable[[], Mapping[str, Any]],
    takes_batches: str,
    workload: Workload,
) -> str | None:
    """Return why built-in axis values or the implementation's own `unsupported` exclude a workload; None if not.

    A function of query, key and value can run a batch of requests if it can run each distinct request on its own.
    """
    for axis, value in built_in().items():
        if axis not in EXPLAINED and _differs(workload, axis, value):
            hint = ", or pass on the context in call" * (axis == "kv_len")
            return f"{axis}={value or FOLLOWS[axis]} is built in: add --set {axis}={value or FOLLOWS[axis]}{hint}"
    if workload.requests and not takes_batches:
        return "it takes no batch of requests: give a function of query, key and value, or one that names a block table"
    for request, dense in workload.groups().items() if takes_batches == "gathered" else ():
        if reason := unsupported(dense):
            return f"of the request {request.new} of {request.total} keys: {reason}"
    return None if workload.requests and takes_batches == "gathered" else unsupported(workload)


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """An implementation of attention: how to build its module, its source, and the workloads that it cannot run.

    A module without `attend` supports scope `module` only.

    Raises:
        ValueError: `backend` is neither empty nor one of BACKENDS.
    """

    build: Callable[[Weights], nn.Module]  # gives an `Attention`, or any module with forward(x, context=None, *, mask)
    source: str
    unsupported: Callable[[Workload], str | None] = lambda _: None  # the reason why it cannot run a workload, or None
    executed_flops: Callable[[Workload], int | None] = lambda _: None  # FLOPs that a call executes; None: unknown
    backend: str = ""  # SDPA backend that it promises; a call that runs another one is not timed; "": no promise
    has_dropout: bool = False  # its module has an attribute `dropout` for the harness to set: a number or an nn.Dropout
    compiles: bool = False  # compiles for each new size, so that the harness tries only few shorter lengths first
    distributes: bool = False  # computes with the workload's `world_size` ranks; other implementations use one
    copies: str = ""  # a note next to its times: copies that the timed call makes for the kernel
    built_in: Callable[[], Mapping[str, int | float | str]] = (
        dict  # the only values of some axes, as in {"mask": "causal"}; a run uses them for all implementations
    )
    has_cache: bool = False  # its module caches keys and values; if `mask.chunks` is set, it gets a sequence in parts
    is_approximate: bool = False  # an approximation: its error is reported, and only `most_error` limits it
    takes_batches: str = ""  # how it gets a batch of requests: "pages", "gathered" before its call, or "" for never
    most_error: float = 0.0  # limit for an approximation's error, relative to the output's largest value; 0: no limit

    def __post_init__(self) -> None:
        if self.backend not in {"", *BACKENDS}:
            raise ValueError(f"backend={self.backend} is not allowed: it is one of {', '.join(BACKENDS)}, or empty")
        reason = partial(_reason_against, self.unsupported, self.built_in, self.takes_batches)
        object.__setattr__(self, "unsupported", reason)


def is_on(kind: str, workload: Workload) -> bool:
    """Return whether torch runs the workload on this kind of device, such as "cuda"."""
    return device(workload.device).torch_device.partition(":")[0] == kind


def only_on(kind: str, workload: Workload, what: str) -> str | None:
    """Return why `what`, whose kernels run only on devices of this kind, cannot run the workload; None if it can."""
    return None if is_on(kind, workload) else f"{what} runs only on {kind.upper()}"


def missing_package(module: str, distribution: str = "") -> str | None:
    """Return why `module` is missing; None if it is installed. `distribution` is its name for pip, if that differs.

    Nothing is imported, so a package that is installed but broken is an error only for workloads that need it.
    """
    if module in sys.modules:
        return None
    package, *rest = module.split(".")
    found = importlib.util.find_spec(package) if package not in sys.modules else sys.modules[package].__spec__
    while found is not None and rest:
        found = PathFinder.find_spec(f"{found.name}.{rest.pop(0)}", found.submodule_search_locations)
    is_missing = found is None or found.origin is None  # no origin: a folder without code
    return f"{distribution or package} is not installed" if is_missing else None


class NotOneGraphError(Exception):
    """A function cannot be captured as one graph; the message says where it breaks."""


def compile_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled at its first call, and again for new sizes, strides, dtypes or grad modes.

    Each compilation is one whole graph at fixed sizes, or an error: nothing silently runs eagerly. After
    `recompile_limit` compilations PyTorch would run the function eagerly with only a warning, so this function raises
    the limit, and turns reaching it into an error.

    Sources: https://docs.pytorch.org/docs/stable/generated/torch.compile.html and, on recompilation,
    https://docs.pytorch.org/docs/stable/compile/programming_model.recompilation.html

    Raises:
        torch._dynamo.exc.Unsupported: at a call of the result, `function` cannot be captured as one graph.
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
