"""Adapters: `adapt` creates the implementation of a function or module, from facts that users declare about it.

    mine = adapt(my_function, layout="bthk")
    gpt = adapt(lambda s: MyAttention(s.embed_dim, s.num_heads), packed("qkv", out="proj"), masks=("causal",))

Users declare only facts that the harness cannot read. From a module's parameters it reads which projections have a
bias, whether key/value heads are grouped, and which widths are possible. A layout that does not fit the parameters is
an error. docs/adapters.md shows every form. Shapes: see contract/__init__.py.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, cached_property
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.contract import BoundMask, Implementation, linear_layer
from attnbench.contract.declared import END, Declared, check_callable, kind, reads, words
from attnbench.contract.functions import TENSOR_LAYOUTS, from_function
from attnbench.contract.layouts import (
    BIAS_NAMES,
    LETTERS,
    Layout,
    Weights,
    linear,
    packed,
    split,
    stacked,
    transposed,
)
from attnbench.contract.outside import training
from attnbench.plugins import require_known
from attnbench.workloads.workload import FOLLOWS, MASKS_BETWEEN, Workload, following

__all__ = ["Layout", "Sizes", "adapt", "packed", "split", "stacked", "transposed"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes D, H, G, K and V of a module, and which of its projections have a bias.

    `qkv_bias` is True if at least one input projection has a bias, `out_bias` if the output projection has one.
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    qkv_bias: bool
    out_bias: bool


SMALL = {"batch_size": 1, "seq_len": 4, "num_heads": 2, "head_dim": 4, "scope": "module"}
"""A small workload, for which a module is created to read its parameters."""
MANY_HEADS = 32  # heads of a second, larger workload, to exclude modules with a fixed ratio of heads to key/value heads
SETS_OF_BIASES = [frozenset(parts) for size in (4, 3, 2, 1, 0) for parts in combinations(BIAS_NAMES, size)]
"""Every set of projections that may have a bias, the largest sets first."""
HELP = (
    "make is given the sizes; weights (D, rows) need transposed(...); for parameters that are no layer write {} in "
    'place of weight and bias, as in "in_proj_{}"; one that is no weight needs its value, as in extra={"gain": 1.0}'
)
FOR_MODULES = ("extra", "residual", "has_cache", "dropout")
"""Arguments of `adapt` that only modules can have."""


def adapt(what: Callable[..., Any], layout: Layout | str = TENSOR_LAYOUTS[0], **facts: Any) -> Implementation:  # noqa: ANN401 - see Declared
    """Create the Implementation of a function of query, key and value, or of the module that `what(sizes)` returns.

    Args:
        what: the function; or for a module, f(sizes) -> module.
        layout: for a function, the order of the axes of its tensors, "bhtk" or "bthk". For a module, the places of its
            weights: split, packed, stacked, transposed or Layout(pack=...).
        facts: any field of Declared (contract/declared.py), by name.

    Raises:
        ValueError: an argument is unknown or has the wrong type, an axis or mask is unknown, several masks are declared
            without a `call`, or a function's signature does not fit.
    """
    require_known("argument of adapt", facts, Declared.__dataclass_fields__)
    if isinstance(layout, Layout):
        module = ModuleAdapter(make=what, layout=layout, declared=Declared(**facts))
        return Implementation(
            build=module.build,
            source=module.declared.source,
            unsupported=module.unsupported,
            has_dropout=module.declared.dropout is not None,
            built_in=module.built_in,
            has_cache=module.declared.has_cache,
            is_approximate=bool(module.declared.approximate),
            most_error=module.declared.most_error,
        )
    if layout not in TENSOR_LAYOUTS:
        raise ValueError(
            f"adapt is given {layout!r} for a layout: give split(...), packed(...), stacked(...), transposed(...) or "
            'Layout(pack=...); a function of query, key and value needs none, or layout="bthk"'
        )
    if for_modules := [fact for fact in FOR_MODULES if facts.get(fact)]:
        raise ValueError(f"{', '.join(for_modules)} is about modules: leave it out, or give the layout of its weights")
    return from_function(what, getattr(what, "__name__", "adapt(...)"), layout=layout, declared=Declared(**facts))


@dataclass(frozen=True, kw_only=True)
class ModuleAdapter:
    """A user's module: `make` creates it, `layout` has the places of its weights, and `declared` has other facts.

    `declared.call` is f(module, x, context, mask) with x (B, T, D) and context (B, S, D) -> (B, T, D); in
    self-attention the context is x. `takes` are axes, such as `scale`, that `call` passes on to the module.
    """

    make: Callable[[Sizes], nn.Module]
    layout: Layout
    declared: Declared = field(default_factory=Declared)
    takes: Collection[str] = ()

    def __post_init__(self) -> None:
        call, masks = self.declared.call, self.declared.masks or ()
        check_callable("make", self.make)
        if call is None and len({name.replace(END, "") for name in masks}) > 1:
            raise ValueError(
                f"adapt is given masks={tuple(masks)!r} and no call, so that the module never gets a mask: add "
                "call=lambda module, x, context, mask: module(x, mask.visible), or give only the mask that is built in"
            )

    def module(self, sizes: Sizes) -> nn.Module:
        """Create a module with `make`; random contents, such as those of a buffer, are the same each time.

        Raises:
            NotImplementedError: `make` raises it, because it has no module of these sizes.
            ValueError: `make` raises another exception, or returns no module.
        """
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)  # leaves the generators of accelerators alone
                module = self.make(sizes)
        except NotImplementedError:
            raise
        except Exception as error:
            raise ValueError(f"make fails at {sizes}: {words(error)}") from error
        if not isinstance(module, nn.Module):
            raise ValueError(f"make returned {kind(module)}: it must return a module, a torch.nn.Module")
        return module

    def build(self, weights: Weights, of: "type[Adapted] | None" = None) -> "Adapted":
        """Create the module with these weights, wrapped in an `Adapted` or its subclass `of`."""
        return (of or Adapted)(self, self.module(sizes_of(weights)), weights)

    def built_in(self) -> dict[str, int | float | str]:
        """Return the built-in or default value of each axis that has one.

        The axes include `bias` if the module has the same biases of query, key and value for bias=all and bias=none,
        and `num_kv_heads` if its parameters are made for a single key/value head.
        """
        fixed = {**self.declared.built_in, "scope": "module"}
        if not self.takes_context:
            fixed.setdefault("kv_len", 0)  # 0: kv_len = seq_len
        if self.declared.masks is None and self.declared.call is None:
            fixed.setdefault("mask", f"none{MASKS_BETWEEN}")  # a list of one mask, which only a check sets
        for groups in ({}, {"num_kv_heads": 1}) if "num_kv_heads" not in fixed else ({},):
            without = fixed | {"mask": "none"} | groups
            small = [Workload(**SMALL, bias=bias).with_axes(without) for bias in ("all", "none")]  # type: ignore[arg-type]
            small += [
                each.with_axes({"num_heads": MANY_HEADS}) for each in small if groups
            ]  # not a fixed ratio of heads to key/value heads
            try:
                every, none, *others = map(self.biases, small)
            except (ValueError, NotImplementedError):  # `unsupported` and `build` report the reason
                return fixed
            if every is not None and none is not None and None not in others:
                fixed |= groups
                return fixed if every - {"out"} != none - {"out"} else fixed | {"bias": _bias(every)}
        return fixed

    @property
    def takes_context(self) -> bool:
        """Whether the declared `call` uses its context, as cross-attention needs."""
        return self.declared.call is not None and reads(self.declared.call, 2)

    def unsupported(self, workload: Workload) -> str | None:
        """Return why the module cannot run the workload; None if it can. For a layout that never fits, `build` raises.

        Raises:
            ValueError: the module cannot be created, or some weights reach no parameter by differentiable steps.
        """
        if workload.scope == "attention":
            return "an adapted module cannot compute attention without its projections: choose scope=module"
        declared, rule = self.declared, workload.mask_rule
        if workload.kv_len != workload.seq_len and not self.takes_context:
            return f"kv_len must be {FOLLOWS['kv_len']}: the adapter's call does not pass on its context"
        if declared.residual and workload.dtype in {"bfloat16", "float16"}:
            return f"it adds its input in {workload.dtype}, and the rounding hides errors of the rest: use float32"
        if declared.masks is None and declared.call is None and workload.mask != "none":
            return f"it takes no mask {rule.name}: add call=lambda module, x, context, mask: module(x, mask.visible)"
        if declared.masks is None and rule.changes_scores and not declared.changes_scores:
            return f"it may ignore a mask that changes scores: if it supports {rule.name}, list it in masks"
        return declared.reason_against(workload, self.takes) or self._misfit(workload)

    def _misfit(self, workload: Workload) -> str | None:
        """Return why the parameters do not fit the workload; None if they fit, or if `build` raises the error."""
        followed = following(workload.axes()).items()
        differing = [axis for axis, value in followed if axis != "kv_len" and getattr(workload, axis) != value]
        reason = f"its parameters are made for {', '.join(f'{axis} = {FOLLOWS[axis]}' for axis in differing)} alone"
        try:
            biases = self.biases(workload)
        except NotImplementedError as error:
            return f"make raises NotImplementedError: {error}".removesuffix(": ")
        except ValueError:
            if differing:
                return reason
            raise
        if biases is None:
            return reason if differing else None
        bias = _bias(biases)
        return None if biases == workload.biased else f"bias={bias} is built in: add --set bias={bias}"

    def biases(self, workload: Workload) -> frozenset[str] | None:
        """Return the projections that have a bias at the workload's sizes; None if the layout does not fit the module.

        If the layout fits with several sets of biases, the workload's own set is preferred.

        Raises:
            ValueError: some weights reach no parameter by differentiable steps.
        """
        return self._biases(sizes_of(_blank(workload, workload.biased)), workload.biased)

    @cached_property
    def _biases(self) -> Callable[[Sizes, frozenset[str]], frozenset[str] | None]:
        return cache(self._fitting)

    def _fitting(self, sizes: Sizes, wanted: frozenset[str]) -> frozenset[str] | None:
        """Return the first set of biases for which the layout fits the module, `wanted` tried first; None if none does.

        A layout fits if its entries have the names and shapes of the module's parameters, apart from constants
        (`extra`), and if each weight and bias is part of an entry.
        """
        shapes = shapes_of(self.module(sizes))
        for parts in (wanted, *SETS_OF_BIASES):
            if not self.layout.has_out and parts & {"out"} != wanted & {"out"}:  # the adapter adds this layer itself
                continue
            blank = _blank(sizes, parts)
            try:
                state = {name: tuple(tensor.shape) for name, tensor in self.layout.state(blank).items()}
                names = [name for name in {*shapes, *state} if self.constant(name) is None]
                is_alike = all(name in state and state[name] == shapes.get(name) for name in names)
                if is_alike and self._reaches_all(blank):  # last, because it is slower
                    return parts
            except ValueError:
                raise
            except Exception as error:
                if len(parts) == len(BIAS_NAMES):  # with fewer, `pack` may fail because it needs a bias
                    raise ValueError(f"the layout fails to pack a state dict: {words(error)}") from error
        return None

    @torch.enable_grad()
    def _reaches_all(self, weights: Weights) -> bool:
        """Return whether autograd traces entries of the layout's state dict back to all weights that the layout packs.

        Raises:
            ValueError: the weights of query, key or value reach no entry by differentiable steps.
        """
        watched = weights.map(lambda tensor: tensor.requires_grad_())
        state, tensors = self.layout.state(watched), watched.tensors()
        sums = [tensor.sum() for tensor in state.values() if tensor.requires_grad]  # no constants
        gradients: Sequence[Tensor | None] = ()
        if sums:
            gradients = torch.autograd.grad(sums, [*tensors.values()], allow_unused=True)
        reached = {name for name, gradient in zip(tensors, gradients, strict=False) if gradient is not None}
        if untraced := [name for name in LETTERS.values() if name not in reached]:
            raise ValueError(
                f"autograd cannot trace any entry of the layout back to the weights of {', '.join(untraced)}: pack "
                "by reshapes, transposes, stacks and cats, without detach(), .data, nn.Parameter, numpy or "
                "torch.no_grad()"
            )
        return reached >= {name for name in tensors if self.layout.has_out or not name.startswith("out")}

    def constant(self, parameter: str) -> float | None:
        """Return the value that `extra` declares for the parameter of that name; None if it is a weight."""
        return next((value for name, value in self.declared.extra.items() if fnmatchcase(parameter, name)), None)


def _bias(parts: Collection[str]) -> str:
    """Return the value of the axis `bias` for these projections, as in "qv+out"."""
    letters = "".join(part for part in "qkv" if part in parts)
    text = "+".join(filter(None, [letters, "out" if "out" in parts else ""])) or "none"
    return Workload(scope="module", bias=text).bias


def _blank(like: Workload | Sizes, biased: Collection[str]) -> Weights:
    """Create weights without data, of the sizes of `like`; only the projections in `biased` have a bias."""
    shapes = Weights.shapes(like, like.embed_dim)  # type: ignore[arg-type] # both have these fields
    return Weights(**{name: torch.empty(*shape, device="meta") for name, shape in shapes.items()}).biased(biased)


def sizes_of(weights: Weights) -> Sizes:
    """Return the sizes of a module with these canonical weights."""
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


def _loses_digits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a tensor is floating-point and converting it to `dtype` changes its values."""
    return tensor.is_floating_point() and not torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a module's parameters, by name."""
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


