"""Adapters: `adapt` takes the facts about a function or module that the harness cannot read from it.

    mine = adapt(my_function, layout="bthk")
    gpt = adapt(lambda s: MyAttention(s.embed_dim, s.num_heads), packed("qkv", out="proj"), masks=("causal",))

The harness reads from a module's parameters which projections have biases, whether key/value heads are grouped, and
which widths it can have. A layout that does not fit is an error.

A layout turns the canonical weights into the module's state dict by differentiable steps only, because the check sends
gradients back through it (docs/adr/0006). In a layout, a name stands for the linear layer's NAME.weight and NAME.bias;
a name with {} is completed there, as in `in_proj_{}`. If the canonical weights have no biases, no layout creates any.
Every form is shown in docs/adapters.md. Shapes as in the contract.
"""

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property, partial
from itertools import chain, combinations
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.contract import BIAS_NAMES, BoundMask, Implementation, Weights, supports_everything
from attnbench.contract.functions import TENSOR_LAYOUTS, Declared, from_function, takes_heads, words
from attnbench.plugins import unknown
from attnbench.workloads.masks import BETWEEN
from attnbench.workloads.masks import masks as mask_names
from attnbench.workloads.workload import FOLLOWS, Workload, following

__all__ = ["Layout", "Sizes", "adapt", "head_list", "packed", "per_head", "split", "stacked", "transposed"]

LETTERS = "qkv"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The place of the canonical weights in a module.

    `pack` creates the state dict by differentiable steps only. Without `has_out` the module ends before the output
    projection, at (B, T, H*V), and the adapter adds a projection so that the output is (B, T, D). Messages call the
    layout by its `text`.
    """

    pack: Callable[[Weights], dict[str, Tensor]]
    has_out: bool = True
    text: str = "Layout(pack=...)"

    def __post_init__(self) -> None:
        if not callable(self.pack):
            raise ValueError(f"{self.text} is not allowed: pack is {_kind(self.pack)}, and must be f(weights) -> dict")

    def state(self, weights: Weights) -> dict[str, Tensor]:
        """Call `pack` with the weights.

        Raises:
            ValueError: it raises, or returns something else than tensors by name.
        """
        absent = [
            f"{name}_bias" for name in ("query", "key", "value", "out") if f"{name}_bias" not in weights.tensors()
        ]
        without = f" of weights without {', '.join(absent)}" if absent else ""
        hint = "; where a bias is None, leave its entry out" if absent else ""
        try:
            made: object = self.pack(weights)  # a user's function may return anything
        except Exception as error:
            raise ValueError(f"{self.text} fails to pack a state dict{without}: {words(error)}{hint}") from error
        if not isinstance(made, Mapping):
            raise ValueError(f"{self.text} makes {_kind(made)}{without}: it must make tensors by parameter name")
        state = dict(made)
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor):
                must = (
                    "it must make a tensor" if tensor is not None else "it must make a tensor, or leave the entry out"
                )
                raise ValueError(f"{self.text} makes {_kind(tensor)} of {name}{without}: {must}")
        return state


def split(query: str, key: str, value: str, *, out: str | None) -> Layout:
    """One linear layer each for query (H*K, D), key (G*K, D) and value (G*V, D), head after head; out (D, H*V).

    Raises:
        ValueError: the names are not three different strings.
    """
    text = _text("split", query, key, value, out=out)
    _check_names(text, out, query=query, key=key, value=value)
    return _stacked({query: "q", key: "k", value: "v"}, out, text)


def packed(name: str, order: str = LETTERS, *, out: str | None) -> Layout:
    """One linear layer with all rows of the first, of the second, then of the third; `order` as in "qkv" or "kqv".

    Raises:
        ValueError: `order` does not name q, k and v once each, or a name is no string.
    """
    text = _text("packed", name, order=order, out=out)
    _check_names(text, out, name=name)
    _check_letters(text, order)
    return _stacked({name: order}, out, text)


def stacked(parts: Mapping[str, str], *, out: str | None) -> Layout:
    """Linear layers by name, each with the rows that its letters name, as in {"to_q": "q", "to_kv": "kv"}.

    Raises:
        ValueError: the letters do not name q, k and v once each, or a name is no string.
    """
    text = _text("stacked", parts, out=out)
    if not isinstance(parts, Mapping):
        raise ValueError(f'{text} is not allowed: it takes letters by layer, as in {{"to_q": "q", "to_kv": "kv"}}')
    for name in parts:
        _check_names(text, out, name=name)
    _check_letters(text, "".join(map(str, parts.values())))
    return _stacked(parts, out, text)


def _stacked(parts: Mapping[str, str], out: str | None, text: str) -> Layout:
    """`stacked` with checked names and letters; `text` is the call in the user's file."""

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

    return Layout(pack=pack, has_out=out is not None, text=text)


