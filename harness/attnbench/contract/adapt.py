"""What people hand in, made into an Implementation: a plug's value, a module class, or a plain function."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from attnbench import plugins
from attnbench.contract import Attention, BoundMask, Implementation, Weights, repeat_heads
from attnbench.contract.variants import VARIANTS
from attnbench.workloads.workload import Workload

ADAPTED = (
    "a module with its own layout of weights, as a value: adapt(lambda sizes: MyAttention(...), packed(...)), with "
    "split, packed, stacked, per_head or head_list from attnbench.contract.adapters (docs/adapters.md)"
)


def implementation(spec: str) -> Implementation:
    """The implementation that `name`, `path/to/file.py:Name`, or either with an option as in `name+compile`, names.

    Raises:
        ValueError: the value is none of the forms that can take part.
        Exception: whatever importing somebody's module raises.
    """
    base, option = plugins.variant(spec)
    found = from_value(plugins.load(base), base)
    return VARIANTS[option](found) if option else found


def from_value(value: object, spec: str) -> Implementation:
    """The implementation that a value makes; `spec` is its name.

    Raises:
        ValueError: the value is none of the forms that can take part.
    """
    if isinstance(value, Implementation):
        return value if value.source else dataclasses.replace(value, source=spec)
    if isinstance(value, type):
        return _from_class(value, spec)
    if callable(value):
        return _from_function(value, spec)
    raise ValueError(
        f"{spec} is a {type(value).__name__}; it can be a class with attend or from_weights, "
        f"a function f(query, key, value, *, mask=None), an IMPLEMENTATION, or {ADAPTED}"
    )


def _from_class(given: type, spec: str) -> Implementation:
    """A class takes part as a subclass of Attention, through `from_weights(weights)`, or by its `attend` alone."""
    if issubclass(given, Attention):
        return Implementation(build=given, source=spec)
    if issubclass(given, nn.Module) and hasattr(given, "from_weights"):
        build: Callable[[Weights], nn.Module] = given.from_weights
        return Implementation(build=build, source=spec, unsupported=_module_scope_only(given))
    if hasattr(given, "attend"):
        bare: Any = given()
        return _from_function(bare.attend, spec)
    raise ValueError(
        f"{spec} is a class without attend(query, key, value, mask) and without a classmethod from_weights(weights): "
        f"it needs one of them, or hand in {ADAPTED}"
    )


def _module_scope_only(given: type) -> Callable[[Workload], str | None]:
    def unsupported(workload: Workload) -> str | None:
        if workload.scope == "attention" and not hasattr(given, "attend"):
            return f"{given.__name__} has no attend: it takes part in scope module only"
        return None

    return unsupported


def _from_function(function: Callable[..., Tensor], spec: str) -> Implementation:
    """A function of query, key, value and, where it has these parameters, a boolean mask and the share to drop.

    It sees H heads of each.
    """
    parameters = inspect.signature(function).parameters
    takes_mask = "mask" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    takes_dropout = "dropout" in parameters

    class FunctionAttention(Attention):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
            keywords: dict[str, Any] = {"mask": mask.visible} if takes_mask else {}
            if takes_dropout:
                keywords["dropout"] = self.dropout
            heads = query.shape[1]
            return function(query, repeat_heads(key, heads), repeat_heads(value, heads), **keywords)

    def unsupported(workload: Workload) -> str | None:
        if workload.mask != "none" and not takes_mask:
            return "the function has no parameter mask: it takes part in unmasked workloads only"
        if workload.mask_rule.changes_scores:
            return f"it is given a boolean mask, and {workload.mask} changes scores: hand in a subclass of Attention"
        return None

    return Implementation(build=FunctionAttention, source=spec, unsupported=unsupported, has_dropout=takes_dropout)
