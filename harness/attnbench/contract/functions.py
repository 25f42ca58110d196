"""Plain functions of query, key and value as implementations: the parameter names decide what they are passed.

    def mine(query, key, value, *, mask=None, scale=None): ...

Query (B, H, T, K), key and value are passed by position, each of KEYWORDS by name, as the table in docs/adapters.md
says. ALIASES are other packages' names for them, including all names of `scaled_dot_product_attention`. Besides these,
`world_size` is the number of ranks that compute the call together (attnbench/ranks), and `bound_mask` the BoundMask
itself, for kernels that compile its rule. A function with `Declared.has_sdpa_mask` gets `mask` as
scaled_dot_product_attention does: boolean, or numbers to add; the harness then adds sinks to it. Shapes as in the
contract.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody imports it

from attnbench.contract import Attention, BoundMask, Implementation
from attnbench.contract.declared import END, Declared
from attnbench.contract.outside import Bound, Prepared, add_key, add_sink, as_numbers, repeat_heads, show_rows
from attnbench.plugins import ALIASES, KEYWORDS
from attnbench.workloads.masks import (
    UNLIMITED,
    Causal,
    CausalBottomRight,
    Mask,
    Padding,
    attention_window,
    not_a_window,
)
from attnbench.workloads.workload import Workload

TENSOR_LAYOUTS = ("bhtk", "bthk")
"""The order of a function's axes: batch, heads, tokens, width; or tokens before heads, as in flash-attention."""
HAS_PROJECTIONS = (
    "; a module with projections of its own, or a function of tokens x, needs adapt(lambda sizes: ..., packed(...)) "
    "(docs/adapters.md)"
)
CAUSAL: dict[str, type[Mask]] = {"is_causal": Causal, f"is_causal{END}": CausalBottomRight}
"""Keywords that stand for a causal mask, by its alignment."""


def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> Tensor:  # type: ignore[no-untyped-def] # noqa: ANN001, ARG001, PLR0913, PLR0917, FBT002
    """The signature of torch's own function, which is not written in Python."""
    raise AssertionError


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A function of query, key and value, and its names for some of KEYWORDS.

    `spec` is its name in messages. `omitted` are names that callers usually leave out: they are passed only if the
    scale is unusual or there is a window, and always once the function's own default has failed.
    """

    function: Callable[..., Tensor]
    spec: str
    names: dict[str, str]
    declared: Declared
    layout: str = TENSOR_LAYOUTS[0]
    omitted: set[str] = field(default_factory=set)

    @property
    def has_sdpa_mask(self) -> bool:
        """Whether its mask may be numbers to add, to which the harness adds sinks."""
        return self.declared.has_sdpa_mask and "mask" in self.names

    def reason_against(self, workload: Workload) -> str | None:
        """Return why the function cannot be passed a workload's operands, or None."""
        names, declared = self.names, self.declared
        if workload.dropout > 0 and "dropout" not in names:
            return "the function has no parameter dropout, the share of the weights to drop"
        is_open = declared.masks is not None or "bound_mask" in names
        reason = None if is_open else _reason_in_mask(self, workload)
        return reason or declared.reason_against(workload, {*names, "sinks"} if self.has_sdpa_mask else names)