def per_head(name: str, order: str = LETTERS, *, out: str | None) -> Layout:
    """One linear layer with the rows of queries, key and value together for each key/value head.

    This fits a module that views its projection as (B, T, H, 3*K) before it splits it. If G < H, each group's rows
    begin with all of its query heads, as in Falcon (https://arxiv.org/abs/2311.16867).

    Raises:
        ValueError: `order` does not name q, k and v once each, or a name is no string.
    """
    text = _text("per_head", name, order=order, out=out)
    _check_names(text, out, name=name)
    _check_letters(text, order)

    def pack(weights: Weights) -> dict[str, Tensor]:
        groups, rows = len(weights.key), [_rows(weights)[letter] for letter in order]
        together = [weight.unflatten(0, (groups, -1)).flatten(1, 2) for weight, _ in rows]  # (H,K,D) -> (G,H/G*K,D)
        biases = [bias.reshape(groups, -1) for bias in _biases(rows)]  # (H,K) -> (G,H/G*K)
        bias = [torch.cat(biases, dim=1).flatten()] if biases else []
        return out_state(weights, out) | linear(name, torch.cat(together, dim=1).flatten(0, 1), bias)

    return Layout(pack=pack, has_out=out is not None, text=text)


def head_list(prefix: str, *, query: str, key: str, value: str, out: str | None) -> Layout:
    """One module for each head, at `prefix` with {head} for its number, that holds linear layers query, key and value.

    Raises:
        ValueError: `prefix` has no place for the head's number, or the names are not three different strings.
    """
    text = _text("head_list", prefix, query=query, key=key, value=value, out=out)
    _check_names(text, out, prefix=prefix)
    _check_names(text, out, query=query, key=key, value=value)
    if "{head}" not in prefix:
        raise ValueError(
            f"{text} is not allowed: its prefix needs {{head}} for the number of the head, as in heads.{{head}}"
        )

    def pack(weights: Weights) -> dict[str, Tensor]:
        state = out_state(weights, out)
        for name, (weight, bias) in zip((query, key, value), _rows(weights).values(), strict=True):
            for head in range(len(weight)):
                path = f"{prefix.replace('{head}', str(head))}.{name}"
                state |= linear(path, weight[head], [] if bias is None else [bias[head]])  # (K,D), (K,)
        return state

    return Layout(pack=pack, has_out=out is not None, text=text)


def transposed(layout: Layout) -> Layout:
    """`layout` with each weight (D, rows) instead of (rows, D), for x @ weight, as in the Conv1D of GPT-2.

    Raises:
        ValueError: the argument is no layout.
    """
    _check_layout("transposed", layout)

    def pack(weights: Weights) -> dict[str, Tensor]:
        return {name: tensor.T if tensor.dim() > 1 else tensor for name, tensor in layout.pack(weights).items()}

    return Layout(pack=pack, has_out=layout.has_out, text=f"transposed({layout.text})")


def _rows(weights: Weights) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Weight (H, K, D) and bias (H, K) of query, key and value by letter, in this order."""
    return {
        "q": (weights.query, weights.query_bias),
        "k": (weights.key, weights.key_bias),
        "v": (weights.value, weights.value_bias),
    }


def _biases(rows: Iterable[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    """The biases of one layer, with zeros for missing ones; [] if all are missing."""
    rows = list(rows)
    if all(bias is None for _, bias in rows):
        return []
    return [torch.zeros_like(weight[..., 0]) if bias is None else bias for weight, bias in rows]


def linear(name: str, weight: Tensor, biases: list[Tensor]) -> dict[str, Tensor]:
    """The entries of a linear layer, without a bias if `biases` is empty; biases (rows,) are concatenated."""
    path = name if "{}" in name else f"{name}.{{}}"
    entries = {path.replace("{}", "weight"): weight}
    return entries | ({path.replace("{}", "bias"): torch.cat(biases)} if biases else {})


def out_state(weights: Weights, name: str | None) -> dict[str, Tensor]:
    """The entries of the output projection (D, H*V), (D,); empty if there is none."""
    if name is None or weights.out is None:
        return {}
    return linear(name, weights.out, [] if weights.out_bias is None else [weights.out_bias])


def _text(maker: str, *by_position: object, **by_name: object) -> str:
    """A call as it appears in a user's file, for messages."""
    return f"{maker}({', '.join([*map(repr, by_position), *(f'{name}={value!r}' for name, value in by_name.items())])})"


