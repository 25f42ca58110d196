"""Load an Implementation by name: from the folder implementations/, a file or a plugin; compiled on request.

A file in the folder defines a function `attention`, or an IMPLEMENTATION. With a function, it may also define
`unsupported(workload)`, which returns why the function cannot run a workload, or None. For scope `module`, it may
define the class MODULE and the LAYOUT of its weights: the forward of MODULE takes x (B, T, D), mask and scale, and its
attribute `dropout` is the probability of dropping a weight. Without MODULE, the harness projects with linear layers.
catalogue.toml, in the same folder, has facts about each implementation, and its looks in figures.

`fused+compile` is `fused` compiled by torch.compile, as one graph at fixed sizes. Inductor may replace the code by
another kernel: `fused` without a mask becomes SDPA's flash kernel. The list of operators that ran shows this.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from attnbench import plugins
from attnbench.contract import Attention, BoundMask, Implementation, NotOneGraphError, Weights, compile_whole, device
from attnbench.contract.adapters import Adapted, ModuleAdapter
from attnbench.contract.declared import Declared, kind
from attnbench.contract.functions import ByFunction, FunctionAttention, from_function
from attnbench.workloads.counts import dense_flops
from attnbench.workloads.workload import Workload


def implementation(spec: str) -> Implementation:
    """Load the implementation `name` or `path/to/file.py:Name`; a `+compile` at the end compiles it.

    Raises:
        ValueError: the value is not an implementation, function, module or class that can be measured.
        Exception: any error that importing a user's module raises.
    """
    base, option = plugins.variant(spec)
    path, attribute = plugins.split(base)
    if path is None and not plugins.is_foreign(base):
        plain = named(attribute)
    else:
        value = plugins.load(base)
        plain = from_value(value, base)
        if path is not None and path.parent.name == plugins.IMPLEMENTATIONS and attribute == "attention":
            plain = from_module(sys.modules[value.__module__], path.stem)
    return compiled(plain) if option else plain  # plugins.py allows no other option


def from_value(value: object, spec: str) -> Implementation:
    """Create the implementation of `value`, named `spec` in messages; a class is instantiated without arguments.

    Raises:
        ValueError: the value is not an implementation, function, module or class that can be measured.
    """
    if isinstance(value, Implementation):
        return value if value.source else replace(value, source=spec)
    if isinstance(value, type) and issubclass(value, Attention):
        return Implementation(build=value, source=spec)
    function = value() if isinstance(value, type) and _is_function(value) else value
    if hasattr(function, "attend"):
        return from_function(function.attend, f"{spec}.attend")
    is_module = isinstance(function, nn.Module) and next(function.parameters(), None) is not None
    if callable(function) and not isinstance(function, type) and not is_module:
        return from_function(function, spec)
    raise ValueError(
        f"{spec} is {kind(value)}: give a function f(query, key, value, *, mask=None), a class with attend(query, key, "
        "value, mask), or a module with its own layout of weights as a value: adapt(lambda sizes: MyAttention(...), "
        "packed(...)), with split, packed or stacked from attnbench.contract.adapters (docs/adapters.md)"
    )


def _is_function(value: type) -> bool:
    """Return whether a class's instances serve as functions: they have `attend`, or forward(query, key, value, ...)."""
    heads = inspect.signature(value.forward).parameters if issubclass(value, nn.Module) else ()
    return hasattr(value, "attend") or [name[:1].lower() for name in heads][1:4] == ["q", "k", "v"]


@cache
def named(name: str) -> Implementation:
    """Load the implementation in implementations/NAME.py."""
    return from_module(importlib.import_module(f"{plugins.PACKAGE}.{name}"), name)


def from_module(module: ModuleType, name: str) -> Implementation:
    """Create the implementation that a Python module of the folder defines; `name` is its row in the catalogue."""
    row, holds = plugins.catalogue()["facts"].get(name, {}), vars(module)
    is_dense = row.get("flops") == "dense"  # not with sinks, which may be an extra key
    if "IMPLEMENTATION" in holds:
        value: Implementation = module.IMPLEMENTATION
        return value
    declared = Declared(
        unsupported=holds.get("unsupported", lambda _: None),
        has_sdpa_mask=True,
        has_no_empty_rows=row.get("rows") == "outside",
    )
    function = replace(
        from_function(module.attention, name, declared=declared),
        source=row.get("source", name),
        executed_flops=lambda workload: dense_flops(workload) if is_dense and workload.sinks == "none" else None,
        backend=row.get("backend", ""),
        compiles=row.get("compiles", False),
        copies=row.get("copies", ""),
    )
    return with_module(function, module, declared) if "MODULE" in holds else function


