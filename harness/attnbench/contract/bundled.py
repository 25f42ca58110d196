"""Implementations in the folder implementations/: a function `attention` in a file, or an IMPLEMENTATION.

A file may also hold `unsupported(workload)`, which gives the reason why the function cannot run a workload, and
`MODULE, LAYOUT = a class, the place of its weights` for scope `module`. The class's forward takes x (B, T, D), mask and
scale; its attribute `dropout` is the share of the weights to drop. Without these the harness projects with linear
layers. catalogue.toml, in the same folder, has the source of each idea and its style in figures.
"""

import importlib
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.resources import files
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from attnbench import plugins
from attnbench.contract import BoundMask, Implementation, Weights, supports_everything
from attnbench.contract.adapters import Adapted, ModuleAdapter
from attnbench.contract.declared import Declared
from attnbench.contract.functions import ByFunction, FunctionAttention, from_function
from attnbench.workloads.counts import dense_flops
from attnbench.workloads.workload import Workload

FLOPS: dict[str, Callable[[Workload], int | None]] = {
    "dense": lambda workload: dense_flops(workload) if workload.sinks == "none" else None,  # a sink is an extra key
    "unknown": lambda _: None,
}


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """The facts in catalogue.toml, by the implementation's name."""
    text = files(plugins.PACKAGE).joinpath("catalogue.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["facts"]  # type: ignore[no-any-return]


def bundled() -> dict[str, Implementation]:
    """Every implementation of the folder, by name."""
    return {name: named(name) for name in plugins.stems(plugins.PACKAGE)}


@cache
def named(name: str) -> Implementation:
    """The implementation in the file of that name."""
    return from_module(importlib.import_module(f"{plugins.PACKAGE}.{name}"), name)


def from_module(module: ModuleType, name: str) -> Implementation:
    """The implementation that a module holds; `name` is its row in the catalogue."""
    row, holds = catalogue().get(name, {}), vars(module)
    if "IMPLEMENTATION" in holds:
        value: Implementation = module.IMPLEMENTATION
        return value
    declared = Declared(
        unsupported=holds.get("unsupported", supports_everything),
        has_sdpa_mask=True,
        has_no_empty_rows=row.get("rows") == "outside",
    )
    function = replace(
        from_function(module.attention, name, declared=declared),
        source=row.get("source", name),
        executed_flops=FLOPS[row.get("flops", "unknown")],
        backend=row.get("backend", ""),
        compiles=row.get("compiles", False),
        copies=row.get("copies", ""),
    )
    return with_module(function, module, declared) if "MODULE" in holds else function


class BothScopes(ByFunction, Adapted):
    """A file's module in scope `module`, and its function in scope `attention`."""


def with_module(function: Implementation, module: ModuleType, declared: Declared) -> Implementation:
    """An implementation that uses its own module instead of the harness's projections in scope `module`."""

    def call(module: Any, x: Tensor, context: Tensor, mask: BoundMask) -> Any:  # noqa: ANN401, ARG001
        return module(x, mask=mask.added(x.dtype) if mask.changes_scores else mask.visible, scale=mask.scale)

    core: type[FunctionAttention] = function.build  # type: ignore[assignment] # as from_function makes it
    whole = ModuleAdapter(
        make=module.MODULE,
        layout=module.LAYOUT,
        declared=Declared(
            call=call, changes_scores=True, dropout=lambda module, share: setattr(module, "dropout", share)
        ),
        takes=("scale",),
    )
    kind = type("BothScopes", (BothScopes,), {"signature": core.signature})

    def unsupported(workload: Workload) -> str | None:
        """Return why it cannot run a workload, or None."""
        sizes = (workload.batch_size, workload.seq_len, workload.kv_len)
        if workload.scope == "attention":
            return function.unsupported(workload)
        if not workload.mask_rule.is_additive or workload.sinks != "none":
            return "its module takes no softcap and no sinks"
        if declared.has_no_empty_rows and workload.mask_rule.has_empty_rows(*sizes):
            return "its module gives NaN to a query that sees no key"
        return whole.unsupported(workload)

    def build(weights: Weights) -> nn.Module:
        """The file's module, or only the function if the module cannot have heads of these sizes."""
        has_equal_heads = weights.query.shape[:2] == weights.key.shape[:2] == weights.value.shape[:2]
        is_as_wide = weights.out is not None and len(weights.out) == weights.query.shape[2]  # the output as the input
        return whole.build(weights, kind) if has_equal_heads and is_as_wide else core(weights)

    return replace(function, build=build, unsupported=unsupported)