def _kind(value: object) -> str:
    """A value's type, for messages."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _check_letters(text: str, order: object) -> None:
    if not isinstance(order, str) or sorted(order) != sorted(LETTERS):
        raise ValueError(f"{text} is not allowed: its letters must name q, k and v once each, as in qkv or kqv")


def _check_names(text: str, out: object, **names: object) -> None:
    """Check that each is a string, and that no two name the same layer."""
    for what, name in {**names, "out": out}.items():
        if not isinstance(name, str) and not (what == "out" and name is None):
            or_none = ", or None where the module has none" if what == "out" else ""
            raise ValueError(
                f"{text} is not allowed: {what} is {_kind(name)}, and must be the name of a layer, as "
                f'module.named_modules() has it, such as "{what}_proj"{or_none}'
            )
    same = [what for what, name in names.items() if list(names.values()).count(name) > 1]
    if same:
        raise ValueError(
            f"{text} is not allowed: {' and '.join(same)} are one layer: give three different ones; a layer that makes "
            "more than one is packed(...), per_head(...) or stacked(...)"
        )


def _check_layout(text: str, layout: object) -> None:
    if not isinstance(layout, Layout):
        raise ValueError(
            f"{text} is given {_kind(layout)} for a layout: give split(...), packed(...), per_head(...), "
            "stacked(...), head_list(...), transposed(...) or Layout(pack=...); a function of query, key and value "
            'needs none, or layout="bthk"'
        )


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


Call = Callable[[Any, Tensor, Tensor, BoundMask], Any]
"""f(module, x, context, mask) with x (B, T, D) and context (B, S, D) -> (B, T, D). Self-attention has x for context."""
SetDropout = Callable[[Any, float], object]
"""f(module, share): drop that share of the attention weights in every later call, in any mode of the module."""
SMALL = {"batch_size": 1, "seq_len": 4, "num_heads": 2, "head_dim": 4, "scope": "module"}
"""A workload at which a module is created to read its parameters."""
NARROW = ("bfloat16", "float16")


def adapt(  # noqa: PLR0913 - each says one thing that functions or modules differ in
    what: Callable[..., Any],
    layout: Layout | str = TENSOR_LAYOUTS[0],
    *,
    call: Callable[..., Any] | None = None,
    masks: Collection[str] | None = None,
    scale: float = 0.0,
    rotary: str = "none",
    sizes: Mapping[str, int] | None = None,
    extra: Mapping[str, float] | None = None,
    residual: bool = False,
    has_cache: bool = False,
    approximate: bool = False,
    changes_scores: bool = False,
    axes: Collection[str] = (),
    unsupported: Callable[[Workload], str | None] = supports_everything,
    dropout: SetDropout | None = None,
    source: str = "",
) -> Implementation:
    """Create the Implementation of a function of query, key and value, or of the module that `what(sizes)` returns.

    Args:
        what: the function; or for a module, f(sizes) -> module.
        layout: for a function, the axes of its tensors: "bhtk" or "bthk". For a module, where its weights are: split,
            packed, per_head, stacked, head_list, transposed or Layout(pack=...).
        call: f(module, x, context, mask) or f(function, query, key, value, mask) with mask a BoundMask. Without it a
            module is called with x (B, T, D) alone. If a module returns a tuple, the first entry is the output.
        masks: the masks that it takes or has built in, by name or with numbers, as in "sliding_window(9)".
        scale: the built-in factor of query times key, if it is not 1 / sqrt(K).
        rotary: the rotary embedding inside, "halves(10000)" or "interleaved(10000)" by its base.
        sizes: built-in values of axes, as in {"seq_len": 256}; {"kv_len": 0} means S = T.
        extra: values of parameters that hold no canonical weight, by name or pattern, as in {"norm.weight": 1.0}.
        residual: the module returns its input plus attention.
        has_cache: the module keeps its own cache, which is emptied before each call; inference only.
        approximate: it is meant to be close, not equal: its error is shown without a judgement.
        changes_scores: `call` also passes on masks that change scores, if no masks are listed.
        axes: "kv_len" for a module that takes a context of another length. The others are read from its parameters.
        unsupported: f(workload) -> the reason why it cannot run, or None.
        dropout: f(module, share) makes a module drop that share of its weights.
        source: the origin of the code, for reports.

    Raises:
        ValueError: an argument has the wrong type, an axis or mask is unknown, or a mask needs a `call`.
    """
    if not isinstance(layout, Layout) and layout not in TENSOR_LAYOUTS:
        _check_layout("adapt", layout)
    _check_function("unsupported", unsupported, 1, 'lambda workload: "a reason" if ... else None')
    _check_list("masks", masks, "causal")
    for mask in masks or ():
        _check_mask(mask)
    built_in: dict[str, int | float | str] = dict(sizes or {})
    built_in |= {"scale": scale} if scale else {}
    built_in |= {"rotary": Workload(rotary=rotary).rotary} if rotary != "none" else {}
    built_in |= {"direction": "inference"} if has_cache else {}
    for axis in built_in:
        if axis not in Workload.__struct_fields__:
            raise ValueError(unknown("axis", axis, Workload.__struct_fields__))
    declared = Declared(masks=None if masks is None else tuple(masks), built_in=built_in, unsupported=unsupported)
    if not isinstance(layout, Layout):
        given = {"extra": extra, "residual": residual, "has_cache": has_cache, "axes": axes, "dropout": dropout}
        _check_is_function(what, [name for name, value in given.items() if value])
        _check_function("call", call, 5, "lambda function, query, key, value, mask: function(query, key, value)")
        return from_function(
            what,
            getattr(what, "__name__", "adapt(...)"),
            source=source,
            layout=str(layout),
            declared=declared,
            call=call,
            is_approximate=approximate,
        )
    module = ModuleAdapter(
        make=what,
        layout=layout,
        call=call,
        declared=declared if masks is not None or call is not None else replace(declared, masks=("none",)),
        built_in={**({} if masks is None else declared.axes), **built_in, "scope": "module"},
        extra=extra or {},
        has_residual=residual,
        has_cache=has_cache,
        changes_scores=changes_scores,
        axes=axes,
        set_dropout=dropout,
    )
    return Implementation(
        build=module.build,
        source=source,
        unsupported=module.unsupported,
        has_dropout=dropout is not None,
        built_in=module.built_in_axes,
        is_approximate=approximate,
    )


@dataclass(frozen=True, kw_only=True)
class ModuleAdapter:
    """The arguments of `adapt` for a module."""

    make: Callable[[Sizes], nn.Module]
    layout: Layout
    call: Call | None
    declared: Declared
    built_in: Mapping[str, int | float | str]
    extra: Mapping[str, float]
    has_residual: bool
    has_cache: bool
    changes_scores: bool
    axes: Collection[str]
    set_dropout: SetDropout | None
    kind: "type[Adapted] | None" = None

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: one has the wrong type.
        """
        _check_function("make", self.make, 1, "lambda sizes: MyAttention(sizes.embed_dim, sizes.num_heads)")
        _check_function("call", self.call, 4, "lambda module, x, context, mask: module(x, mask=mask.visible)")
        _check_function("dropout", self.set_dropout, 2, "lambda module, share: setattr(module, 'dropout', share)")
        _check_list("axes", self.axes, "kv_len")
        for axis in self.axes:
            if axis not in FOLLOWS:
                raise ValueError(unknown("axis to adapt to", axis, FOLLOWS))

    @cached_property
    def made(self) -> "Made":
        """The modules and the facts read from their parameters."""
        return Made(self.make, self.layout, self.extra)

    def built_in_axes(self) -> dict[str, int | float | str]:
        """Built-in values of axes, with the biases that the parameters show."""
        bias = self.made.built_in_bias(self.built_in)
        return {**self.built_in, **({} if bias is None else {"bias": bias})}

    def unsupported(self, workload: Workload) -> str | None:
        """Return why the module cannot run the workload, or None."""
        if workload.scope == "attention":
            return "an adapted module has no attend, which is attention without the projections: choose scope=module"
        if workload.kv_len != workload.seq_len and "kv_len" not in self.axes:
            return f"kv_len must be {FOLLOWS['kv_len']}: the adapter does not list kv_len among its axes"
        if self.has_residual and workload.dtype in NARROW:
            return f"the sum with the input is rounded to {workload.dtype}, so that the rest cannot be compared"
        declared, rule = self.declared, workload.mask_rule
        for axis, usual in (("scale", 0.0), ("rotary", "none"), ("sinks", "none")):
            if getattr(workload, axis) != usual and axis not in self.built_in:
                return f"its module takes no {axis} of the workload"
        if not declared.takes_mask(workload):
            return f"the adapter passes on no mask {rule.name}, but {', '.join(declared.masks or ())}"
        if declared.masks is None and rule.changes_scores and not self.changes_scores:
            return (
                "the adapter does not say that it passes on what changes scores: "
                f"list {rule.name} among its masks, or give changes_scores=True"
            )
        return declared.unsupported(workload) or self.made.misfit(workload, self.axes)

    def build(self, weights: Weights) -> nn.Module:
        """Create the module with these weights."""
        module = self.made.module(sizes_of(weights))
        call: Call = self.call or _of_tokens
        if self.has_cache:
            call = _emptied(call)
        if self.has_residual:
            call = partial(_without_residual, call)
        return (self.kind or Adapted)(module, self.layout, call, weights, self.set_dropout, extra=self.extra)