def arguments(
    signature: Signature, mask: BoundMask, query: Tensor, num_groups: int
) -> tuple[dict[str, Any], Tensor | None]:
    """The arguments of one call by the function's own names, and the queries whose output becomes 0.

    SDPA takes no mask next to `is_causal`: a function with such a mask gets numbers and sinks only in the mask.
    """
    names, rule = signature.names, mask.rule
    has_numbers, is_square = any(part.is_additive for part in rule.changes), mask.sizes[1] == mask.sizes[2]
    causal = next((name for name, kind in CAUSAL.items() if name in names and _hides_as(rule, kind, is_square)), "")
    if signature.has_sdpa_mask and (has_numbers or mask.sinks is not None):
        causal = ""
    has_empty = signature.declared.has_no_empty_rows and not causal and mask.sinks is None  # every query sees a sink
    empty = mask.empty if has_empty else None
    values: dict[str, Any] = {keyword: keyword == causal for keyword in CAUSAL}
    values |= {"scale": mask.scale_for(query.shape[-1]), "sinks": mask.sinks}
    values |= {"world_size": mask.world_size, "bound_mask": mask}
    is_flag = names.get("num_kv_heads") == "enable_gqa"
    values["num_kv_heads"] = num_groups != query.shape[1] if is_flag else num_groups
    values["softcap"] = next((float(part.arguments[0]) for part in rule.changes if not part.is_additive), None)
    values["window_size"] = attention_window(_hiding(rule), *mask.sizes[1:])
    if "mask" in names:
        is_added = signature.has_sdpa_mask and has_numbers
        dense = None if causal else mask.added(query.dtype) if is_added else mask.visible
        values["mask"] = mask.handed(dense if empty is None or dense is None else show_rows(dense, empty))
    elif "key_padding_mask" in names:
        hidden = mask.hidden if _hides_as(rule, Padding) else None
        values["key_padding_mask"] = None if hidden is None else hidden[:, 0, 0]
    if "bias" in names:
        hides = rule.hides and not causal and "mask" not in names
        values["bias"] = mask.handed(mask.added(query.dtype, hides=hides))
    return {name: values[keyword] for keyword, name in names.items() if keyword in values}, empty


