"""Plain functions of query, key and value as implementations: the names of their parameters decide their arguments.

    def mine(query, key, value, *, mask=None, scale=None): ...

The harness passes query (B, H, T, K), key and value by position. It passes an argument in KEYWORDS by name if the
function has a parameter of that name or of one of its ALIASES. docs/adapters.md has a table of these arguments, except
two: `world_size` is the number of ranks that compute the call together (attnbench/ranks), and `bound_mask` is the
BoundMask, for kernels that compile its rule. With `Declared.has_sdpa_mask`, `mask` is boolean or additive, as in
scaled_dot_product_attention, and the harness adds sinks to it. Shapes: see contract/__init__.py.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody imports it

from attnbench.contract import Attention, BoundMask, Implementation
from attnbench.contract.bound_mask import SPLIT
from attnbench.contract.declared import END, Declared, kind, words
from attnbench.contract.outside import Bound, Prepared, add_sink, repeat_heads, show_rows
from attnbench.contract.pages import BoundGroups, from_paged, groups_of, names_of
from attnbench.plugins import ALIASES, KEYWORDS
from attnbench.workloads.masks import UNLIMITED, Causal, CausalBottomRight, Mask, attention_window, not_a_window
from attnbench.workloads.workload import Workload

TENSOR_LAYOUTS = ("bhtk", "bthk")
"""Orders of the axes of a tensor: batch, heads, tokens, width; or as in flash-attention batch, tokens, heads, width."""
EMPTY = inspect.Parameter.empty
CAUSAL: dict[str, type[Mask]] = {"is_causal": Causal, f"is_causal{END}": CausalBottomRight}
"""By keyword, the mask that a function applies if it gets True for that keyword."""


def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> Tensor:  # type: ignore[no-untyped-def] # noqa: ANN001, ARG001, PLR0913, PLR0917, FBT002
    """Stand in for torch's SDPA when its signature is read: `inspect` cannot read the signature of a C++ function."""
    raise AssertionError


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A function of query, key and value; `names` maps the KEYWORDS that it takes to its own parameter names.

    `spec` is its name in messages. `omitted` has the names of parameters that the harness leaves out where it can. The
    parameter for the scale is left out in calls with scale 1 / sqrt(K) if its default is None, and the one for the
    window in calls without a limit if it has a default. If a call fails without them, the harness clears `omitted`, and
    every later call passes both.
    """

    function: Callable[..., Tensor]
    spec: str
    names: dict[str, str]
    declared: Declared
    layout: str = TENSOR_LAYOUTS[0]
    omitted: set[str] = field(default_factory=set)

    @property
    def has_sdpa_mask(self) -> bool:
        """Whether the function's mask may be additive; the harness then also adds sinks to the mask."""
        return self.declared.has_sdpa_mask and "mask" in self.names

    def reason_against(self, workload: Workload) -> str | None:
        """Return why the function cannot compute a workload with the arguments that it takes; None if it can."""
        names, declared = self.names, self.declared
        if workload.dropout > 0 and "dropout" not in names:
            return "the function has no parameter dropout, the probability of dropping a weight"
        is_open = declared.masks is not None or "bound_mask" in names
        reason = None if is_open else self._reason_in_mask(workload)
        return reason or declared.reason_against(workload, {*names, "sinks"} if self.has_sdpa_mask else names)

    def _reason_in_mask(self, workload: Workload) -> str | None:
        """Return why the function cannot apply the workload's mask with the arguments that it takes; None if it can."""
        rule, names = workload.mask_rule, self.names
        if not rule.is_additive and "softcap" not in names:
            return f"the function has no parameter softcap, and mask {rule} changes scores by more than a bias"
        if any(not part.is_additive for part in rule.changes[1:]):
            return f"mask {rule} adds to scores before its softcap, but the function adds after it"
        if any(part.is_additive for part in rule.changes) and not ("bias" in names or self.has_sdpa_mask):
            return f"the function has no parameter bias, and mask {rule} changes scores"
        if not rule.hides or self.declared.call is not None or {"mask", "bias"} & set(names):
            return None
        if "window_size" in names:
            return not_a_window(_hiding(rule), workload.seq_len, workload.kv_len)
        if self.causal(rule, is_square=workload.seq_len == workload.kv_len):
            return None
        taken = [f"{name} passes on the {mask.name} mask alone" for name, mask in CAUSAL.items() if name in names]
        return f"the function has no parameter mask: {(*taken, 'it takes part in unmasked workloads only')[0]}"

    def causal(self, rule: Mask, *, is_square: bool) -> str:
        """Return the function's causal keyword that hides the same keys as the mask `rule`; "" if none does.

        If T = S (`is_square`), a causal mask hides the same keys whether it is aligned at the start or at the end.
        """
        kinds = tuple(CAUSAL.values())
        for keyword, aligned in CAUSAL.items():
            if keyword in self.names and isinstance(_hiding(rule), kinds if is_square else aligned):
                return keyword
        return ""

    def arguments(self, mask: BoundMask, query: Tensor, key: Tensor) -> tuple[dict[str, Any], Tensor | None]:
        """Return a call's arguments by the function's own names, and a mask (B, 1, T, 1) of queries that get output 0.

        The mask is None if every query sees a key, or if the function itself gives 0 to a query that sees none. SDPA
        takes `is_causal` only without a mask, so a function with an SDPA mask gets `is_causal` only without biases and
        sinks. A function that takes a window gets no mask in place of the window.
        """
        names, rule, sizes = self.names, mask.rule, mask.sizes
        has_numbers = any(part.is_additive for part in rule.changes)
        causal = self.causal(rule, is_square=sizes[1] == sizes[2])
        if self.has_sdpa_mask and (has_numbers or mask.sinks is not None):
            causal = ""
        has_empty = self.declared.has_no_empty_rows and not causal and mask.sinks is None  # every query sees a sink
        empty = mask.empty if has_empty else None
        rest = mask.without_causal if mask.form == SPLIT and {"mask", "is_causal"} <= names.keys() else None
        if rest is not None and empty is None and not (self.has_sdpa_mask and has_numbers):
            causal = "is_causal"
        values: dict[str, Any] = {keyword: keyword == causal for keyword in CAUSAL}
        values |= {"scale": mask.scale_for(query.shape[-1]), "sinks": mask.sinks}
        values |= {"world_size": mask.world_size, "bound_mask": mask, "num_kv_heads": key.shape[1]}
        if names.get("num_kv_heads") == "enable_gqa":
            values["num_kv_heads"] = key.shape[1] != query.shape[1]
        values["softcap"] = next((float(part.arguments[0]) for part in rule.changes if not part.is_additive), None)
        values["window_size"] = window = attention_window(_hiding(rule), *sizes[1:])
        if "mask" in names:
            is_added = self.has_sdpa_mask and has_numbers
            is_window = "window_size" in names and window is not None and window[0] != UNLIMITED and empty is None
            if causal:
                dense = rest
            elif is_added:
                dense = mask.added(query.dtype)
            else:
                dense = None if is_window else mask.visible
            values["mask"] = mask.handed(dense if empty is None or dense is None else show_rows(dense, empty))
        if "bias" in names:
            hides = rule.hides and not causal and "mask" not in names
            values["bias"] = mask.handed(mask.added(query.dtype, hides=hides))
        return {name: values[keyword] for keyword, name in names.items() if keyword in values}, empty


