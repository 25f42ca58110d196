"""Adapters: a module with its own layout of weights takes part as it is, and a layout that does not fit is an error.

    IMPLEMENTATION = adapt(lambda sizes: MyAttention(sizes.embed_dim, sizes.num_heads), packed("qkv", out="proj"))

A layout turns the canonical weights into the module's state dict by differentiable steps only, since the check sends
gradients back through it (docs/adr/0006). In a layout a name stands for the linear layer's NAME.weight and NAME.bias;
one with {} in it is completed there, as in `in_proj_{}`. Where the canonical weights have no biases, no layout makes
any. Every form is shown in docs/adapters.md. Shapes as in the contract.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.contract import BoundMask, Implementation, Weights, supports_everything, without_attend
from attnbench.plugins import unknown
from attnbench.workloads.workload import BIASES, FOLLOWS, Workload, following

__all__ = ["Layout", "Sizes", "adapt", "head_list", "packed", "per_head", "split", "stacked", "transposed"]

LETTERS = "qkv"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a module keeps the canonical weights.

    `pack` makes the state dict by differentiable steps only. Without `has_out` the module stops before the output
    projection, (B, T, H*V), and the adapter adds one, so that its output is (B, T, D) as everywhere.
    """

    pack: Callable[[Weights], dict[str, Tensor]]
    has_out: bool = True


def split(query: str, key: str, value: str, *, out: str | None) -> Layout:
    """A linear layer each for query (H*K, D), key (G*K, D) and value (G*V, D), head after head; out (D, H*V)."""
    return stacked({query: "q", key: "k", value: "v"}, out=out)


def packed(name: str, order: str = LETTERS, *, out: str | None) -> Layout:
    """One linear layer with all rows of the first, of the second, then of the third; `order` as in "qkv" or "kqv".

    Raises:
        ValueError: `order` does not name q, k and v once each.
    """
    return stacked({name: order}, out=out)


def stacked(parts: Mapping[str, str], *, out: str | None) -> Layout:
    """Linear layers by name, each with the rows of those its letters name, as in {"to_q": "q", "to_kv": "kv"}.

    Raises:
        ValueError: the letters do not name q, k and v once each.
    """
    _check_letters("".join(parts.values()))

    def pack(weights: Weights) -> dict[str, Tensor]:
        state = out_state(weights, out)
        for name, order in parts.items():
            rows = _rows(weights)
            state |= linear(
                name,
                torch.cat([rows[letter][0].flatten(0, 1) for letter in order]),  # (H,K,D) -> (H*K,D), one below another
                [bias.flatten() for letter in order if (bias := rows[letter][1]) is not None],
            )
        return state

    return Layout(pack=pack, has_out=out is not None)


def per_head(name: str, order: str = LETTERS, *, out: str | None) -> Layout:
    """One linear layer that has, for each key/value head, the rows of its queries, key and value together.

    As a module has it that views its projection as (B, T, H, 3*K) before it takes it apart. Where G < H, each group's
    rows begin with those of all its query heads, as in Falcon (https://arxiv.org/abs/2311.16867).

    Raises:
        ValueError: `order` does not name q, k and v once each.
    """
    _check_letters(order)

    def pack(weights: Weights) -> dict[str, Tensor]:
        groups, rows = len(weights.key), [_rows(weights)[letter] for letter in order]
        together = [weight.unflatten(0, (groups, -1)).flatten(1, 2) for weight, _ in rows]  # (H,K,D) -> (G,H/G*K,D)
        biases = [bias.reshape(groups, -1) for _, bias in rows if bias is not None]  # (H,K) -> (G,H/G*K)
        bias = [torch.cat(biases, dim=1).flatten()] if biases else []
        return out_state(weights, out) | linear(name, torch.cat(together, dim=1).flatten(0, 1), bias)

    return Layout(pack=pack, has_out=out is not None)


def head_list(prefix: str, *, query: str, key: str, value: str, out: str | None) -> Layout:
    """A module for each head, at `prefix` with {head} for its number, that holds the linear layers query, key, value.

    Raises:
        ValueError: `prefix` does not say where the head's number stands.
    """
    if "{head}" not in prefix:
        raise ValueError(f"prefix={prefix} is not allowed: it needs {{head}} where the number of the head stands")

    def pack(weights: Weights) -> dict[str, Tensor]:
        state = out_state(weights, out)
        for name, (weight, bias) in zip((query, key, value), _rows(weights).values(), strict=True):
            for head in range(len(weight)):
                path = f"{prefix.replace('{head}', str(head))}.{name}"
                state |= linear(path, weight[head], [] if bias is None else [bias[head]])  # (K,D), (K,)
        return state

    return Layout(pack=pack, has_out=out is not None)