class Adapted(nn.Module):
    """A user's module with the canonical weights loaded, called as forward(x, context, mask=mask)."""

    def __init__(self, adapter: ModuleAdapter, module: nn.Module, weights: Weights) -> None:
        """Load the weights, and set the other parameters to the values that `extra` declares.

        Raises:
            ValueError: layout and module differ in the names or shapes of parameters.
        """
        super().__init__()
        self.adapter, self.module = adapter, module
        self.biases = [part for part, name in BIAS_NAMES.items() if name in weights.tensors()]
        self.share_dropped, self._mode = 0.0, ExitStack()
        added = None if adapter.layout.has_out else weights.out
        self.out = None if added is None else linear_layer(added, weights.out_bias)
        wide = {name: each for name, each in module.named_buffers() if _loses_digits(each, weights.query.dtype)}
        self.to(device=weights.query.device, dtype=weights.query.dtype)
        self.may_be_wide = bool(wide)
        for name, tensor in wide.items():
            owner, _, buffer = name.rpartition(".")
            setattr(module.get_submodule(owner), buffer, tensor.to(weights.query.device))
        values = {name: adapter.constant(name) for name, _ in module.named_parameters()}
        self.constants = {
            name: torch.full_like(module.get_parameter(name), value, requires_grad=False)
            for name, value in values.items()
            if value is not None
        }
        self._check(weights)
        self.load_state_dict(self.pack(weights), strict=False)  # buffers keep their values

    def _check(self, weights: Weights) -> None:
        """Raise ValueError unless layout and module have the same parameters, in the same shapes."""
        shapes = shapes_of(self.module)
        packed = {name: tuple(tensor.shape) for name, tensor in self._inside(weights).items()}
        if differing := [name for name in {**packed, **shapes} if packed.get(name) != shapes.get(name)]:
            name = differing[0]
            there, here = shapes.get(name, "no parameter"), packed.get(name, "not named")
            raise ValueError(
                f"the layout does not fit the module: {name} is {there} in the module, and {here} in "
                f"the layout, for embed_dim {weights.query.shape[-1]}; the module has {', '.join(shapes)}: {HELP}"
            )

    @property
    def dropout(self) -> float:
        """The probability with which the module drops an attention weight."""
        return self.share_dropped

    @dropout.setter
    def dropout(self, share: float) -> None:
        assert self.adapter.declared.dropout is not None
        self._mode.close()
        if share > 0:  # in evaluation mode many modules drop nothing
            self._mode.enter_context(training(self.module))
        self.adapter.declared.dropout(self.module, share)
        self.share_dropped = share

    def _inside(self, weights: Weights) -> dict[str, Tensor]:
        """Create the state dict of the user's module from the canonical weights."""
        return self.adapter.layout.state(weights.biased(self.biases)) | self.constants

    def pack(self, weights: Weights) -> dict[str, Tensor]:
        """Create the state dict of this wrapper from the canonical weights, by differentiable steps only."""
        added = {} if self.adapter.layout.has_out else linear("out", weights.out, weights.out_bias)
        return {f"module.{name}": tensor for name, tensor in self._inside(weights).items()} | added

    def call(self, x: Tensor, context: Tensor, mask: BoundMask) -> Any:  # noqa: ANN401 - whatever the module returns
        """Return the module's output for x (B, T, D) and context (B, S, D), minus x if `residual` is declared.

        Buffers that lose digits in half precision, such as a rotary embedding's frequencies, keep their dtype, as in a
        model that was loaded in half precision. If the module then fails, or its output does not have the dtype of x,
        these buffers are converted, too.
        """
        if self.may_be_wide:
            self.may_be_wide = False
            with suppress(RuntimeError):  # the module cannot combine two dtypes
                output = self._called(x, context, mask)
                if not isinstance(output, Tensor) or output.dtype == x.dtype:
                    return output
            self.module.to(x.dtype)
        return self._called(x, context, mask)

    def _called(self, x: Tensor, context: Tensor, mask: BoundMask) -> Any:  # noqa: ANN401 - as above
        if self.adapter.declared.has_cache:
            return self._with_cache(x, context, mask)
        return self._answer(self.module, x, context, mask)

    def _with_cache(self, x: Tensor, context: Tensor, mask: BoundMask) -> Any:  # noqa: ANN401 - as above
        """Call a copy of the module with an empty cache: once, or once for each of `mask.chunks`; join the outputs.

        Raises:
            NotImplementedError: the declared `call` empties the cache, so that it cannot continue a sequence.
        """

        def empty() -> nn.Module:  # shares its parameters with the module
            return copy.deepcopy(self.module, {id(each): each for each in self.module.parameters()})

        if not mask.chunks:
            return self._answer(empty(), x, context, mask)
        module, outputs, last = empty(), list[Tensor](), 0
        for part in x.split(mask.chunks, dim=1):
            last += part.shape[1]
            outputs.append(self._answer(module, part, part, mask.for_last(part.shape[1], last)))
        second = x.split(mask.chunks, dim=1)[1]
        alone = self._answer(empty(), second, second, mask.for_last(second.shape[1], second.shape[1]))
        if self.adapter.declared.call is not None and torch.equal(alone, outputs[1]):
            raise NotImplementedError("its call empties the cache, so that it cannot be fed in chunks")
        return torch.cat(outputs, dim=1)

    def _answer(self, module: nn.Module, x: Tensor, context: Tensor, mask: BoundMask) -> Any:  # noqa: ANN401 - as above
        declared = self.adapter.declared
        try:
            result = module(x) if declared.call is None else declared.call(module, x, context, mask)
        except (AttributeError, TypeError) as error:
            if BoundMask.__name__ not in str(error):
                raise
            raise ValueError(
                "call is given a BoundMask: pass on mask.visible, a boolean tensor, or None if every key is visible "
                f"({words(error)})"
            ) from error
        output = result[0] if isinstance(result, tuple) else result
        if declared.residual and isinstance(output, Tensor) and output.shape == x.shape:
            return output - x
        return output

    def forward(self, x: Tensor, context: Tensor | None = None, *, mask: BoundMask) -> Tensor:
        """Map x (B, T, D) and context (B, S, D), by default x, to (B, T, D)."""
        output: Tensor = self.call(x, x if context is None else context, mask)
        return output if self.out is None else self.out(output)