class BothScopes(ByFunction, Adapted):
    """A module that computes scope `module` with a file's MODULE, and scope `attention` with the file's function."""


def with_module(function: Implementation, module: ModuleType, declared: Declared) -> Implementation:
    """Return `function` with a second scope: in scope `module`, with projections, the class MODULE of its file runs.

    `module` is the imported file. MODULE needs equal numbers of heads and equal widths of query, key and value, and an
    output projection as wide as the input. For other sizes the harness's projections surround the function, as they do
    for a file without MODULE.
    """

    def call(module: Any, x: Tensor, context: Tensor, mask: BoundMask) -> Any:  # noqa: ANN401, ARG001
        return module(x, mask=mask.added(x.dtype) if mask.rule.changes_scores else mask.visible, scale=mask.scale)

    def unsupported(workload: Workload) -> str | None:
        """Return why the module cannot run a workload; None if it can."""
        sizes = (workload.batch_size, workload.seq_len, workload.kv_len)
        if declared.has_no_empty_rows and workload.mask_rule.has_empty_rows(*sizes):
            return "its module gives NaN to a query that sees no key"
        return None if workload.mask_rule.is_additive else "its module takes no softcap"

    core: type[FunctionAttention] = function.build  # type: ignore[assignment] # as from_function makes it
    drop = lambda module, share: setattr(module, "dropout", share)  # noqa: E731
    facts = Declared(call=call, changes_scores=True, dropout=drop, unsupported=unsupported)
    whole = ModuleAdapter(make=module.MODULE, layout=module.LAYOUT, declared=facts, takes=("scale",))
    both = type("BothScopes", (BothScopes,), {"signature": core.signature})

    def build(weights: Weights) -> nn.Module:
        """Build the file's module, or only the function if the module cannot have these sizes."""
        has_equal_heads = weights.query.shape[:2] == weights.key.shape[:2] == weights.value.shape[:2]
        is_as_wide = weights.out is not None and len(weights.out) == weights.query.shape[2]  # output and input width
        return whole.build(weights, both) if has_equal_heads and is_as_wide else core(weights)

    def either(workload: Workload) -> str | None:
        return (function if workload.scope == "attention" else whole).unsupported(workload)

    return replace(function, build=build, unsupported=either)


def compiled(plain: Implementation) -> Implementation:
    """Return the implementation with its function and its module compiled."""

    def build(weights: Weights) -> nn.Module:
        module = plain.build(weights)
        is_copied = isinstance(module, Adapted) and module.adapter.declared.has_cache
        if not isinstance(module, ByFunction | Adapted) or is_copied:
            raise NotOneGraphError("only a function, or an adapted module without a cache, can be compiled")
        if isinstance(module, ByFunction):
            module.signature = replace(module.signature, function=_compiled(module.signature.function))
        if isinstance(module, Adapted):
            module.module.forward = _compiled(module.module.forward)
        return module

    def unsupported(workload: Workload) -> str | None:
        if plain.compiles:
            return "it compiles itself already: name it without +compile"
        return plain.unsupported(workload) or device(workload.device).missing_compiler()

    return replace(
        plain,
        build=build,
        unsupported=unsupported,
        compiles=True,
        executed_flops=lambda _: None,  # unknown after compilation
        has_dropout=False,  # compiled code may keep the probability with which it was compiled
    )


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled; the result's first call runs `function` once eagerly before the compiled code."""
    run, calls = compile_whole(function), list[object]()

    def call(*by_position: Any, **by_name: Any) -> Any:  # noqa: ANN401 - functions and modules differ
        if not calls:  # shows the function's own errors, and keeps the creation of memoized tensors out of the graph
            with torch.no_grad():
                function(*by_position, **by_name)
            calls.append(None)
        try:
            return run(*by_position, **by_name)
        except torch._dynamo.exc.Unsupported as error:  # noqa: SLF001 - it has no public name
            first = (str(error).strip().splitlines() or ["no reason given"])[0]
            raise NotOneGraphError(f"torch.compile cannot take it as one graph: {first}") from error

    return call
