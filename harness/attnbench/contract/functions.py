"""A plain function as an implementation: what it is given follows from the names of its parameters.

    def mine(query, key, value, *, mask=None, scale=None): ...

It is always given query (B, H, T, K), key and value by position. Whatever else it names it is given by name (KEYWORDS):

- `mask`: boolean, True where a key is visible, broadcastable to (B, H, T, S); or None.
- `is_causal`: whether the mask is the causal one, aligned at the start; then `mask` is None.
- `bias`: numbers to add to the scores, broadcastable to (B, H, T, S), as ALiBi has them; or None. A function without
  `mask` finds -inf there where a key is hidden. A learned bias has a gradient.
- `scale`: what the products of query and key are multiplied by, 1 / sqrt(K) or as the workload says.
- `sinks`: for each head (H,) the score of one more key, whose value is 0; or None.
- `num_kv_heads`: G. Key (B, G, S, K) and value (B, G, S, V) are then as they are; otherwise each key/value head is
  repeated for the query heads that read it, (B, H, S, K) and (B, H, S, V).
- `dropout`: the share of the weights to drop.

Shapes as in the contract.
"""

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.contract import Attention, BoundMask, Implementation, repeat_heads
from attnbench.plugins import KEYWORDS, given_words
from attnbench.workloads.masks import Causal, Mask
from attnbench.workloads.workload import FEATURES, Workload

BY_POSITION = ("query", "key", "value")
MEANT = {
    "attn_mask": "mask",
    "attention_mask": "mask",
    "causal": "is_causal",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "scaling": "scale",
    "s_aux": "sinks",
    "sink": "sinks",
    "learnable_sink": "sinks",
    "attn_bias": "bias",
    "alibi": "bias",
    "dropout_p": "dropout",
    "enable_gqa": "num_kv_heads",
    "num_groups": "num_kv_heads",
}
"""What other packages call the same."""
HAS_PROJECTIONS = "; a module with its own projections needs adapt(lambda sizes: ..., packed(...)) (docs/adapters.md)"


def from_class(kind: type, spec: str) -> Implementation:
    """The implementation that a class makes by its `attend` alone, which is a function of query, key and value.

    Raises:
        ValueError: it cannot be made without arguments, or `attend` is no such function.
    """
    required = _required(list(inspect.signature(kind).parameters.values()))
    if required:
        raise ValueError(
            f"{spec} needs {', '.join(required)} to be made, and a class with attend is made without arguments, as "
            f"{kind.__name__}(): give defaults, or hand in an IMPLEMENTATION (docs/adapters.md)"
        )
    made: Any = kind()
    return from_function(made.attend, f"{spec}.attend" if spec else "attend", source=spec)


def from_function(function: Callable[..., Tensor], spec: str, *, source: str = "") -> Implementation:
    """The implementation that a function of query, key, value and some of KEYWORDS makes; `spec` is its name.

    Raises:
        ValueError: it cannot be called like that.
    """
    named = keywords(function, spec)

    class FunctionAttention(Attention):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
            key, value = mask.cached(key, value, query.dtype)
            given = _of_mask(named, mask, query.dtype, spec)
            if "num_kv_heads" in named:
                given["num_kv_heads"] = key.shape[1]
            else:
                key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
            if "scale" in named:
                given["scale"] = mask.scale_for(query.shape[-1])
            if "sinks" in named:
                given["sinks"] = mask.sinks
            if "dropout" in named:
                given["dropout"] = self.dropout
            try:
                output: object = function(query, key, value, **given)
            except (AttributeError, TypeError) as error:
                absent = [name for name, tensor in given.items() if tensor is None]
                if not absent or "NoneType" not in str(error):
                    raise
                raise ValueError(f"{spec} is given {', '.join(absent)} = None here ({words(error)})") from error
            expected = (*query.shape[:3], value.shape[3])
            if not isinstance(output, Tensor) or output.shape != expected:
                raise ValueError(_unfit(spec, output, expected))
            return output

    def unsupported(workload: Workload) -> str | None:
        otherwise = _asked_in_other_words(function)
        if workload.dropout > 0 and "dropout" not in named:
            return f"{_lacks('dropout', otherwise)}, the share of the weights to drop"
        for feature, name in (("scale", "scale"), ("sinks", "sinks")):
            if feature in workload.features and name not in named:
                return f"{_lacks(name, otherwise)}, and the workload has {FEATURES[feature].partition(' (')[0]}"
        return _reason_in_mask(named, workload.mask_rule, otherwise)

    return Implementation(
        build=FunctionAttention,
        source=f"{source or spec}, given {given_words(named)}",
        unsupported=unsupported,
        has_dropout="dropout" in named,
        features=tuple(FEATURES),
    )


def _unfit(spec: str, output: object, expected: tuple[int, ...]) -> str:
    """The message for an output that is no tensor of the expected shape (B, H, T, V)."""
    wanted = f"it must return one tensor (B, H, T, V), here {expected}"
    if not isinstance(output, Tensor):
        several = "; of several, return the output alone" if isinstance(output, tuple | list) else ""
        return f"{spec} returned a {type(output).__name__}: {wanted}{several}"
    batch, heads, tokens, width = expected
    known = {
        (batch, tokens, heads, width): "heads and tokens have changed places, so transpose(1, 2)",
        (batch, tokens, heads * width): "heads are merged, and must stay apart",
    }
    hint = known.get(tuple(output.shape))
    return f"{spec} returned {tuple(output.shape)}: {wanted}{f' ({hint})' if hint else ''}"