def _of_tokens(module: Any, x: Tensor, context: Tensor, mask: BoundMask) -> Any:  # noqa: ANN401, ARG001
    """Call a module with tokens alone."""
    return module(x)


def _check_mask(mask: str) -> None:
    """Check that a mask is a known name, or has the form of a workload's mask.

    Raises:
        ValueError: it is neither.
    """
    for part in mask.split(BETWEEN):
        if part.partition("(")[0] not in mask_names():
            raise ValueError(unknown("mask", part, mask_names(), ", by its name, with numbers or without"))
    if "(" in mask:
        Workload(mask=mask)


def _check_is_function(what: object, modules_alone: Collection[str]) -> None:
    """Check that it is a function of query, key and value, and that no argument for modules is used.

    Raises:
        ValueError: it is not, or one is.
    """
    if not callable(what):
        raise ValueError(
            f"adapt is given {_kind(what)}: give a function of query, key and value, or f(sizes) -> module"
        )
    try:
        parameters = list(inspect.signature(what).parameters)
    except (TypeError, ValueError):
        parameters = ["query", "key", "value"]
    if len(parameters) < 3 and not takes_heads(parameters):  # noqa: PLR2004 - query, key, value
        raise ValueError(
            f"adapt is given a function of {', '.join(parameters) or 'nothing'} and no layout: a module's weights need "
            'one, as in adapt(lambda sizes: ..., packed("qkv", out="proj"))'
        )
    if modules_alone:
        raise ValueError(
            f"{', '.join(modules_alone)} is about modules: leave it out, or give the layout of its weights"
        )


