"""Attention in the textbook form, step by step; each step can be displayed, or replaced to create a `Mistake`.

The steps in order, with their results: `projection` query, key and value; `heads` a key/value head for every query
head; `scores`; `masked scores`; `weights`; `context` (B, H, R, V); `output` (B, R, D) in scope `module`.
Source: https://arxiv.org/abs/1706.03762, section 3.2. Shapes: R chosen queries; the other letters as everywhere.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnbench.checking.case import Inputs
from attnbench.checking.oracle import RowMask, output, project, row_mask
from attnbench.checking.oracle import heads as heads_of
from attnbench.contract import Weights, repeat_heads
from attnbench.explained import explanations
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


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys, the last axis, with sinks (H, 1, 1) as the score of one more key whose value is 0.

    A query that sees no key gives 0 with sinks, and NaN without. Source: gpt-oss, https://arxiv.org/abs/2508.10925,
    section 2.2.
    """
    if sinks is None:
        return scores.softmax(dim=-1)
    one_more = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, one_more], dim=-1).softmax(dim=-1)[..., :-1]


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


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, changes: Changes | None = None
) -> dict[str, Tensor]:
    """Each step's result by its name, from `scores` to `context`; `key` and `value` are those of `heads`.

    Query (B, H, R, K), key (B, G, S, K), value (B, G, S, V).
    """
    step = {**DEFAULTS, **(changes or {})}
    key, value = step["heads"](query, key, value, mask)
    results = {"query": query, "key": key, "value": value}
    if WHOLE in step:
        return results | {"context": step[WHOLE](query, key, value, mask)}
    results["scores"] = step["scores"](query, key, mask)
    results["masked scores"] = step["masked scores"](results["scores"], mask)
    results["weights"] = step["weights"](results["masked scores"], mask)
    results["context"] = step["context"](results["weights"], value, mask)
    return results


def attend_tokens(
    x: Tensor, context: Tensor, module_weights: Weights, mask: RowMask, changes: Changes | None = None
) -> dict[str, Tensor]:
    """Every step's result by its name. x (B, R, D), context (B, S, D); `output` is (B, R, D)."""
    step = {**DEFAULTS, **(changes or {})}
    query, key, value = step["projection"](x, context, module_weights)
    results = attend(query, key, value, mask, changes)
    return results | {"output": step["output"](results["context"], module_weights)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Mistake:
    """A way to get attention wrong: the textbook form with one or more steps replaced.

    `words` complete the sentence "It looks as if ...".
    """

    name: str  # several mistakes of one kind share a name
    step: str  # the first step that differs
    words: str
    changes: Changes = field(repr=False)
    needs_all_rows: bool = False  # a query's answer depends on the other queries
    is_rounding: bool = False  # recognised by the places of its large errors, not by their exact values
    is_gradient: bool = False  # the output is right

    def answer(self, workload: Workload, rows: Tensor) -> Callable[[Inputs], Tensor]:
        """A function of inputs that returns the wrong output at those query rows (B, H, R, V) or (B, R, D)."""
        computed = torch.arange(workload.seq_len) if self.needs_all_rows else rows

        def ask(inputs: Inputs) -> Tensor:
            mask = row_mask(workload, computed, inputs=inputs.tensors)
            operands = heads_of(workload, inputs, computed, self.changes.get("projection", project))
            result: Tensor = attend(*operands, mask, self.changes)["context"]
            if workload.scope == "module":
                result = self.changes.get("output", output)(result, inputs.weights)
            return result.index_select(result.dim() - 2, rows) if self.needs_all_rows else result

        return ask


def wrong(name: str, words: str = "", flags: str = "", **changes: Callable[..., Any]) -> Mistake:
    """A mistake that replaces the named steps (`_` for a space); `flags` is like "is_gradient needs_all_rows".

    Without `words`, they are those of `attnbench explain`.
    """
    steps = {step.replace("_", " "): change for step, change in changes.items()}
    first = min(("heads" if step == WHOLE else step for step in steps), key=[*DEFAULTS].index)
    named: dict[str, Any] = dict.fromkeys(flags.split(), True)
    return Mistake(name=name, step=first, words=words or meaning(name), changes=steps, **named)


@functools.cache
def meaning(name: str) -> str:
    """The meaning of a mistake's name, to go on a sentence; "" without an explanation."""
    means = next((each.means for each in explanations() if each.name == name), "")
    return means[:1].lower() + means[1:].removesuffix(".")


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