def keywords(function: object, spec: str) -> tuple[str, ...]:
    """Those of KEYWORDS that a function takes; `mask`, if it takes any.

    Raises:
        ValueError: the function has no signature, takes no three tensors by position, or needs more than there is.
    """
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(
            f"{spec} does not say what it takes, since it is not written in Python: "
            "wrap it, as in def mine(query, key, value, *, mask=None)"
        ) from None
    parameters = list(signature.parameters.values())
    positional = [each for each in parameters if each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}]
    takes_any_number = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    first, rest = positional[: len(BY_POSITION)], positional[len(BY_POSITION) :]
    if not takes_any_number and (len(first) < len(BY_POSITION) or set(KEYWORDS) & {each.name for each in first}):
        raise ValueError(
            f"{spec} takes {signature}: the first three parameters must be query, key and "
            f"value, which are given by position{HAS_PROJECTIONS if isinstance(function, nn.Module) else ''}"
        )
    by_name = [each for each in rest if each.kind is each.POSITIONAL_OR_KEYWORD]
    by_name += [each for each in parameters if each.kind is each.KEYWORD_ONLY]
    others = [each for each in rest if each.kind is each.POSITIONAL_ONLY]
    if unknown := _required([*others, *(each for each in by_name if each.name not in KEYWORDS)]):
        wanted = " and ".join(f"{name} (did you mean {MEANT[name]}?)" if name in MEANT else name for name in unknown)
        raise ValueError(
            f"{spec} needs {wanted}: after query, key and value, it can be given {', '.join(KEYWORDS)} by name; "
            "give everything else a default"
        )
    names = {each.name for each in by_name}
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        names.add("mask")
    return tuple(name for name in KEYWORDS if name in names)


def words(error: Exception) -> str:
    """An exception on one line, for the message of another."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def _required(parameters: Collection[inspect.Parameter]) -> list[str]:
    """The names of the parameters without a default."""
    return [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}
    ]


def _asked_in_other_words(function: Callable[..., Any]) -> dict[str, str]:
    """Parameters that other packages call so, by what they are called here."""
    return {MEANT[name]: name for name in inspect.signature(function).parameters if name in MEANT}


def _lacks(name: str, otherwise: dict[str, str]) -> str:
    """That a function has no such parameter, and which of its own has to be called so."""
    hint = f" (its {otherwise[name]} has to be called {name})" if name in otherwise else ""
    return f"the function has no parameter {name}{hint}"


def _reason_in_mask(named: Collection[str], rule: Mask, otherwise: dict[str, str]) -> str | None:
    """Why a function that is given these cannot be given the mask, or None."""
    if not rule.is_additive:
        return f"mask {rule} changes scores by more than a bias: hand in a subclass of Attention"
    if rule.changes_scores and "bias" not in named:
        return f"{_lacks('bias', otherwise)}, and mask {rule} changes scores"
    if rule.hides and not {"mask", "bias"} & set(named):
        if "is_causal" not in named:
            return f"{_lacks('mask', otherwise)}: it takes part in unmasked workloads only"
        if not _hides_the_future(rule):
            return f"{_lacks('mask', otherwise)}: is_causal passes on the causal mask alone"
    return None


def _of_mask(named: Collection[str], mask: BoundMask, dtype: torch.dtype, spec: str) -> dict[str, Any]:
    """The arguments `mask`, `is_causal` and `bias` of one call, as far as the function `spec` takes them."""
    given: dict[str, Any] = {}
    if "is_causal" in named:
        given["is_causal"] = _hides_the_future(mask.rule)
    is_told = given.get("is_causal", False)
    if "mask" in named:
        given["mask"] = None if is_told else mask.visible
    if "bias" in named:
        hides_by_bias = mask.rule.hides and not is_told and "mask" not in named
        if hides_by_bias or not mask.rule.hides:
            given["bias"] = mask.bias(dtype)
        else:
            given["bias"] = _changes(mask, dtype, spec) if mask.changes_scores else None
    return given


def _hides_the_future(rule: Mask) -> bool:
    """Whether what the mask hides is what the causal mask, aligned at the start, hides."""
    hiding = [part for part in rule.parts if part.hides]
    return len(hiding) == 1 and isinstance(hiding[0], Causal)


def _changes(mask: BoundMask, dtype: torch.dtype, spec: str) -> Tensor:
    """What the mask adds to scores, without what it hides: broadcastable to (B, H, T, S), made at the first use.

    Each function has its own: one that writes into it misleads no other. A learned bias is looked up each time.
    """
    zero = torch.zeros((1, 1, 1, 1), dtype=dtype, device=mask.device)
    if mask.rule.is_learned:
        return mask.adjust(zero)
    return mask.keep((spec, "changes of scores alone", dtype), lambda: mask.adjust(zero))
