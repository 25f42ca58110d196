"""Load an Implementation by name: from a module class, a plain function or a plugin's value, compiled on request.

`fused+compile` is `fused` compiled by torch.compile, as one graph and at fixed sizes. Inductor may turn it into another
kernel, as the operators that ran show: the plain form without a mask becomes SDPA's flash kernel.
"""

import copy
import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from attnbench import plugins
from attnbench.contract import (
    Attention,
    BoundMask,
    Implementation,
    NotOneGraphError,
    Weights,
    bundled,
    compile_whole,
    missing_compiler,
)
from attnbench.contract.functions import from_class, from_function, takes_heads
from attnbench.workloads.workload import Workload

ADAPTED = (
    "a module with its own layout of weights, as a value: adapt(lambda sizes: MyAttention(...), packed(...)), with "
    "split, packed, stacked, per_head or head_list from attnbench.contract.adapters (docs/adapters.md)"
)


def implementation(spec: str) -> Implementation:
    """The implementation that `name` or `path/to/file.py:Name` names, compiled for `name+compile`.

    Raises:
        ValueError: the value has no form that can take part.
        Exception: any error of importing a user's module.
    """
    base, option = plugins.variant(spec)
    path, attribute = plugins.split(base)
    if path is None and not plugins.is_foreign(base):
        plain = bundled.named(attribute)
    else:
        value = plugins.load(base)
        plain = from_value(value, base)
        if path is not None and path.parent.name == plugins.IMPLEMENTATIONS and attribute == "attention":
            plain = bundled.from_module(sys.modules[value.__module__], path.stem)
    return compiled(plain) if option else plain  # plugins.py allows no other option


def from_value(value: object, spec: str) -> Implementation:
    """Create the implementation from a value; `spec` is its name.

    A class takes part as a subclass of Attention, or simply by having `attend`.

    Raises:
        ValueError: the value has no form that can take part.
    """
    if isinstance(value, Implementation):
        return value if value.source else dataclasses.replace(value, source=spec)
    if isinstance(value, type):
        if issubclass(value, Attention):
            return Implementation(build=value, source=spec)
        if hasattr(value, "attend"):
            return from_class(value, spec)
        if issubclass(value, nn.Module) and takes_heads([*inspect.signature(value.forward).parameters][1:]):
            return from_class(value, spec, "forward")
        raise ValueError(
            f"{spec} is a class without attend(query, key, value, mask): it needs one, or hand in {ADAPTED}"
        )
    if isinstance(value, nn.Module) and next(value.parameters(), None) is not None:
        raise ValueError(f"{spec} is a module with weights of its own: hand in {ADAPTED}")
    if callable(value):
        return from_function(value, spec)
    forms = "a class with attend, a function f(query, key, value, *, mask=None), an IMPLEMENTATION"
    raise ValueError(f"{spec} is a {type(value).__name__}; it can be {forms}, or {ADAPTED}")


def compiled(plain: Implementation) -> Implementation:
    """The implementation with its `attend` and its `forward` compiled."""

    def build(weights: Weights) -> nn.Module:
        module = plain.build(weights)
        eager = copy.copy(module).eval()  # the same parameters; its forward calls the uncompiled attend
        for name in ("attend", "forward"):
            if hasattr(eager, name):
                setattr(module, name, _compiled(getattr(eager, name)))
        return module

    def unsupported(workload: Workload) -> str | None:
        if plain.compiles:
            return "it compiles itself already: name it without +compile"
        return plain.unsupported(workload) or missing_compiler(workload.device)

    return dataclasses.replace(
        plain,
        build=build,
        unsupported=unsupported,
        compiles=True,
        executed_flops=lambda _: None,  # unknown after compilation
        has_dropout=False,  # compiled code keeps the attribute's value from when it was built
    )


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` compiled, to be called with a keyword or a last argument `mask`."""
    run = compile_whole(function)
    ready: WeakSet[BoundMask] = WeakSet()

    def call(*by_position: Any, **by_name: Any) -> Tensor:  # noqa: ANN401 - attend and forward differ
        mask: BoundMask = by_name["mask"] if "mask" in by_name else by_position[-1]
        if mask not in ready:  # tensors created at first use must not be captured in the graph
            if mask.rule.hides or mask.changes_scores:
                with torch.no_grad():
                    function(*by_position, **by_name)
            else:
                assert mask.visible is mask.hidden is mask.empty is None  # each is now kept, and took no memory
            ready.add(mask)
        try:
            output: Tensor = run(*by_position, **by_name)
        except torch._dynamo.exc.Unsupported as error:  # noqa: SLF001 - it has no public name
            first = (str(error).strip().splitlines() or ["no reason given"])[0]
            raise NotOneGraphError(f"torch.compile cannot take it as one graph: {first}") from error
        return output

    return call
