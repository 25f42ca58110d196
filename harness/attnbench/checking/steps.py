"""Attention in the textbook form, step by step; each step can be displayed, or replaced to create a `Mistake`.

The steps in order, with their results: `projection` query, key and value; `heads` a key/value head for every query
head; `scores`; `masked scores`; `weights`; `context` (B, H, R, V); `output` (B, R, D) in scope `module`.
Source: https://arxiv.org/abs/1706.03762, section 3.2. Shapes: R chosen queries; the other letters as everywhere.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnbench.checking.case import Inputs
from attnbench.checking.oracle import RowMask, output, project, row_mask
from attnbench.checking.oracle import heads as heads_of
from attnbench.contract import Weights, repeat_heads, softmax_with_sinks
from attnbench.workloads.masks import Mask
from attnbench.workloads.workload import Workload

Changes = Mapping[str, Callable[..., Any]]
"""Functions that replace some of the steps, with the same operands and kind of result."""


def product(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product summed in float32 at least and rounded to the operands' dtype, as in hardware."""
    if torch.finfo(left.dtype).bits < 32:  # noqa: PLR2004 - float32's
        return (left.float() @ right.float()).to(left.dtype)
    return left @ right


def heads(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> tuple[Tensor, Tensor]:
    """Key (B, G, S, K) -> (B, H, S, K), and the same for value: query head h reads key/value head h // (H / G)."""
    return repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])


