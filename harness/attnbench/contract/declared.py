"""Facts that users declare about a function or module, because the harness cannot read them from it."""

import dis
import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from attnbench.plugins import require_known, unknown
from attnbench.workloads.masks import BETWEEN, parse_mask
from attnbench.workloads.masks import masks as mask_names
from attnbench.workloads.workload import MASKS_BETWEEN, Workload

END = "_bottom_right"  # suffix in the names of masks that are aligned at the end
WITHOUT = {
    "scale": "it takes no scale of the scores: name a parameter scale, or declare one other than 1 / sqrt(K)",
    "rotary": 'it does not rotate query and key: where it does, declare it: adapt(..., rotary="halves(10000)")',
    "sinks": "it takes no sinks: name a parameter sinks",
}
"""The reason against a workload that uses one of these axes, if the code neither takes nor declares the axis."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """The facts that users declare through `adapt` (contract/adapters.py), and two that only bundled functions need.

    Without `call`, a module is called as module(x), with x (B, T, D). If the result is a tuple, its first entry is the
    output. The `mask` of `call` is a BoundMask. If `call` uses `context`, it is also checked with contexts of another
    length than x. The last two fields are for bundled functions: `has_sdpa_mask` says that the mask may be additive, as
    in SDPA, and `has_no_empty_rows` that the output of a query without visible keys is undefined.

    Raises:
        ValueError: a fact has the wrong type, or an axis or mask is unknown.
    """

    call: Callable[..., Any] | None = None  # f(module, x, context, mask) or f(function, query, key, value, mask)
    masks: Collection[str] | None = None  # masks that it supports or has built in, such as "sliding_window(9)"
    scale: float = 0.0  # the built-in factor of the scores; 0: 1 / sqrt(K)
    rotary: str = "none"  # rotary embedding that the code applies: "halves(BASE)" or "interleaved(BASE)"
    sizes: Mapping[str, int] = field(default_factory=dict)  # built-in values of axes; {"kv_len": 0} means S = T
    axes: Collection[str] = ()  # ignored: files for earlier releases set it
    extra: Mapping[str, float] = field(default_factory=dict)  # values of parameters that are not weights, by pattern
    residual: bool = False  # the module returns its input plus attention
    has_cache: bool = False  # the module has a key/value cache, emptied before each call; by default inference only
    approximate: bool | float = False  # the output is an approximation; a number is its relative tolerance
    changes_scores: bool = False  # if `masks` is None: `call` also passes on masks that change scores
    unsupported: Callable[[Workload], str | None] = lambda _: None  # why it cannot run a workload, or None
    dropout: Callable[[Any, float], object] | None = None  # f(module, p) sets the module's dropout probability to p
    source: str = ""  # the origin of the code, for reports
    has_sdpa_mask: bool = False
    has_no_empty_rows: bool = False

    def __post_init__(self) -> None:
        for fact in ("call", "unsupported", "dropout"):
            check_callable(fact, getattr(self, fact))
        is_list = isinstance(self.masks, Collection) and all(isinstance(mask, str) for mask in self.masks)
        if isinstance(self.masks, str) or not (self.masks is None or is_list):
            raise ValueError(f"adapt is given masks={self.masks!r}: give a list of names, as in masks=['causal']")
        for mask in self.masks or ():
            for part in mask.split(BETWEEN):
                if part.partition("(")[0] not in mask_names():
                    raise ValueError(unknown("mask", part, mask_names(), ", with or without its numbers"))
        object.__setattr__(self, "masks", self.masks and tuple(map(_written, self.masks)))
        try:
            require_known("axis", self.sizes, Workload.__struct_fields__)
            Workload().with_axes(self.built_in | {"mask": "none"})  # raises if there is no such workload
        except TypeError as error:
            raise ValueError(f"a fact that adapt is given has the wrong type: {error}") from None

    @property
    def most_error(self) -> float:
        """The limit for an approximation's error, relative to the output's largest value; 0 if none is declared."""
        return 0.0 if isinstance(self.approximate, bool) else self.approximate

    @property
    def built_in(self) -> dict[str, int | float | str]:
        """The built-in or default value of each axis that has one; several masks are joined by |."""
        fixed: dict[str, int | float | str] = {}
        for mask in self.masks or ():
            with suppress(ValueError):  # a name without the numbers that it needs stands for several masks
                fixed["mask"] = MASKS_BETWEEN.join(filter(None, (str(fixed.get("mask", "")), str(parse_mask(mask)))))
        fixed |= self.sizes
        fixed |= {"scale": self.scale} if self.scale else {}
        fixed |= {"rotary": Workload(rotary=self.rotary).rotary} if self.rotary != "none" else {}
        return fixed | ({"direction": "inference"} if self.has_cache else {})

    def reason_against(self, workload: Workload, takes: Collection[str]) -> str | None:
        """Return why the workload cannot run; None if it can.

        It cannot run if it has a scale, sinks or a rotary embedding that are neither declared nor in `takes`, if masks
        are declared without its mask, or if `unsupported` gives a reason. If T = S, a mask aligned at the start and
        the same mask aligned at the end count as one, except in combinations of masks.
        """
        needs = {"scale": workload.scale > 0, "sinks": workload.sinks != "none", "rotary": workload.rotary != "none"}
        for axis, is_needed in needs.items():
            if is_needed and axis not in {*takes, *self.built_in}:
                return WITHOUT[axis]
        rule, names = workload.mask_rule, {workload.mask, workload.mask_rule.name}
        if workload.seq_len == workload.kv_len and len(rule.parts) == 1:
            other = rule.name.removesuffix(END) if rule.name.endswith(END) else f"{rule.name}{END}"
            names |= {workload.mask.replace(rule.name, other), other}
        if self.masks is not None and names.isdisjoint(self.masks):
            return f"it takes no mask {rule.name}, but {', '.join(self.masks)}"
        return self.unsupported(workload)


def _written(mask: str) -> str:
    """Return a mask in the form that workloads use; a name without the numbers that it needs stays as it is.

    Raises:
        ValueError: the mask has numbers that do not fit.
    """
    try:
        return str(parse_mask(mask))
    except ValueError:
        if "(" in mask:
            raise
        return mask


def check_callable(what: str, function: object) -> None:
    """Raise ValueError unless `function`, the argument `what` of adapt, is None or a callable other than a module."""
    if function is not None and (isinstance(function, nn.Module) or not callable(function)):
        raise ValueError(f"adapt is given {kind(function)} for {what}: give a function, as docs/adapters.md shows")


def reads(function: Callable[..., Any], parameter: int) -> bool:
    """Return whether a function uses its parameter of this index; True if *args takes it, or the code is unknown."""
    if not inspect.isfunction(function):
        return True
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    if len(names) <= parameter:  # it has *args
        return True
    name = names[parameter]
    instructions = dis.get_instructions(function.__code__)
    loads = (each for each in instructions if "LOAD_FAST" in each.opname or "LOAD_CLOSURE" in each.opname)
    return any(name == each.argval or (isinstance(each.argval, tuple) and name in each.argval) for each in loads)


def kind(value: object) -> str:
    """Return a value's type with its article, for messages, as in "a list"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def words(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message, for use in another message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