def _check_function(what: str, function: object, num_arguments: int, example: str) -> None:
    """Check that it is None or a function with that many arguments.

    Raises:
        ValueError: it is something else.
    """
    if function is None:
        return
    if isinstance(function, nn.Module) or not callable(function):
        kind = "a module that is made already" if isinstance(function, nn.Module) else _kind(function)
        raise ValueError(f"adapt is given {kind} for {what}: give a function, as in {what}={example}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtin functions have no signature
        return
    try:
        signature.bind(*range(num_arguments))
    except TypeError:
        raise ValueError(
            f"adapt is given a function {signature} for {what}: it must take {num_arguments} by position, as in "
            f"{what}={example}"
        ) from None


def _check_list(what: str, names: object, example: str) -> None:
    if isinstance(names, str) or not (names is None or isinstance(names, Collection)):
        raise ValueError(f"adapt is given {what}={names!r}: give a list of names, as in {what}=[{example!r}]")


class Made:
    """The modules that `make` creates, and the facts in their parameters: biases, grouped heads, widths."""

    def __init__(self, make: Callable[[Sizes], nn.Module], layout: Layout, extra: Mapping[str, float]) -> None:
        self.make, self.layout, self.extra = make, layout, extra
        self.shapes = cache(self._shapes)
        self.biases_of = cache(self._biases_of)
        self.reached = cache(self._reached)

    def module(self, sizes: Sizes) -> nn.Module:
        """Create a module; its random contents, such as a buffer, are the same each time.

        Raises:
            ValueError: `make` raises, or returns no module.
        """
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                module = self.make(sizes)
        except Exception as error:
            raise ValueError(f"make fails at {sizes}: {words(error)}") from error
        if not isinstance(module, nn.Module):
            raise ValueError(f"make returned {_kind(module)}: it must return a module, a torch.nn.Module")
        return module

    def _shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters that are not `extra`, by name."""
        named = {name: tuple(parameter.shape) for name, parameter in self.module(sizes).named_parameters()}
        return {name: shape for name, shape in named.items() if not any(fnmatchcase(name, each) for each in self.extra)}

    def _biases_of(self, sizes: Sizes, asked: frozenset[str]) -> frozenset[str] | None:
        """The projections with biases in the module for `sizes`, including the requested ones if possible.

        None: the layout does not fit the module's parameters with any choice of biases.
        """
        existing = set(self.shapes(sizes))
        choices = [combinations(BIAS_NAMES, number) for number in range(len(BIAS_NAMES), -1, -1)]
        for parts in (asked, *map(frozenset, chain(*choices))):
            try:
                names, reached = self.reached(sizes, parts)
            except ValueError:  # a pack that needs some bias
                continue
            if _without_extra(names, self.extra) == existing and all(BIAS_NAMES[part] in reached for part in parts):
                return parts
        return None

    def _reached(self, sizes: Sizes, parts: frozenset[str]) -> tuple[set[str], set[str]]:
        """What the layout creates from weights of these sizes with those biases, and what it depends on."""
        return _reached(self.layout, _blank(sizes).biased(parts))

    def built_in_bias(self, axes: Mapping[str, int | float | str]) -> str | None:
        """The value of the axis `bias` that all modules have; None if they follow the sizes, or do not fit."""
        try:
            every, none = (self._at(Workload(**SMALL, bias=bias).with_axes(axes)) for bias in ("all", "none"))  # type: ignore[arg-type]
        except ValueError:  # checks and builds give the reason
            return None
        if every is None or none is None or every & set("qkv") != none & set("qkv"):
            return None
        return _bias(every)

    def _at(self, workload: Workload) -> frozenset[str] | None:
        blank = _blank_at(workload)
        return self.biases_of(sizes_of(blank), workload.biased)

    def misfit(self, workload: Workload, axes: Collection[str]) -> str | None:
        """Return why the module's parameters do not fit the workload, or None; `build` raises if a layout never fits.

        Raises:
            ValueError: the module cannot be created, or no result of `pack` can be traced to the weights.
        """
        differing = [
            axis
            for axis, value in following(workload.axes()).items()
            if axis != "kv_len" and axis not in axes and getattr(workload, axis) != value
        ]
        sizes = sizes_of(_blank_at(workload))
        if differing and not self._fits(sizes, workload):
            named = ", ".join(f"{axis} = {FOLLOWS[axis]}" for axis in differing)
            return f"its parameters are made for {named} alone"
        asked, own = workload.biased, self.biases_of(sizes, workload.biased)
        _, reached = self.reached(sizes, asked)
        if lost := [name for name in ("query", "key", "value") if name not in reached]:
            raise ValueError(
                f"{self.layout.text} makes nothing that autograd can follow back to the weights of "
                f"{', '.join(lost)}: pack by reshapes, transposes, stacks and cats, without detach(), .data, "
                "nn.Parameter, numpy or torch.no_grad()"
            )
        if own is None or own == asked:
            return None
        return f"bias={_bias(own)} is built in: add --set bias={_bias(own)}"

    def _fits(self, sizes: Sizes, workload: Workload) -> bool:
        """Whether the parameters have the layout's shapes for weights of these sizes."""
        try:
            shapes, own = self.shapes(sizes), self.biases_of(sizes, workload.biased)
            state = self.layout.state(_blank(sizes).biased(own or ()))
        except ValueError:
            return False
        return own is not None and all(tuple(state[name].shape) == shape for name, shape in shapes.items())


def _bias(parts: Collection[str]) -> str:
    """The value of the axis `bias` that names these projections."""
    letters = "".join(part for part in "qkv" if part in parts)
    text = "+".join(filter(None, [letters, "out" if "out" in parts else ""])) or "none"
    return Workload(scope="module", bias=text).bias


def _blank(sizes: Sizes) -> Weights:
    """Weights of these sizes on the meta device, with every bias."""
    heads, groups, dim = sizes.num_heads, sizes.num_kv_heads, sizes.embed_dim
    workload = Workload(
        num_heads=heads, num_kv_heads=groups, head_dim=sizes.head_dim, value_dim=sizes.value_dim, embed_dim=dim
    )
    shapes = Weights.shapes(workload, dim)
    return Weights(**{name: torch.empty(*shape, device="meta") for name, shape in shapes.items()})


def _blank_at(workload: Workload) -> Weights:
    """Weights of a workload on the meta device, with its biases."""
    shapes = Weights.shapes(workload, workload.embed_dim)
    blank = Weights(**{name: torch.empty(*shape, device="meta") for name, shape in shapes.items()})
    return blank.biased(workload.biased)


@torch.enable_grad()
def _reached(layout: Layout, weights: Weights) -> tuple[set[str], set[str]]:
    """The entries that a layout creates from weights, and the weights and biases that they depend on.

    An output projection that the adapter adds uses all of its own.
    """
    watched = weights.map(lambda tensor: tensor.requires_grad_())
    state, tensors = layout.state(watched), watched.tensors()
    sums = [tensor.sum() for tensor in state.values() if tensor.requires_grad]
    gradients = torch.autograd.grad(sums, list(tensors.values()), allow_unused=True) if sums else [None] * len(tensors)
    reached = {name for name, gradient in zip(tensors, gradients, strict=True) if gradient is not None}
    return set(state), reached | (set() if layout.has_out else {"out", "out_bias"})


def _without_extra(names: Collection[str], extra: Collection[str]) -> set[str]:
    return {name for name in names if not any(fnmatchcase(name, each) for each in extra)}


def _without_residual(call: Call, module: Any, x: Tensor, context: Tensor, mask: BoundMask) -> Any:  # noqa: ANN401
    """A module's output minus its input."""
    result = call(module, x, context, mask)
    output = result[0] if isinstance(result, tuple) else result
    return output - x if isinstance(output, Tensor) and output.shape == x.shape else output


def _emptied(call: Call) -> Call:
    """Wrap `call` to reset a module's attributes and buffers to their values before its first call."""
    of_all = set(vars(nn.Module()))
    kept: list[tuple[nn.Module, dict[str, Any], dict[str, Tensor]]] = []

    def emptied(module: Any, x: Tensor, context: Tensor, mask: BoundMask) -> Any:  # noqa: ANN401
        if not kept:  # at the first call everything has its device and dtype
            for each in module.modules():
                attributes = {name: value for name, value in vars(each).items() if name not in of_all}
                kept.append((each, copy.deepcopy(attributes), copy.deepcopy(dict(each.named_buffers(recurse=False)))))
        for each, attributes, buffers in kept:
            for name in set(vars(each)) - set(attributes) - of_all:
                delattr(each, name)
            vars(each).update(copy.deepcopy(attributes))
            for name, tensor in buffers.items():
                setattr(each, name, tensor.clone())
        return call(module, x, context, mask)

    return emptied


class Adapted(nn.Module):
    """A module with the canonical weights loaded, called by the harness's convention."""

    def __init__(  # noqa: PLR0913 - what it is, and what was said of it
        self,
        module: nn.Module,
        layout: Layout,
        call: Call,
        weights: Weights,
        set_dropout: SetDropout | None = None,
        *,
        extra: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Load the weights, and the values of `extra` into the other parameters.

        Raises:
            ValueError: a parameter exists only in the layout or only in the module, or has different shapes in them.
        """
        super().__init__()
        self.module = module
        self.layout = layout
        self.biases = [part for part, name in BIAS_NAMES.items() if name in weights.tensors()]
        self.call_module: Call = call
        self.set_dropout = set_dropout
        self.share_dropped = 0.0
        self.out: nn.Linear | None = None
        if weights.out is not None and not layout.has_out:
            self.out = nn.Linear(weights.out.shape[1], weights.out.shape[0], bias=weights.out_bias is not None)
        merged = weights.query.shape[0] * weights.value.shape[1]  # H * V
        self.width = merged if weights.out is None or self.out is not None else weights.out.shape[0]
        self.to(device=weights.query.device, dtype=weights.query.dtype)
        shapes = {path: tuple(parameter.shape) for path, parameter in self.named_parameters()}
        self.constants = {
            path: torch.full(shape, value, dtype=weights.query.dtype, device=weights.query.device)
            for path, shape in shapes.items()
            for name, value in extra.items()
            if fnmatchcase(path.removeprefix("module."), name)
        }
        state = self.pack(weights) | self.pack_out(weights)
        for path, tensor in state.items():
            name = path.removeprefix("module.")
            if path not in shapes:
                has = [other.removeprefix("module.") for other in shapes]
                missing = unknown("parameter", name, has) if has else f"the module has no parameters, such as {name}"
                raise ValueError(f"{layout.text} does not fit the module: {missing}")
            if tuple(tensor.shape) != shapes[path]:
                made = tuple(tensor.shape)
                raise ValueError(
                    f"{layout.text} does not fit the module: parameter {name} is {shapes[path]} in the module, "
                    f"the layout makes {made}{_hint(made, shapes[path], layout, weights)}"
                )
        if unnamed := [path.removeprefix("module.") for path in shapes if path not in state]:
            raise ValueError(
                f"{layout.text} does not fit the module: it names no {', '.join(unnamed)}, and must name every "
                f"parameter; where one holds no weight, give its value: extra={{{unnamed[0]!r}: 1.0}}"
            )
        self.load_state_dict(state, strict=False)  # buffers are no weights and keep their values

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
        state = self.layout.state(weights.biased(self.biases))
        return {f"module.{name}": tensor for name, tensor in state.items()} | self.constants

    def pack_out(self, weights: Weights) -> dict[str, Tensor]:
        """The output projection that the adapter added; empty if the module has its own."""
        return {} if self.layout.has_out else out_state(weights, "out")

    def forward(self, x: Tensor, context: Tensor | None = None, *, mask: BoundMask) -> Tensor:
        """(B, T, D) and, for cross-attention, (B, S, D) -> (B, T, D)."""
        tokens = x if context is None else context
        try:
            result = self.call_module(self.module, x, tokens, mask)
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
        output: object = result[0] if isinstance(result, tuple) else result
        expected = (*x.shape[:2], self.width)
        if not isinstance(output, Tensor) or output.shape != expected:
            given = tuple(output.shape) if isinstance(output, Tensor) else _kind(output)
            kind = "the output (B, T, D)" if self.out is None else "what out=None leaves to the adapter, (B, T, H*V)"
            raise ValueError(
                f"the module returned {given}: it must return {kind}, here {expected}, "
                "or a tuple that begins with it; choose it in call"
            )
        return output if self.out is None else self.out(output)

    def _fails_alike(self, error: Exception, x: Tensor, context: Tensor, mask: BoundMask) -> bool:
        """Whether a mask of all True gives the same error: then the None mask is not its cause."""
        full = copy.copy(mask)
        visible = torch.ones(1, 1, *mask.sizes[1:], dtype=torch.bool, device=mask.device)
        vars(full).update(visible=visible, hidden=~visible)
        try:
            self.call_module(self.module, x, context, full)
        except Exception as other:  # noqa: BLE001 - a user's module may raise anything
            return str(other) == str(error)
        return False


def _hint(made: tuple[int, ...], there: tuple[int, ...], layout: Layout, weights: Weights) -> str:
    """A hint about the cause of a shape mismatch, or ""."""
    width = weights.query.shape[-1]
    if made == there[::-1] and len(made) > 1:
        is_transposed = layout.text.startswith("transposed(")
        return ": leave out transposed(...)" if is_transposed else ": its weights are (D, rows), so transposed(...)"
    if len(there) > 1 and width not in there:
        return f": the module is not made for embed_dim {width}; make is given the sizes to make it for"
    return ""


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