def scores(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """(B, H, R, K), (B, H, S, K) -> (B, H, R, S)."""
    return product(query, key.transpose(-2, -1)) * mask.scale_for(query.shape[-1])


def hide(scores: Tensor, seen: Tensor) -> Tensor:
    """The scores with -inf at hidden keys."""
    return scores.masked_fill(~seen, -math.inf)


def masked_scores(scores: Tensor, mask: RowMask) -> Tensor:
    """The scores after the mask's changes, with -inf at hidden keys."""
    return hide(mask.changed(scores), mask.seen)


def weights(masked: Tensor, mask: RowMask) -> Tensor:
    """Softmax over the keys and the head's sink, if there is one; all 0 for a query that sees no key."""
    empty = (masked == -math.inf).all(dim=-1, keepdim=True)
    return softmax_with_sinks(masked, mask.sinks).masked_fill(empty, 0.0)


def context(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """(B, H, R, S), (B, H, S, V) -> (B, H, R, V)."""
    return product(weights, value)


WHOLE = "whole"
"""A change under this name replaces every step from `scores` to `context`: (query, key, value, mask) -> context."""
DEFAULTS: Changes = {
    "projection": project,
    "heads": heads,
    "scores": scores,
    "masked scores": masked_scores,
    "weights": weights,
    "context": context,
    "output": output,
}


RESULTS = {"query": "projection", "key": "heads", "value": "heads"}
"""The step that computes each operand of the later steps."""
OPERANDS = {
    "scores": ("query", "key"),
    "masked scores": ("scores",),
    "weights": ("masked scores",),
    "context": ("weights", "value"),
}
"""The operands of each later step, whose result has the step's name; the mask follows."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, changes: Changes | None = None
) -> dict[str, Tensor]:
    """Each step's result by its name, from `scores` to `context`; `key` and `value` are those of `heads`.

    Query (B, H, R, K), key (B, G, S, K), value (B, G, S, V).
    """
    return _completed({"query": query}, (key, value), mask, changes or {})


def _completed(
    results: dict[str, Tensor], key_value: tuple[Tensor, Tensor], mask: RowMask, changes: Changes
) -> dict[str, Tensor]:
    """The results so far, with those of all later steps."""
    step = {**DEFAULTS, **changes}
    if "value" not in results:
        results["key"], results["value"] = step["heads"](results["query"], *key_value, mask)
    if WHOLE in changes:
        return results | {"context": changes[WHOLE](results["query"], results["key"], results["value"], mask)}
    for name, operands in OPERANDS.items():
        if name not in results:
            results[name] = step[name](*(results[each] for each in operands), mask)
    return results


def attend_tokens(
    x: Tensor, context: Tensor, module_weights: Weights, mask: RowMask, changes: Changes | None = None
) -> dict[str, Tensor]:
    """Every step's result by its name. x (B, R, D), context (B, S, D); `output` is (B, R, D)."""
    step = {**DEFAULTS, **(changes or {})}
    query, key, value = step["projection"](x, context, module_weights)
    results = attend(query, key, value, mask, changes)
    return results | {"output": step["output"](results["context"], module_weights)}


class Textbook:
    """The textbook form at some query rows; a mistake reuses the right steps before the first changed one."""

    def __init__(self, workload: Workload, inputs: Inputs, rows: Tensor) -> None:
        """Project inputs of any dtype."""
        self.workload, self.inputs, self.rows = workload, inputs, rows
        self.mask = row_mask(workload, rows, inputs=inputs.tensors)
        self.projected = heads_of(workload, inputs, rows)

    @cached_property
    def right(self) -> dict[str, Tensor]:
        """Each right step's result by its name."""
        return attend(*self.projected, self.mask)

    def output(self, changes: Changes) -> Tensor:
        """The output with some steps changed: (B, H, R, V), or (B, R, D) in scope `module`."""
        projected = self.projected
        known = vars(self).get("right", {})
        if "projection" in changes:
            projected, known = heads_of(self.workload, self.inputs, self.rows, changes["projection"]), {}
        query, key, value = projected
        known = {"query": query} | known
        before = itertools.takewhile(lambda name: name == "query" or RESULTS.get(name, name) not in changes, known)
        result = _completed({name: known[name] for name in before}, (key, value), self.mask, changes)["context"]
        if self.workload.scope == "attention":
            return result
        merged: Tensor = changes.get("output", output)(result, self.inputs.weights)
        return merged


@dataclass(frozen=True, kw_only=True, eq=False)
class Mistake:
    """A way to get attention wrong: the textbook form with one or more steps replaced.

    `words` complete the sentence "It looks as if ...". A mistake with a free number is first tried unchanged, and `fit`
    then creates it with other numbers, until it is nearest to the answers.
    """

    name: str  # several mistakes of one kind share a name
    step: str  # the first step that differs
    words: str
    changes: Changes = field(repr=False)
    needs_all_rows: bool = False  # a query's answer depends on the other queries
    is_random: bool = False  # two calls differ: recognised by its weights, not by its output
    is_rounding: bool = False  # recognised by the places of its large errors, not by their exact values
    is_factor: bool = False  # recognised by the ratio of the answer to the right one
    is_gradient: bool = False  # the output is right
    is_memory: bool = False  # depends on memory layout, or on leftovers of earlier calls
    fit: "Callable[[float], Mistake] | None" = field(default=None, repr=False)

    def answer(self, workload: Workload, rows: Tensor) -> Callable[[Inputs], Tensor]:
        """A function of inputs that returns the wrong output at those query rows (B, H, R, V) or (B, R, D)."""
        computed = torch.arange(workload.seq_len) if self.needs_all_rows else rows

        def ask(inputs: Inputs) -> Tensor:
            result = Textbook(workload, inputs, computed).output(self.changes)
            return result.index_select(result.dim() - 2, rows) if self.needs_all_rows else result

        return ask


def wrong(name: str, words: str, flags: str = "", **changes: Callable[..., Any]) -> Mistake:
    """A mistake that replaces the named steps (`_` for a space); `flags` is like "is_gradient is_memory"."""
    steps = {step.replace("_", " "): change for step, change in changes.items()}
    first = min(("heads" if step == WHOLE else step for step in steps), key=[*DEFAULTS].index)
    named: dict[str, Any] = dict.fromkeys(flags.split(), True)
    return Mistake(name=name, step=first, words=words, changes=steps, **named)


def before(step: str, change: Callable[[Any], Any], *places: int) -> Callable[..., Any]:
    """The step with its operands at these places changed first."""
    return lambda *operands: DEFAULTS[step](*(change(x) if at in places else x for at, x in enumerate(operands)))


def after(step: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The step with its result changed."""
    return lambda *operands: change(DEFAULTS[step](*operands))


def with_change(change: Callable[[Tensor, RowMask, Mask], Tensor | None]) -> Callable[[Tensor, RowMask], Tensor]:
    """The step `masked scores` with `change(scores, mask, part)` for each part that changes scores; None: as usual."""

    def masked(scores: Tensor, mask: RowMask) -> Tensor:
        for part in mask.rule.changes:
            other = change(scores, mask, part)
            scores = mask.change(scores, part) if other is None else other
        return hide(scores, mask.seen)

    return masked


def with_bias(bias: Callable[[Tensor, RowMask, Mask], Tensor]) -> Callable[[Tensor, RowMask], Tensor]:
    """The step `masked scores` with `bias(right, mask, part)` in place of each bias (B, H, R, S)."""

    def biased(scores: Tensor, mask: RowMask, part: Mask) -> Tensor | None:
        if not part.is_additive:
            return None
        return scores + bias(mask.bias(part).expand(scores.shape), mask, part).to(scores.dtype)

    return with_change(biased)