class ByFunction:
    """Scope `attention` by a function: the harness does the rest outside of the call."""

    signature: Signature
    dropout: float

    def prepare(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Prepared:
        """Prepare the function's call with query (B, H, T, K), key (B, G, S, K) and value (B, G, S, V)."""
        signature, names = self.signature, self.signature.names
        passed, empty = arguments(signature, mask, query, key.shape[1])
        passed |= {names["dropout"]: self.dropout} if "dropout" in names else {}
        if "num_kv_heads" not in names:
            key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        if mask.sinks is not None and signature.has_sdpa_mask and "sinks" not in names:
            passed[names["mask"]] = add_sink(as_numbers(passed[names["mask"]], query, key.shape[2]), mask.sinks)
            key, value = add_key(key), add_key(value)
        for name in signature.omitted:
            if passed[name] == (UNLIMITED, UNLIMITED) or (name == names.get("scale") and mask.scale is None):
                del passed[name]
        tensors: tuple[Tensor, ...] = (query, key, value)
        if signature.layout == "bthk":
            tensors = tuple(tensor.transpose(1, 2).contiguous() for tensor in tensors)  # (B,H,T,K) -> (B,T,H,K)
        return Prepared(tensors=tensors, passed=passed, empty=empty, is_tokens_first=signature.layout == "bthk")

    def caller(self, mask: BoundMask) -> Callable[..., Tensor]:
        """The function, to be called with prepared arguments; by the adapter's `call` if it has one."""
        function, call = self.signature.function, self.signature.declared.call
        return function if call is None else lambda *tensors: call(function, *tensors, mask)

    def bind(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Bound:
        """The function's call, with all outside work already done."""
        signature = self.signature
        if signature.omitted and not signature.declared.has_sdpa_mask:
            with torch.no_grad():
                self.attend(query, key, value, mask)  # shows whether it needs an explicit scale
        return Bound(self.caller(mask), partial(self.prepare, mask=mask), [query, key, value])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        signature = self.signature
        prepared = self.prepare(query, key, value, mask)
        try:
            output: object = self.caller(mask)(*prepared.tensors, **prepared.passed)
        except (AttributeError, TypeError) as error:
            if signature.omitted and "NoneType" in str(error):
                signature.omitted.clear()  # pass numbers from now on
                return self.attend(query, key, value, mask)
            absent = [name for name, tensor in prepared.passed.items() if tensor is None]
            if not absent or "NoneType" not in str(error):
                raise
            raise ValueError(f"{signature.spec} is passed {', '.join(absent)} = None here ({words(error)})") from error
        batch, heads, tokens, width = (*query.shape[:3], value.shape[3])
        expected = (batch, tokens, heads, width) if prepared.is_tokens_first else (batch, heads, tokens, width)
        if not isinstance(output, Tensor) or output.shape != expected:
            raise ValueError(f"{signature.spec} returned {_unfit(output, expected, prepared.is_tokens_first)}")
        return prepared.finish(output)


class FunctionAttention(ByFunction, Attention):
    """A function with the harness's own projections."""


def from_class(kind: type, spec: str, method: str = "attend") -> Implementation:
    """The implementation from a class with one method, which is a function of query, key and value.

    Raises:
        ValueError: the class needs arguments, or the method is not such a function.
    """
    required = _required(list(inspect.signature(kind).parameters.values()))
    if required:
        raise ValueError(
            f"{spec} needs {', '.join(required)} to be made, and a class with {method} is made without arguments, as "
            f"{kind.__name__}(): give defaults, or hand in an IMPLEMENTATION (docs/adapters.md)"
        )
    instance: Any = kind()
    function = instance if method == "forward" else getattr(instance, method)
    return from_function(function, f"{spec}.{method}" if spec else method, declared=Declared(source=spec))


def from_function(
    function: Callable[..., Tensor], spec: str, *, layout: str = TENSOR_LAYOUTS[0], declared: Declared | None = None
) -> Implementation:
    """The implementation from a function of query, key, value and some of KEYWORDS; `spec` is its name.

    If a `call` is declared, the function is called only through that, and its signature is not read.

    Raises:
        ValueError: it cannot be called like that.
    """
    declared = declared or Declared()
    names = {} if declared.call else keywords(function, spec)
    names, declared = _with_bound(function, names, declared)
    parameters = _signature(function, spec).parameters if {"scale", "window_size"} & set(names) else {}
    scale, window = names.get("scale"), names.get("window_size")
    omitted = {scale} if scale and parameters[scale].default is None else set()
    omitted |= {window} if window and parameters[window].default is not inspect.Parameter.empty else set()
    taken = Signature(
        function=function,
        spec=spec,
        names=names,
        declared=declared,
        layout=layout,
        omitted=omitted,
    )
    built_in = declared.built_in
    return Implementation(
        build=type("FunctionAttention", (FunctionAttention,), {"signature": taken}),
        source=f"{declared.source or spec}, given {', '.join(('query', 'key', 'value', *names.values()))}",
        unsupported=taken.reason_against,
        has_dropout="dropout" in names,
        distributes="world_size" in names,
        built_in=lambda: built_in,
        copies="query, key and value as (B, T, H, K)" if layout == "bthk" else "",
        is_approximate=declared.approximate,
    )


def _unfit(output: object, expected: tuple[int, ...], is_tokens_first: bool) -> str:  # noqa: FBT001 - a private helper
    """A message about an output that is not a tensor of the expected shape."""
    wanted = f"it must return one tensor ({'B, T, H, V' if is_tokens_first else 'B, H, T, V'}), here {expected}"
    if not isinstance(output, Tensor):
        several = "; of several, return the output alone" if isinstance(output, tuple | list) else ""
        return f"a {type(output).__name__}: {wanted}{several}"
    batch, heads, tokens, width = expected
    hints = {
        (batch, tokens, heads, width): ' (heads and tokens have changed places: adapt(..., layout="bthk"))',
        (batch, tokens, heads * width): " (heads are merged, and must stay apart)",
    }
    hint = "" if is_tokens_first else hints.get(tuple(output.shape), "")
    return f"{tuple(output.shape)}: {wanted}{hint}"


def takes_heads(parameters: Collection[str]) -> bool:
    """Whether the first three parameters are called query, key and value, or begin with these letters."""
    return [name[:1].lower() for name in list(parameters)[:3]] == ["q", "k", "v"]


def keywords(function: object, spec: str) -> dict[str, str]:
    """The members of KEYWORDS that a function takes, each with the function's own name for it; `mask` if it takes any.

    Raises:
        ValueError: the function has no signature, takes no three tensors by position, or needs an unknown argument.
    """
    signature = _signature(function, spec)
    parameters = list(signature.parameters.values())
    positional = [each for each in parameters if each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}]
    takes_any_number = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    first, rest = positional[:3], positional[3:]
    if not takes_any_number and (len(first) < 3 or {*KEYWORDS, *ALIASES} & {each.name for each in first}):  # noqa: PLR2004
        raise ValueError(
            f"{spec} takes {signature}: the first three parameters must be query, key and value, which are passed by "
            f"position{HAS_PROJECTIONS}"
        )
    by_name = [each for each in rest if each.kind is each.POSITIONAL_OR_KEYWORD]
    by_name += [each for each in parameters if each.kind is each.KEYWORD_ONLY]
    others = [each for each in rest if each.kind is each.POSITIONAL_ONLY]
    if unknown := _required([*others, *(each for each in by_name if each.name not in {*KEYWORDS, *ALIASES})]):
        raise ValueError(
            f"{spec} needs {' and '.join(unknown)}: after query, key and value, it can be passed {', '.join(KEYWORDS)} "
            f"by name, or {', '.join(ALIASES)}; give everything else a default, as in "
            f"functools.partial({getattr(function, '__name__', spec)}, {unknown[0]}=...)"
        )
    names: dict[str, str] = {}
    for each in by_name:
        if (keyword := ALIASES.get(each.name, each.name)) in KEYWORDS and each.name not in _bound(function):
            names.setdefault(keyword, each.name)
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        names.setdefault("mask", "mask")
    return {keyword: names[keyword] for keyword in KEYWORDS if keyword in names}


def _signature(function: Any, spec: str) -> inspect.Signature:  # noqa: ANN401 - whatever somebody hands in
    """The signature of a function, module or partial; also of torch's own function."""
    if isinstance(function, partial) and function.func is F.scaled_dot_product_attention:
        return inspect.signature(partial(_sdpa, *function.args, **function.keywords))
    if function is F.scaled_dot_product_attention:
        return inspect.signature(_sdpa)
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        raise ValueError(
            f"{spec} does not say what it takes, since it is not written in Python: "
            "wrap it, as in def mine(query, key, value, *, mask=None)"
        ) from None


def _with_bound(function: object, names: dict[str, str], declared: Declared) -> tuple[dict[str, str], Declared]:
    """Add to names and declarations what a partial's arguments and the alignment of `masks` imply."""
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


def words(error: BaseException) -> str:
    """An exception on one line, for use in another message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _required(parameters: Collection[inspect.Parameter]) -> list[str]:
    """Names of parameters without a default."""
    return [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}
    ]


def _reason_in_mask(signature: Signature, workload: Workload) -> str | None:
    """Return why a function with this signature cannot be passed the mask, or None."""
    rule, names, only = workload.mask_rule, signature.names, ""
    takes_numbers = "bias" in names or signature.has_sdpa_mask
    if not rule.is_additive and "softcap" not in names:
        return f"the function has no parameter softcap, and mask {rule} changes scores by more than a bias"
    if any(not part.is_additive for part in rule.changes[1:]):
        return f"mask {rule} adds to scores before its softcap, and the function after it"
    if any(part.is_additive for part in rule.changes) and not takes_numbers:
        return f"the function has no parameter bias, and mask {rule} changes scores"
    if not rule.hides or signature.declared.call is not None or {"mask", "bias"} & set(names):
        return None
    if "window_size" in names:
        return not_a_window(_hiding(rule), workload.seq_len, workload.kv_len)
    kinds: dict[str, type[Mask]] = {**CAUSAL, "key_padding_mask": Padding}
    for keyword, kind in kinds.items():
        if keyword in names:
            if _hides_as(rule, kind, workload.seq_len == workload.kv_len):
                return None
            only = f"{keyword} passes on the {kind.name} mask alone"
    return f"the function has no parameter mask: {only or 'it takes part in unmasked workloads only'}"


def _hiding(rule: Mask) -> Mask:
    """The part that hides keys if there is only one, or the whole mask."""
    hiding = [part for part in rule.parts if part.hides]
    return hiding[0] if len(hiding) == 1 else rule


def hides_by_bias(made: Implementation, workload: Workload) -> bool:
    """Whether a function without a mask is passed -inf in its bias to hide keys."""
    signature = getattr(made.build, "signature", None)
    if not isinstance(signature, Signature) or not workload.mask_rule.hides:
        return False
    return "bias" in signature.names and not {"mask", "is_causal", f"is_causal{END}"} & set(signature.names)


def _hides_as(rule: Mask, kind: type[Mask], is_square: bool = False) -> bool:  # noqa: FBT001, FBT002 - a private helper
    """Whether a mask hides the same keys as one of that kind; if T = S, both causal alignments do."""
    kinds = tuple(CAUSAL.values()) if is_square and kind in CAUSAL.values() else (kind,)
    return isinstance(_hiding(rule), kinds)