def transposed(layout: Layout) -> Layout:
    """The same with each weight (D, rows) instead of (rows, D), for x @ weight, as in the Conv1D of GPT-2."""

    def pack(weights: Weights) -> dict[str, Tensor]:
        return {name: tensor.T if tensor.dim() > 1 else tensor for name, tensor in layout.pack(weights).items()}

    return Layout(pack=pack, has_out=layout.has_out)


def _rows(weights: Weights) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Weight (H, K, D) and bias (H, K) of query, key and value by letter, in this order."""
    return {
        "q": (weights.query, weights.query_bias),
        "k": (weights.key, weights.key_bias),
        "v": (weights.value, weights.value_bias),
    }


def linear(name: str, weight: Tensor, biases: list[Tensor]) -> dict[str, Tensor]:
    """The two entries of a linear layer, or one without biases; the biases (rows,) are put one after the other."""
    path = name if "{}" in name else f"{name}.{{}}"
    entries = {path.replace("{}", "weight"): weight}
    return entries | ({path.replace("{}", "bias"): torch.cat(biases)} if biases else {})


def out_state(weights: Weights, name: str | None) -> dict[str, Tensor]:
    """The entries of the output projection (D, H*V), (D,); empty where there is none."""
    if name is None or weights.out is None:
        return {}
    return linear(name, weights.out, [] if weights.out_bias is None else [weights.out_bias])


def _check_letters(order: str) -> None:
    if sorted(order) != sorted(LETTERS):
        raise ValueError(f"order={order} is not allowed: it names q, k and v once each, as in qkv or kqv")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that a module is made for: D, H, G, K and V, and which projections have biases."""

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    qkv_bias: bool
    out_bias: bool


Call = Callable[[Any, Tensor, Tensor, BoundMask], Any]
"""f(module, x, context, mask) with x (B, T, D), context (B, S, D), which is x itself in self-attention -> (B, T, D)."""
SetDropout = Callable[[Any, float], object]
"""f(module, share): drop that share of the attention weights from now on, in whatever mode the module does so."""


def adapt(  # noqa: PLR0913 - each says one thing that modules differ in
    make: Callable[[Sizes], nn.Module],
    layout: Layout,
    *,
    call: Call | None = None,
    masks: Collection[str] | None = None,
    changes_scores: bool = False,
    axes: Collection[str] = (),
    unsupported: Callable[[Workload], str | None] = supports_everything,
    dropout: SetDropout | None = None,
    source: str = "",
) -> Implementation:
    """An Implementation, in scope `module`, of the module that `make` returns, with the weights where `layout` says.

    `call` passes the mask on; without it the module is called with x (B, T, D) alone and takes part unmasked. Of a
    tuple the first entry is the output. `masks` names those that `call` can pass on: all that only hide where it is
    left out, and with `changes_scores` those that change scores, too. `axes` names those of kv_len, num_kv_heads,
    value_dim and embed_dim that the module was made for. Biases that a workload has and the module has not, or the
    other way round, make the workload unsupported. `dropout` sets the share of the attention weights that the module
    drops; without it the module takes no part under dropout.

    Raises:
        ValueError: an axis that is none of the four, or masks without a call.
    """
    for axis in axes:
        if axis not in FOLLOWS:
            raise ValueError(unknown("axis to adapt to", axis, FOLLOWS))
    if masks is not None and call is None:
        raise ValueError("masks are given, but no call that passes one on: call=lambda module, x, context, mask: ...")
    if masks is None:
        masks = ("none",) if call is None else None

    @cache
    def parameters(sizes: Sizes) -> frozenset[str]:
        return frozenset(name for name, _ in make(sizes).named_parameters())

    def reason(workload: Workload) -> str | None:
        if workload.scope == "attention":
            return without_attend("an adapted module")
        for axis, value in following(workload.axes()).items():  # those that a module must be made for
            if axis not in axes and getattr(workload, axis) != value:
                return f"{axis} must be {FOLLOWS[axis]}: the adapter does not list {axis} among its axes"
        rule = workload.mask_rule
        if masks is not None and rule.name not in masks:
            return f"the adapter passes on no mask {rule.name}, but {', '.join(masks)}"
        if masks is None and rule.changes_scores and not changes_scores:
            return (
                "the adapter does not say that it passes on what changes scores: "
                f"list {rule.name} among its masks, or give changes_scores=True"
            )
        return unsupported(workload) or _reason_in_biases(workload, layout, parameters)

    def build(weights: Weights) -> nn.Module:
        return Adapted(make(sizes_of(weights)), layout, call or (lambda module, x, *_: module(x)), weights, dropout)

    return Implementation(build=build, source=source, unsupported=reason, has_dropout=dropout is not None)


