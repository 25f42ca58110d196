"""Plain functions of query, key and value as implementations: the parameter names decide what they are passed.

    def mine(query, key, value, *, mask=None, scale=None): ...

Query (B, H, T, K), key and value are passed by position, each of KEYWORDS by name, as the table in docs/adapters.md
says. ALIASES are other packages' names for them, including all names of `scaled_dot_product_attention`. Besides these,
`world_size` is the number of ranks that compute the call together (attnbench/ranks), and `bound_mask` the BoundMask
itself, for kernels that compile its rule. A function with `Declared.has_sdpa_mask` gets `mask` as
scaled_dot_product_attention does, boolean or additive, and the harness adds sinks to it. Shapes as in the contract.
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
"""Orders of a function's axes: batch, heads, tokens, width; or batch, tokens, heads, width, as in flash-attention."""
EMPTY = inspect.Parameter.empty
CAUSAL: dict[str, type[Mask]] = {"is_causal": Causal, f"is_causal{END}": CausalBottomRight}
"""The mask that a function applies if it gets True for one of these keywords."""


def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> Tensor:  # type: ignore[no-untyped-def] # noqa: ANN001, ARG001, PLR0913, PLR0917, FBT002
    """The signature of torch's own function, which is not written in Python."""
    raise AssertionError


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A function of query, key and value; `names` maps those of KEYWORDS that it takes to its own parameter names.

    `spec` is its name in messages. `omitted` are its parameters for a scale and a window that callers usually leave
    out. They are passed only if the scale is unusual or there is a window, and always after the function's own default
    has failed.
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
        """Return why the function cannot be passed a workload's operands, or None."""
        names, declared = self.names, self.declared
        if workload.dropout > 0 and "dropout" not in names:
            return "the function has no parameter dropout, the probability of dropping a weight"
        is_open = declared.masks is not None or "bound_mask" in names
        reason = None if is_open else self._reason_in_mask(workload)
        return reason or declared.reason_against(workload, {*names, "sinks"} if self.has_sdpa_mask else names)

    def _reason_in_mask(self, workload: Workload) -> str | None:
        """Return why the function cannot be passed the mask, or None."""
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
        """The function's causal keyword that hides the same keys as the mask `rule`, or "".

        If T = S (`is_square`), both alignments hide the same keys.
        """
        kinds = tuple(CAUSAL.values())
        for keyword, aligned in CAUSAL.items():
            if keyword in self.names and isinstance(_hiding(rule), kinds if is_square else aligned):
                return keyword
        return ""

    def arguments(self, mask: BoundMask, query: Tensor, key: Tensor) -> tuple[dict[str, Any], Tensor | None]:
        """The arguments of one call by the function's own names, and the queries (B, 1, T, 1) whose output becomes 0.

        The second is None if there are no such queries, or if the function itself gives them 0.
        SDPA takes no mask together with `is_causal`, so a function with such a mask gets biases and sinks in the mask.
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
        values["window_size"] = attention_window(_hiding(rule), *sizes[1:])
        if "mask" in names:
            is_added = self.has_sdpa_mask and has_numbers
            dense = rest if causal else mask.added(query.dtype) if is_added else mask.visible
            values["mask"] = mask.handed(dense if empty is None or dense is None else show_rows(dense, empty))
        if "bias" in names:
            hides = rule.hides and not causal and "mask" not in names
            values["bias"] = mask.handed(mask.added(query.dtype, hides=hides))
        return {name: values[keyword] for keyword, name in names.items() if keyword in values}, empty


class ByFunction:
    """Computes scope `attention` by a function; the harness does all other work outside of the function's call."""

    signature: Signature
    dropout: float

    def prepare(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Prepared:
        """Prepare the function's call with query (B, H, T, K), key (B, G, S, K) and value (B, G, S, V)."""
        signature, names = self.signature, self.signature.names
        passed, empty = signature.arguments(mask, query, key)
        passed |= {names["dropout"]: self.dropout} if "dropout" in names else {}
        if "num_kv_heads" not in names:
            key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        if mask.sinks is not None and signature.has_sdpa_mask and "sinks" not in names:
            passed[names["mask"]] = add_sink(passed[names["mask"]], mask.sinks, query, key.shape[2])
            key, value = (F.pad(each, (0, 0, 0, 1)) for each in (key, value))  # (B,G,S,K) -> (B,G,S+1,K), one of zeros
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
        """The function to call with prepared arguments; it goes through the declared `call` if there is one."""
        function, call = self.signature.function, self.signature.declared.call
        return function if call is None else lambda *tensors: call(function, *tensors, mask)

    def bind(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Bound:
        """The function's call with all outside work done; in a batch, one call for each distinct request."""
        if mask.cache is not None:
            return BoundGroups(groups_of(mask), self.bind, [query, key, value])
        if self.signature.omitted and not self.signature.declared.has_sdpa_mask:
            with torch.no_grad():
                self.attend(query, key, value, mask)  # shows whether it needs an explicit scale
        return Bound(self.caller(mask), partial(self.prepare, query, key, value, mask), [query, key, value])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
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
                signature.omitted.clear()  # pass numbers from now on
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
    """A function with the harness's own projections."""


def from_function(
    function: Callable[..., Tensor], spec: str, *, layout: str = TENSOR_LAYOUTS[0], declared: Declared | None = None
) -> Implementation:
    """Create the implementation of a function of query, key, value and some of KEYWORDS, or of a paged cache.

    `spec` is its name; `layout`, one of TENSOR_LAYOUTS, is the order of the axes of its tensors. If a `call` is
    declared, the function is called only through that, and its signature is not checked.

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
    """The members of KEYWORDS that a function takes, each with the function's own name; with **kwargs also `mask`.

    Raises:
        ValueError: the function has no signature, takes no three tensors by position, or needs an unknown argument.
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


def _signature(function: Any, spec: str) -> inspect.Signature:  # noqa: ANN401 - whatever somebody hands in
    """The signature of a function, module or partial, also of torch's own function; ValueError if it has none."""
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
    """Apply to `names` and `declared` the arguments that a partial binds.

    A bound is_causal=True declares the mask `causal`. If only the causal mask aligned at the end is declared, the
    function's `is_causal` means that one.
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
    """The part of a mask that hides keys; the mask `none` if no part does, and the whole mask if several do."""
    hiding = [part for part in rule.parts if part.hides]
    return rule if len(hiding) > 1 else next(iter(hiding), Mask())


def hides_by_bias(made: Implementation, workload: Workload) -> bool:
    """Whether the implementation is a function without mask and is_causal that gets hidden keys as -inf in its bias."""
    signature = getattr(made.build, "signature", None)
    if not isinstance(signature, Signature) or not workload.mask_rule.hides:
        return False
    return "bias" in signature.names and not {"mask", *CAUSAL} & set(signature.names)
