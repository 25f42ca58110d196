"""Adapters: `adapt` takes the facts about a function or module that the harness cannot read from it.

    mine = adapt(my_function, layout="bthk")
    gpt = adapt(lambda s: MyAttention(s.embed_dim, s.num_heads), packed("qkv", out="proj"), masks=("causal",))

The harness reads from a module's parameters which projections have biases, whether key/value heads are grouped, and
which widths it can have. A layout that does not fit is an error. Every form is shown in docs/adapters.md. Shapes as in
the contract.
"""

import copy
import fnmatch
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.contract import BIAS_NAMES, BoundMask, Implementation, Weights, out_layer, out_state
from attnbench.contract.declared import END, Declared, check_callable, kind, reads
from attnbench.contract.functions import TENSOR_LAYOUTS, from_function, takes_heads, words
from attnbench.contract.layouts import (
    Layout,
    check_layout,
    head_list,
    packed,
    per_head,
    split,
    stacked,
    transposed,
)
from attnbench.plugins import unknown
from attnbench.workloads.masks import Prefix
from attnbench.workloads.workload import FOLLOWS, Workload, following

__all__ = ["Layout", "Sizes", "adapt", "head_list", "packed", "per_head", "split", "stacked", "transposed"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a module, D, H, G, K and V, and which projections have biases."""

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    qkv_bias: bool
    out_bias: bool


SMALL = {"batch_size": 1, "seq_len": 4, "num_heads": 2, "head_dim": 4, "scope": "module"}
"""A workload at which a module is created to read its parameters."""
FOR_MODULES = ("extra", "residual", "has_cache", "dropout")
"""Arguments of `adapt` that mean nothing for a function."""


def adapt(what: Callable[..., Any], layout: Layout | str = TENSOR_LAYOUTS[0], **facts: Any) -> Implementation:  # noqa: ANN401 - see Declared
    """Create the Implementation of a function of query, key and value, or of the module that `what(sizes)` returns.

    Args:
        what: the function; or for a module, f(sizes) -> module.
        layout: for a function, the axes of its tensors: "bhtk" or "bthk". For a module, where its weights are: split,
            packed, per_head, stacked, head_list, transposed or Layout(pack=...).
        facts: any field of Declared (contract/declared.py), by name.

    Raises:
        ValueError: an argument is unknown or has the wrong type, an axis or mask is unknown, or several masks have no
            `call`.
    """
    for fact in facts:
        if fact not in Declared.__dataclass_fields__:
            raise ValueError(unknown("argument of adapt", fact, Declared.__dataclass_fields__))
    if not isinstance(layout, Layout):
        if layout not in TENSOR_LAYOUTS:
            check_layout("adapt", layout)
        _check_is_function(what, [fact for fact in FOR_MODULES if facts.get(fact)])
        declared = Declared(**facts)
        check_callable("call", declared.call, "lambda function, query, key, value, mask: function(query, key, value)")
        return from_function(what, getattr(what, "__name__", "adapt(...)"), layout=layout, declared=declared)
    module = ModuleAdapter(make=what, layout=layout, declared=Declared(**facts))
    return Implementation(
        build=module.build,
        source=module.declared.source,
        unsupported=module.unsupported,
        has_dropout=module.declared.dropout is not None,
        built_in=module.built_in,
        is_approximate=module.declared.approximate,
    )


def _check_is_function(what: object, for_modules: Collection[str]) -> None:
    """Check that it is a function of query, key and value, and that no argument for modules is used."""
    if not callable(what):
        raise ValueError(f"adapt is given {kind(what)}: give a function of query, key and value, or f(sizes) -> module")
    try:
        parameters = list(inspect.signature(what.forward if isinstance(what, nn.Module) else what).parameters)
    except (TypeError, ValueError):
        parameters = ["query", "key", "value"]
    if len(parameters) < 3 and not takes_heads(parameters):  # noqa: PLR2004 - query, key, value
        raise ValueError(
            f"adapt is given a function of {', '.join(parameters) or 'nothing'} and no layout: a module's weights need "
            'one, as in adapt(lambda sizes: ..., packed("qkv", out="proj"))'
        )
    if for_modules:
        raise ValueError(f"{', '.join(for_modules)} is about modules: leave it out, or give the layout of its weights")


@dataclass(frozen=True, kw_only=True)
class ModuleAdapter:
    """A way to make modules, declared facts about them, and the facts in their parameters.

    `call` of the declared facts is f(module, x, context, mask) with x (B, T, D) and context (B, S, D) -> (B, T, D); in
    self-attention the context is x. `takes` are axes that `call` passes on.
    """

    make: Callable[[Sizes], nn.Module]
    layout: Layout
    declared: Declared = field(default_factory=Declared)
    takes: Collection[str] = ()

    def __post_init__(self) -> None:
        call, masks = self.declared.call, self.declared.masks or ()
        check_callable("make", self.make, "lambda sizes: MyAttention(sizes.embed_dim, sizes.num_heads)")
        check_callable("call", call, "lambda module, x, context, mask: module(x, mask=mask.visible)")
        if call is None and len({name.replace(END, "") for name in masks}) > 1:
            raise ValueError(
                f"adapt is given masks={tuple(masks)!r} and no call, so that the module never gets a mask: add "
                "call=lambda module, x, context, mask: module(x, mask.visible), or name the one mask that is built in"
            )

    def module(self, sizes: Sizes) -> nn.Module:
        """Create a module; its random contents, such as a buffer, are the same each time.

        Raises:
            NotImplementedError: `make` raises it, since the module does not exist in these sizes.
            ValueError: `make` raises something else, or returns no module.
        """
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)  # not the accelerators'
                module = self.make(sizes)
        except NotImplementedError:
            raise
        except Exception as error:
            raise ValueError(f"make fails at {sizes}: {words(error)}") from error
        if not isinstance(module, nn.Module):
            raise ValueError(f"make returned {kind(module)}: it must return a module, a torch.nn.Module")
        return module

    def build(self, weights: Weights, of: "type[Adapted] | None" = None) -> "Adapted":
        """Create the module with these weights."""
        return (of or Adapted)(self, self.module(sizes_of(weights)), weights)

    def built_in(self) -> dict[str, int | float | str]:
        """Built-in values of axes, with the biases that the parameters show if all modules have the same."""
        fixed = {**self.declared.built_in, "scope": "module"}
        if not self.takes_context:
            fixed.setdefault("kv_len", 0)  # as long as the queries
        small = (Workload(**SMALL, bias=bias).with_axes(fixed) for bias in ("all", "none"))  # type: ignore[arg-type]
        try:
            every, none = map(self.traits, small)
        except (ValueError, NotImplementedError):  # checks and builds give the reason
            return fixed
        is_constant = every.fits and none.fits and every.biases & set("qkv") == none.biases & set("qkv")
        return {**fixed, "bias": _bias(every.biases)} if is_constant else fixed

    @property
    def takes_context(self) -> bool:
        """Whether `call` passes on its context, as cross-attention does."""
        return self.declared.call is not None and reads(self.declared.call, 2)

    def unsupported(self, workload: Workload) -> str | None:
        """Return why the module cannot run the workload, or None; `build` raises if a layout never fits.

        Raises:
            ValueError: the module cannot be created, or no result of `pack` can be traced to the weights.
        """
        if workload.scope == "attention":
            return "an adapted module has no attend, which is attention without the projections: choose scope=module"
        declared, rule = self.declared, workload.mask_rule
        if workload.kv_len != workload.seq_len and not self.takes_context:
            return f"kv_len must be {FOLLOWS['kv_len']}: the adapter's call does not pass on its context"
        if declared.residual and workload.dtype in {"bfloat16", "float16"}:
            return f"the sum with the input is rounded to {workload.dtype}, so that the rest cannot be compared"
        if declared.masks is None and declared.call is None and workload.mask != "none":
            return f"it takes no mask {rule.name}: add call=lambda module, x, context, mask: module(x, mask.visible)"
        if declared.masks is None and rule.changes_scores and not declared.changes_scores:
            return f"it may ignore what changes scores: where it does not, list {rule.name} among its masks"
        return declared.reason_against(workload, self.takes) or self._misfit(workload)

    def _misfit(self, workload: Workload) -> str | None:
        """Return why the module's parameters do not fit the workload, or None."""
        followed = following(workload.axes())
        differing = [axis for axis, value in followed.items() if getattr(workload, axis) != value]
        differing = [axis for axis in differing if axis != "kv_len"]
        reason = f"its parameters are made for {', '.join(f'{axis} = {FOLLOWS[axis]}' for axis in differing)} alone"
        try:
            traits = self.traits(workload)
        except NotImplementedError as error:
            return f"make raises NotImplementedError: {error}".removesuffix(": ")
        except ValueError:
            if differing:
                return reason
            raise
        if differing and not (traits.fits and traits.has_shapes):
            return reason
        self.layout.state(_blank(workload, workload.biased))  # raises if it needs a bias that the workload excludes
        if traits.untraced:
            raise ValueError(
                f"{self.layout.text} makes nothing that autograd can follow back to the weights of "
                f"{', '.join(traits.untraced)}: pack by reshapes, transposes, stacks and cats, without detach(), "
                ".data, nn.Parameter, numpy or torch.no_grad()"
            )
        if not traits.fits or traits.biases == workload.biased:
            return None
        return f"bias={_bias(traits.biases)} is built in: add --set bias={_bias(traits.biases)}"

    def traits(self, workload: Workload) -> "Traits":
        """The facts in the parameters of the module for a workload's sizes and biases."""
        return self._traits(sizes_of(_blank(workload, workload.biased)), workload.biased)

    @cached_property
    def _traits(self) -> Callable[[Sizes, frozenset[str]], "Traits"]:
        return cache(self._read)

    @torch.enable_grad()
    def _read(self, sizes: Sizes, wanted: frozenset[str]) -> "Traits":
        """Follow each weight and bias into the state dict, and compare that with the module's parameters."""
        watched = _blank(sizes, BIAS_NAMES).map(lambda tensor: tensor.requires_grad_()).tensors()
        parameters, state = dict(self.module(sizes).named_parameters()), self.layout.state(Weights(**watched))
        for pattern in self.declared.extra:
            for name in fnmatch.filter([*parameters, *state], pattern):
                parameters.pop(name, None)
                state.pop(name, None)
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        reached: dict[str, set[str]] = {name: set() for name in watched}
        for entry, tensor in state.items():
            if tensor.requires_grad:
                gradients = torch.autograd.grad(tensor.sum(), [*watched.values()], allow_unused=True, retain_graph=True)
                for name in compress(watched, (isinstance(gradient, Tensor) for gradient in gradients)):
                    reached[name].add(entry)

        def entries(parts: Collection[str]) -> set[str]:
            return {entry for part in parts for entry in reached[BIAS_NAMES[part]]}

        biases = frozenset(part for part in BIAS_NAMES if entries([part]) and entries([part]) <= set(shapes))
        if not self.layout.has_out:  # the adapter adds one
            biases |= wanted & {"out"}
        if wanted <= biases and entries(wanted) == entries(biases):
            biases = wanted
        absent = entries(BIAS_NAMES) - set(shapes)
        return Traits(
            biases=biases,
            fits=set(shapes) == set(state) - absent,
            has_shapes=all(name in state and tuple(state[name].shape) == shape for name, shape in shapes.items()),
            untraced=[name for name in ("query", "key", "value") if not reached[name]],
        )


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts read from a module's parameters.

    `biases` are the projections with a bias; exactly the requested ones if the module can have those. `fits` says that
    the layout names all its parameters, `has_shapes` that their shapes are the layout's. The weights in `untraced`
    reach no parameter.
    """

    biases: frozenset[str]
    fits: bool
    has_shapes: bool
    untraced: list[str]


def _bias(parts: Collection[str]) -> str:
    """The value of the axis `bias` that names these projections."""
    letters = "".join(part for part in "qkv" if part in parts)
    text = "+".join(filter(None, [letters, "out" if "out" in parts else ""])) or "none"
    return Workload(scope="module", bias=text).bias


def _blank(like: Workload | Sizes, biased: Collection[str]) -> Weights:
    """Weights of these sizes on the meta device, with the biases of these projections."""
    shapes = Weights.shapes(like, like.embed_dim)  # type: ignore[arg-type] # both have the names of sizes
    return Weights(**{name: torch.empty(*shape, device="meta") for name, shape in shapes.items()}).biased(biased)


def sizes_of(weights: Weights) -> Sizes:
    """The sizes of canonical weights."""
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


class Adapted(nn.Module):
    """A module with the canonical weights loaded, called by the harness's convention."""

    def __init__(self, adapter: ModuleAdapter, module: nn.Module, weights: Weights) -> None:
        """Load the weights, and the values of `extra` into the other parameters.

        Raises:
            ValueError: a parameter exists only in the layout or only in the module, or has different shapes in them.
        """
        super().__init__()
        self.adapter, self.module = adapter, module
        self.biases = [part for part, name in BIAS_NAMES.items() if name in weights.tensors()]
        self.share_dropped = 0.0
        self.out = None if adapter.layout.has_out else out_layer(weights)
        merged = weights.query.shape[0] * weights.value.shape[1]  # H * V
        self.width = merged if weights.out is None or self.out is not None else weights.out.shape[0]
        self.to(device=weights.query.device, dtype=weights.query.dtype)
        self.constants = {
            f"module.{path}": torch.full_like(parameter, value, requires_grad=False)
            for path, parameter in module.named_parameters()
            for name, value in adapter.declared.extra.items()
            if fnmatch.fnmatchcase(path, name)
        }
        self._check(weights)
        self.load_state_dict(self.pack(weights) | self.pack_out(weights), strict=False)  # buffers keep their values

    def _check(self, weights: Weights) -> None:
        """Check that the layout gives each parameter of the module, in its shape."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self.module.named_parameters()}
        state = {name.removeprefix("module."): tensor for name, tensor in self.pack(weights).items()}
        does_not_fit = f"{self.adapter.layout.text} does not fit the module"
        for name, tensor in state.items():
            if name not in shapes:
                has_none = f"the module has no parameters, such as {name}"
                problem = unknown("parameter", name, shapes) if shapes else has_none
                raise ValueError(f"{does_not_fit}: {problem}{_bare(name, shapes)}")
            if (shape := tuple(tensor.shape)) != shapes[name]:
                hint = _hint(shape, shapes[name], self.adapter.layout, weights)
                there = f"parameter {name} is {shapes[name]} in the module"
                raise ValueError(f"{does_not_fit}: {there}, the layout makes {shape}{hint}")
        if unnamed := [name for name in shapes if name not in state]:
            raise ValueError(
                f"{does_not_fit}: it names no {', '.join(unnamed)}, and must name every parameter; where one holds no "
                f"weight, give its value: extra={{{unnamed[0]!r}: 1.0}}"
            )

    @property
    def dropout(self) -> float:
        """The share of the attention weights that the module drops."""
        return self.share_dropped

    @dropout.setter
    def dropout(self, share: float) -> None:
        assert self.adapter.declared.dropout is not None
        self.adapter.declared.dropout(self.module, share)
        self.share_dropped = share

    def pack(self, weights: Weights) -> dict[str, Tensor]:
        """The module's state dict from the canonical weights, by differentiable steps only."""
        state = self.adapter.layout.state(weights.biased(self.biases))
        return {f"module.{name}": tensor for name, tensor in state.items()} | self.constants

    def pack_out(self, weights: Weights) -> dict[str, Tensor]:
        """The output projection that the adapter added; empty if the module has its own."""
        return {} if self.adapter.layout.has_out else out_state(weights, "out")

    def call(self, x: Tensor, context: Tensor, mask: BoundMask) -> Any:  # noqa: ANN401 - whatever the module returns
        """The module's output for x (B, T, D) and context (B, S, D); less its input if `residual` is declared."""
        declared, module = self.adapter.declared, self.module
        if declared.has_cache:
            module = copy.deepcopy(module, {id(each): each for each in module.parameters()})  # which are shared
        result = module(x) if declared.call is None else declared.call(module, x, context, mask)
        output = result[0] if isinstance(result, tuple) else result
        if declared.residual and isinstance(output, Tensor) and output.shape == x.shape:
            return output - x
        return output

    def forward(self, x: Tensor, context: Tensor | None = None, *, mask: BoundMask) -> Tensor:
        """(B, T, D) and, for cross-attention, (B, S, D) -> (B, T, D)."""
        tokens = x if context is None else context
        try:
            output = self.call(x, tokens, mask)
        except (AttributeError, TypeError) as error:
            if BoundMask.__name__ in str(error):
                raise ValueError(
                    f"call is given a BoundMask: pass on mask.visible, which is None or boolean ({words(error)})"
                ) from error
            if "NoneType" not in str(error) or mask.visible is not None or self._fails_alike(error, x, tokens, mask):
                raise
            raise ValueError(
                "mask.visible and mask.hidden are None where every key is visible: pass on None, or all True "
                f"({words(error)})"
            ) from error
        expected = (*x.shape[:2], self.width)
        if not isinstance(output, Tensor) or output.shape != expected:
            wrong = tuple(output.shape) if isinstance(output, Tensor) else kind(output)
            place = "the output (B, T, D)" if self.out is None else "what out=None leaves to the adapter, (B, T, H*V)"
            raise ValueError(
                f"the module returned {wrong}: it must return {place}, here {expected}, "
                "or a tuple that begins with it; choose it in call"
            )
        return output if self.out is None else self.out(output)

    def _fails_alike(self, error: Exception, x: Tensor, context: Tensor, mask: BoundMask) -> bool:
        """Whether a mask of all True gives the same error: then the None mask is not its cause."""
        full = BoundMask(Prefix(mask.sizes[2]), mask.sizes, mask.device, num_heads=mask.num_heads, scale=mask.scale)
        try:
            self.call(x, context, full)
        except Exception as other:  # noqa: BLE001 - a user's module may raise anything
            return str(other) == str(error)
        return False


def _bare(name: str, there: Collection[str]) -> str:
    """The name to give a layout if the module holds a bare parameter in place of a layer with weight and bias."""
    base, _, part = name.rpartition(".")
    for bare in (base, f"{base}_{part}", f"{base}{part}"):
        if bare in there and bare.endswith(part):
            return f'; {bare} is a parameter and no layer: write "{bare.removesuffix(part)}{{}}"'
    return ""


def _hint(shape: tuple[int, ...], there: tuple[int, ...], layout: Layout, weights: Weights) -> str:
    width = weights.query.shape[-1]
    if shape == there[::-1] and len(shape) > 1:
        is_transposed = layout.text.startswith("transposed(")
        return ": leave out transposed(...)" if is_transposed else ": its weights are (D, rows), so transposed(...)"
    if len(there) > 1 and width not in there:
        return f": the module is not made for embed_dim {width}; make is given the sizes to make it for"
    return ""