class ByFunction:
    """A mixin that computes scope `attention` with a function, and does all other work outside the function's call."""

    signature: Signature
    dropout: float

    def prepare(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Prepared:
        """Prepare the arguments of a call for query (B, H, T, K), key (B, G, S, K) and value (B, G, S, V)."""
        signature, names = self.signature, self.signature.names
        passed, empty = signature.arguments(mask, query, key)
        passed |= {names["dropout"]: self.dropout} if "dropout" in names else {}
        if "num_kv_heads" not in names:
            key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        if mask.sinks is not None and signature.has_sdpa_mask and "sinks" not in names:
            passed[names["mask"]] = add_sink(passed[names["mask"]], mask.sinks, query, key.shape[2])
            key, value = (F.pad(each, (0, 0, 0, 1)) for each in (key, value))  # appends zeros -> (B,G,S+1,K)
        for name in signature.omitted:
            if passed[name] == (UNLIMITED, UNLIMITED) or (name == names.get("scale") and mask.scale is None):
                del passed[name]
        tensors: tuple[Tensor, ...] = (query, key, value)
        is_tokens_first = signature.layout == "bthk"
        if is_tokens_first:
            moved = ((each.transpose(1, 2), each.is_contiguous()) for each in tensors)  # (B,H,T,K) -> (B,T,H,K)
            tensors = tuple(each.contiguous() if is_plain else each for each, is_plain in moved)
        return Prepared(tensors=tensors, passed=passed, empty=empty, is_tokens_first=is_tokens_first)

    def caller(self, mask: BoundMask) -> Callable[..., Tensor]:
        """Return the function to call with prepared arguments, wrapped in the declared `call` if there is one."""
        function, call = self.signature.function, self.signature.declared.call
        return function if call is None else lambda *tensors: call(function, *tensors, mask)

    def bind(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Bound:
        """Return the call with its arguments prepared; in a batch of requests, one call for each distinct request."""
        if mask.cache is not None:
            return BoundGroups(groups_of(mask), self.bind, [query, key, value])
        if self.signature.omitted and not self.signature.declared.has_sdpa_mask:
            with torch.no_grad():
                self.attend(query, key, value, mask)  # clears `omitted` if the function needs these arguments
        return Bound(self.caller(mask), partial(self.prepare, query, key, value, mask), [query, key, value])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Compute the output (B, H, T, V) from query (B, H, T, K), key (B, G, S, K) and value (B, G, S, V).

        Raises:
            ValueError: the function fails because an argument is None, or returns anything but one tensor (B, H, T, V).
        """
        if mask.cache is not None:
            groups = groups_of(mask)
            parts = zip(groups.split(query, key, value), groups.masks, strict=True)
            return groups.join(self.attend(*tensors, own) for tensors, own in parts)
        signature, prepared = self.signature, self.prepare(query, key, value, mask)
        try:
            output: object = self.caller(mask)(*prepared.tensors, **prepared.passed)
        except (AttributeError, TypeError) as error:
            absent = [name for name, tensor in prepared.passed.items() if tensor is None]
            if "NoneType" not in str(error) or not (absent or signature.omitted):
                raise
            if signature.omitted:
                signature.omitted.clear()  # from now on, pass scale and window, too
                return self.attend(query, key, value, mask)
            raise ValueError(f"{signature.spec} is passed {', '.join(absent)} = None here ({words(error)})") from error
        batch, heads, tokens, width = (*query.shape[:3], value.shape[3])
        expected = (batch, tokens, heads, width) if prepared.is_tokens_first else (batch, heads, tokens, width)
        if isinstance(output, Tensor) and output.shape == expected:
            return prepared.finish(output)
        axes, hint = "B, T, H, V" if prepared.is_tokens_first else "B, H, T, V", ""
        if isinstance(output, Tensor) and output.shape == (batch, tokens, heads, width):
            hint = ' (if it takes tokens before heads: adapt(..., layout="bthk"))'
        elif isinstance(output, Tensor) and output.shape == (batch, tokens, heads * width):
            hint = " (heads are merged, and must stay apart)"
        elif isinstance(output, tuple):
            hint = " (if the first entry is the output: adapt(..., call=lambda f, q, k, v, mask: f(q, k, v)[0]))"
        shape = tuple(output.shape) if isinstance(output, Tensor) else kind(output)
        raise ValueError(
            f"{signature.spec} returned {shape}: it must return one tensor ({axes}), here {expected}{hint}"
        )


class FunctionAttention(ByFunction, Attention):
    """An `Attention` whose `attend` calls a function; the projections are those of `Attention`."""


def from_function(
    function: Callable[..., Tensor], spec: str, *, layout: str = TENSOR_LAYOUTS[0], declared: Declared | None = None
) -> Implementation:
    """Create the implementation of a function that takes query, key, value and some of KEYWORDS, or a paged cache.

    `spec` is the function's name in messages. `layout`, one of TENSOR_LAYOUTS, is the order of the axes of its tensors.
    If a `call` is declared, only this `call` calls the function, and the function's signature is not checked.

    Raises:
        ValueError: the signature cannot be read, or needs an argument that the harness does not pass.
    """
    declared = declared or Declared()
    if names_of(function) and declared.call is None:
        return from_paged(function, spec, declared)
    names = {} if declared.call else keywords(function, spec)
    names, declared = _with_bound(function, names, declared)
    parameters = _signature(function, spec).parameters if names else {}
    defaults = {keyword: parameters[name].default for keyword, name in names.items() if name in parameters}
    omitted = {names["scale"]} if defaults.get("scale", EMPTY) is None else set()
    omitted |= {names["window_size"]} if defaults.get("window_size", EMPTY) is not EMPTY else set()
    taken = Signature(function=function, spec=spec, names=names, declared=declared, layout=layout, omitted=omitted)
    return Implementation(
        build=type("FunctionAttention", (FunctionAttention,), {"signature": taken}),
        source=f"{declared.source or spec}, given {', '.join(('query', 'key', 'value', *names.values()))}",
        unsupported=taken.reason_against,
        has_dropout="dropout" in names,
        distributes="world_size" in names,
        built_in=lambda: declared.built_in,
        copies="query, key and value as (B, T, H, K)" if layout == "bthk" else "",
        is_approximate=bool(declared.approximate),
        takes_batches="gathered",
        most_error=declared.most_error,
    )


def keywords(function: object, spec: str) -> dict[str, str]:
    """Map the KEYWORDS that a function takes to its own parameter names; with **kwargs it also takes `mask`.

    Raises:
        ValueError: the function has no signature, does not take three tensors by position, or needs another argument.
    """
    signature, names = _signature(function, spec), dict[str, str]()
    for name, parameter in signature.parameters.items():
        is_by_name = parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
        if is_by_name and name not in _bound(function):
            names.setdefault(ALIASES.get(name, name), name)
        if parameter.kind is parameter.VAR_KEYWORD:
            names.setdefault("mask", "mask")
    names = {keyword: names[keyword] for keyword in KEYWORDS if keyword in names}
    try:
        signature.bind("query", "key", "value", **dict.fromkeys(names.values()))
    except TypeError as error:
        raise ValueError(
            f"{spec} takes {signature}, and is called with query, key and value by position and any of "
            f"{', '.join(KEYWORDS)} by name, or {', '.join(ALIASES)} ({error}); give everything else a default, or use "
            "functools.partial; a module with its own projections, or a function of tokens x, needs "
            "adapt(lambda sizes: ..., packed(...)) (docs/adapters.md)"
        ) from None
    return names


def _signature(function: Any, spec: str) -> inspect.Signature:  # noqa: ANN401 - any object of a user
    """Return the signature of a function, module or partial, also of torch's SDPA; ValueError if it has none."""
    if isinstance(function, partial) and function.func is F.scaled_dot_product_attention:
        return inspect.signature(partial(_sdpa, *function.args, **function.keywords))
    if function is F.scaled_dot_product_attention:
        return inspect.signature(_sdpa)
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        raise ValueError(
            f"{spec} has no signature: give a function of query, key and value that is written in Python, "
            "or wrap it, as in def mine(query, key, value, *, mask=None)"
        ) from None


def _with_bound(function: object, names: dict[str, str], declared: Declared) -> tuple[dict[str, str], Declared]:
    """Adapt `names` and `declared` to the arguments that a functools.partial has already bound.

    A bound is_causal=True declares the mask `causal`, and a bound float for the scale declares the scale. If
    `causal_bottom_right` is declared and `causal` is not, the function's parameter `is_causal` stands for the mask
    aligned at the end.
    """
    bound = {ALIASES.get(name, name): value for name, value in _bound(function).items()}
    if bound.get("is_causal") is True:
        declared = replace(declared, masks=("causal",))
        names = {keyword: name for keyword, name in names.items() if keyword not in {"mask", "bias"}}
    if isinstance(scale := bound.get("scale"), float):
        declared = replace(declared, scale=declared.scale or scale)
    is_at_end = declared.masks is not None and f"causal{END}" in declared.masks and "causal" not in declared.masks
    if is_at_end and "is_causal" in names:
        names[f"is_causal{END}"] = names.pop("is_causal")
    return names, declared


def _bound(function: object) -> Mapping[str, object]:
    return function.keywords if isinstance(function, partial) else {}


def _hiding(rule: Mask) -> Mask:
    """Return the part of a mask that hides keys: `none` if no part does, the whole mask if several do."""
    hiding = [part for part in rule.parts if part.hides]
    return rule if len(hiding) > 1 else next(iter(hiding), Mask())


def hides_by_bias(made: Implementation, workload: Workload) -> bool:
    """Return whether a function gets hidden keys as -inf in its bias, because it takes no mask and no `is_causal`."""
    signature = getattr(made.build, "signature", None)
    if not isinstance(signature, Signature) or not workload.mask_rule.hides:
        return False
    return "bias" in signature.names and not {"mask", *CAUSAL} & set(signature.names)