class Adapted(nn.Module):
    """A module with the canonical weights loaded, called as the harness calls."""

    def __init__(
        self, module: nn.Module, layout: Layout, call: Call, weights: Weights, set_dropout: SetDropout | None = None
    ) -> None:
        """Load the weights.

        Raises:
            ValueError: a parameter that only one of layout and module has, or that is of another shape in the other.
        """
        super().__init__()
        self.module = module
        self.layout = layout
        self.call_module: Call = call
        self.set_dropout = set_dropout
        self.share_dropped = 0.0
        self.out: nn.Linear | None = None
        if weights.out is not None and not layout.has_out:
            self.out = nn.Linear(weights.out.shape[1], weights.out.shape[0], bias=weights.out_bias is not None)
        self.to(device=weights.query.device, dtype=weights.query.dtype)
        state = self.pack(weights) | self.pack_out(weights)
        shapes = {path: tuple(parameter.shape) for path, parameter in self.named_parameters()}
        for path, tensor in state.items():
            name = path.removeprefix("module.")
            if path not in shapes:
                has = [other.removeprefix("module.") for other in shapes]
                raise ValueError(f"the layout does not fit the module: {unknown('parameter', name, has)}")
            if tuple(tensor.shape) != shapes[path]:
                made = tuple(tensor.shape)
                raise ValueError(f"parameter {name} is {shapes[path]} in the module, the layout makes {made}")
        for path in shapes:
            if path not in state:
                raise ValueError(f"the layout names no {path.removeprefix('module.')}: it must name every parameter")
        self.load_state_dict(state, strict=False)  # buffers are no weights, and stay as they are

    @property
    def dropout(self) -> float:
        """The share of the attention weights that the module drops."""
        return self.share_dropped

    @dropout.setter
    def dropout(self, share: float) -> None:
        assert self.set_dropout is not None
        self.set_dropout(self.module, share)
        self.share_dropped = share

    def pack(self, weights: Weights) -> dict[str, Tensor]:
        """The module's state dict from the canonical weights, by differentiable steps only."""
        return {f"module.{name}": tensor for name, tensor in self.layout.pack(weights).items()}

    def pack_out(self, weights: Weights) -> dict[str, Tensor]:
        """The output projection that the adapter added; empty where the module has its own."""
        return {} if self.layout.has_out else out_state(weights, "out")

    def forward(self, x: Tensor, context: Tensor | None = None, *, mask: BoundMask) -> Tensor:
        """(B, T, D) and, for cross-attention, (B, S, D) -> (B, T, D)."""
        result = self.call_module(self.module, x, x if context is None else context, mask)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output if self.out is None else self.out(output)


def sizes_of(weights: Weights) -> Sizes:
    """The sizes that canonical weights have."""
    num_heads, head_dim, embed_dim = weights.query.shape
    return Sizes(
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=weights.key.shape[0],
        head_dim=head_dim,
        value_dim=weights.value.shape[1],
        qkv_bias=weights.has_bias,
        out_bias=weights.out_bias is not None,
    )


def _reason_in_biases(workload: Workload, layout: Layout, parameters: Callable[[Sizes], frozenset[str]]) -> str | None:
    """Why the module's biases are not the workload's, or None; any other misfit is an error of `build`."""
    shapes = Weights.shapes(workload, workload.embed_dim)
    blank = Weights(**{name: torch.empty(*shape, device="meta") for name, shape in shapes.items()})
    names = {bias: set(layout.pack(blank.biased(bias))) for bias in BIASES}
    existing = parameters(sizes_of(blank.biased(workload.bias)))
    if not names["none"] <= existing <= names["all"]:
        return None
    watched = blank.biased(workload.bias).map(lambda tensor: tensor.requires_grad_())
    biases = {name: tensor for name, tensor in watched.tensors().items() if name.endswith("_bias")}
    if not layout.has_out:
        biases.pop("out_bias", None)
    sums = [tensor.sum() for tensor in layout.pack(watched).values()]
    gradients: tuple[Tensor | None, ...] = (
        torch.autograd.grad(sums, list(biases.values()), allow_unused=True) if biases else ()
    )
    none = [name for name, gradient in zip(biases, gradients, strict=True) if gradient is None]
    if ignored := [name for name in none if name != "key_bias"]:  # that of the keys has no effect
        return f"the layout has no place for {', '.join(ignored)}, which bias={workload.bias} asks for"
    if existing == names[workload.bias]:
        return None
    fitting = [bias for bias in BIASES if names[bias] == existing]
    if fitting:
        return f"the module has the biases of bias={fitting[0]}, not of bias={workload.bias}"
    missing = ", ".join(sorted(names["all"] - existing))
    return f"the module has no {missing} but other biases, as in no value of the axis bias"
