"""Attention in the textbook form, step by step; each step can be displayed, or replaced to create a `Mistake`.

The steps in order, with their results: `projection`: query, key and value; `heads`: query, and key and value repeated
for every query head; `scores`, `masked scores` and `weights`: (B, H, R, S); `context`: (B, H, R, V); `backward pass`:
the context again; `output`: (B, R, D), in scope `module`. Source: https://arxiv.org/abs/1706.03762, section 3.2.
Shapes: R chosen queries; the other letters as in the contract.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnbench.case import Inputs
from attnbench.checking.oracle import RowMask, output, product, project, row_mask
from attnbench.checking.oracle import heads as heads_of
from attnbench.contract import repeat_heads
from attnbench.explained import explanations
from attnbench.workloads.masks import Mask
from attnbench.workloads.workload import Workload

Changes = Mapping[str, Callable[..., Any]]
"""Replacements of steps, by the step's name: functions with the operands of the step and the same kind of result."""


def heads(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat key and value (B, G, S, K or V) for all H query heads: query head h reads head h // (H / G)."""
    return query, repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])


def scores(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """Compute the scores (B, H, R, S): scaled products of query (B, H, R, K) and key (B, H, S, K)."""
    return product(query, key.transpose(-2, -1)) * mask.scale_for(query.shape[-1])


def hide(scores: Tensor, seen: Tensor) -> Tensor:
    """Replace scores (B, H, R, S) by -inf where `seen`, a boolean that broadcasts to them, is False."""
    return scores.masked_fill(~seen, -math.inf)


def masked_scores(scores: Tensor, mask: RowMask) -> Tensor:
    """Apply the mask's changes to the scores (B, H, R, S), then hide keys with -inf."""
    return hide(mask.changed(scores), mask.seen)


def weights(masked: Tensor, mask: RowMask) -> Tensor:
    """Compute the weights (B, H, R, S) by a softmax over keys and sinks, if any; 0 for a query that sees no key."""
    empty = (masked == -math.inf).all(dim=-1, keepdim=True)
    return softmax_with_sinks(masked, mask.sinks).masked_fill(empty, 0.0)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute the softmax over keys (last axis) and a sink (H, 1, 1): the score of an additional key with value 0.

    The weights of a query that sees no key are 0 with sinks, and NaN without. Source: gpt-oss,
    https://arxiv.org/abs/2508.10925, section 2.2.
    """
    if sinks is None:
        return scores.softmax(dim=-1)
    one_more = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, one_more], dim=-1).softmax(dim=-1)[..., :-1]


def context(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """Compute the context (B, H, R, V) from weights (B, H, R, S) and value (B, H, S, V)."""
    return product(weights, value)


def backward_pass(results: Mapping[str, Tensor], mask: RowMask) -> Tensor:
    """Return the context (B, H, R, V) unchanged; a mistake replaces this step to give the context a wrong gradient."""
    return results["context"]


DEFAULTS: Changes = {
    "projection": project,
    "heads": heads,
    "scores": scores,
    "masked scores": masked_scores,
    "weights": weights,
    "context": context,
    "backward pass": backward_pass,
    "output": output,
}


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, changes: Changes | None = None
) -> dict[str, Tensor]:
    """Compute the steps from `heads` to `backward pass`; return their results by name.

    The operands are query (B, H, R, K), key (B, G, S, K) and value (B, G, S, V). The results `query`, `key` and `value`
    are those of the step `heads`.
    """
    step = {**DEFAULTS, **(changes or {})}
    query, key, value = step["heads"](query, key, value, mask)
    results = {"query": query, "key": key, "value": value}
    results["scores"] = step["scores"](query, key, mask)
    results["masked scores"] = step["masked scores"](results["scores"], mask)
    results["weights"] = step["weights"](results["masked scores"], mask)
    results["context"] = step["context"](results["weights"], value, mask)
    results["context"] = step["backward pass"](results, mask)
    return results


def walked(workload: Workload, inputs: Inputs, rows: Tensor, changes: Changes | None = None) -> dict[str, Tensor]:
    """Compute every step at the query rows `rows` (R,); return results by name, with `output` in scope `module`."""
    step = {**DEFAULTS, **(changes or {})}
    operands = heads_of(workload, inputs, rows, step["projection"])
    results = attend(*operands, row_mask(workload, rows, inputs=inputs.tensors), changes)
    if workload.scope == "module":
        results["output"] = step["output"](results["context"], inputs.weights)
    return results


@dataclass(frozen=True, kw_only=True, eq=False)
class Mistake:
    """A way to get attention wrong: the textbook form with one or more steps replaced.

    `words` complete the sentence "It looks as if ...".
    """

    name: str  # several mistakes of one kind share a name
    step: str  # the first step that differs
    words: str
    changes: Changes = field(repr=False)
    needs_all_rows: bool = False  # if a query's answer depends on other queries: all rows are computed
    declare: str = ""  # the argument of `adapt` that declares it as intended; "" if there is none

    def answer(self, workload: Workload, rows: Tensor) -> Callable[[Inputs], Tensor]:
        """Return a function from inputs to the wrong output at the query rows `rows`: (B, H, R, V) or (B, R, D)."""
        computed = torch.arange(workload.seq_len) if self.needs_all_rows else rows

        def ask(inputs: Inputs) -> Tensor:
            *_, result = walked(workload, inputs, computed, self.changes).values()
            return result.index_select(result.dim() - 2, rows) if self.needs_all_rows else result

        return ask


def wrong(name: str, detail: str = "", *, needs_all_rows: bool = False, **changes: Callable[..., Any]) -> Mistake:
    """Create a mistake that replaces the steps named by the keywords of `changes`, which have _ instead of spaces.

    Its words are the meaning of `name` in `attnbench explain`, if there is one, and `detail`.
    """
    means, declare = next(((each.means, each.declare) for each in explanations() if each.name == name), ("", ""))
    words = ": ".join(filter(None, (means[:1].lower() + means[1:].removesuffix("."), detail)))
    steps = {step.replace("_", " "): change for step, change in changes.items()}
    first = min(steps, key=[*DEFAULTS].index)
    return Mistake(name=name, step=first, words=words, changes=steps, declare=declare, needs_all_rows=needs_all_rows)


def before(step: str, change: Callable[[Any], Any], *places: int) -> Callable[..., Any]:
    """Return the step named `step`, changed so that `change` is first applied to its operands at indices `places`."""
    return lambda *operands: DEFAULTS[step](*(change(x) if at in places else x for at, x in enumerate(operands)))


def after(step: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return the step named `step` with `change` applied to its result."""
    return lambda *operands: change(DEFAULTS[step](*operands))


def with_bias(change: Callable[[Tensor, Mask], Tensor]) -> Callable[[Tensor, RowMask], Tensor]:
    """Return the step `masked scores` in which `change(bias, part)` replaces each bias (B, H, R, S)."""

    def masked(scores: Tensor, mask: RowMask) -> Tensor:
        for part in mask.rule.changes:
            if part.is_additive:
                scores = scores + change(mask.bias(part).expand(scores.shape), part).to(scores.dtype)
            else:
                scores = mask.change(scores, part)
        return hide(scores, mask.seen)

    return masked
