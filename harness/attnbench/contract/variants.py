"""Variants of an implementation, as `name+option` asks for them: the same module, run in another way.

`fused+compile` is `fused` by torch.compile, as one graph and at fixed sizes. What Inductor makes of it may be another
kernel altogether, as the operators that ran tell: the plain form without a mask becomes SDPA's flash kernel.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from attnbench.contract import BoundMask, Implementation, Weights, Workload, missing_compiler
from attnbench.contract.compiled import NotOneGraphError, compile_whole


def compiled(given: Implementation) -> Implementation:
    """The implementation with its `attend` and its `forward` compiled."""

    def build(weights: Weights) -> nn.Module:
        module = given.build(weights)
        plain = copy.copy(module).eval()  # the same parameters; its forward calls the attend that is not compiled
        for name in ("attend", "forward"):
            if hasattr(plain, name):
                setattr(module, name, _compiled(getattr(plain, name)))
        return module

    def unsupported(workload: Workload) -> str | None:
        if given.compiles:
            return "it is compiled by itself already: name it without +compile"
        return given.unsupported(workload) or missing_compiler(workload)

    return dataclasses.replace(
        given,
        build=build,
        unsupported=unsupported,
        compiles=True,
        executed_flops=lambda _: None,  # nobody knows what the compiler makes of it
        has_dropout=False,  # what is compiled keeps the attribute as it was when it was built
    )


VARIANTS: dict[str, Callable[[Implementation], Implementation]] = {"compile": compiled}
"""What each option of plugins.py makes of an implementation."""


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` compiled, to be called with a keyword or a last argument `mask`."""
    run = compile_whole(function)
    ready: WeakSet[BoundMask] = WeakSet()

    def call(*given: Any, **named: Any) -> Tensor:  # noqa: ANN401 - attend and forward differ
        mask: BoundMask = named["mask"] if "mask" in named else given[-1]
        if mask not in ready:
            _complete(mask, function, given, named)
            ready.add(mask)
        try:
            output: Tensor = run(*given, **named)
        except torch._dynamo.exc.Unsupported as error:  # noqa: SLF001 - it has no public name
            raise NotOneGraphError(error) from error
        return output

    return call


def _complete(mask: BoundMask, function: Callable[..., Tensor], given: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Have the mask make what `function` asks of it: made while a graph is captured, it would be part of the graph."""
    if mask.is_none:
        assert mask.visible is mask.hidden is mask.empty is None  # each is now kept, and took no memory
        return
    with torch.no_grad():
        function(*given, **named)
