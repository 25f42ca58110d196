"""Attention in the textbook form, step by step, so that each step can be shown, or replaced to make a `Mistake`.

The steps in order, and what each computes: `projection` query, key and value; `heads` a key/value head for every query
head; `scores`; `masked scores`; `weights`; `context` (B, H, R, V); `output` (B, R, D) in scope `module`.
Source: https://arxiv.org/abs/1706.03762, section 3.2. Shapes: R chosen queries; the other letters as everywhere.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnbench.checking.case import Inputs
from attnbench.checking.oracle import RowMask, row_mask
from attnbench.contract import Weights, repeat_heads, softmax_with_sinks
from attnbench.workloads.workload import Workload

Condition = Callable[[Workload], bool]
Changes = Mapping[str, Callable[..., Any]]
"""The functions that replace some of the steps: same operands, same kind of result."""


def product(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product summed in float32 at least and rounded to the operands' dtype, as hardware does it."""
    if torch.finfo(left.dtype).bits < 32:  # noqa: PLR2004 - float32's
        return (left.float() @ right.float()).to(left.dtype)
    return left @ right


def project(x: Tensor, context: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """(B, R, D), (B, S, D) -> query (B, H, R, K), key (B, G, S, K), value (B, G, S, V)."""

    def through(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        projected = product(tokens[:, None], weight.transpose(-2, -1))  # (B,1,R,D) @ (H,D,K) -> (B,H,R,K)
        return projected if bias is None else projected + bias[:, None]

    return (
        through(x, weights.query, weights.query_bias),
        through(context, weights.key, weights.key_bias),
        through(context, weights.value, weights.value_bias),
    )


def heads(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> tuple[Tensor, Tensor]:
    """Key (B, G, S, K) -> (B, H, S, K) and value likewise: query head h reads key/value head h // (H / G)."""
    return repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])


def scores(query: Tensor, key: Tensor, mask: RowMask) -> Tensor:
    """(B, H, R, K), (B, H, S, K) -> (B, H, R, S)."""
    return product(query, key.transpose(-2, -1)) * mask.scale_for(query.shape[-1])


def hide(scores: Tensor, seen: Tensor) -> Tensor:
    """The scores with -inf at the keys that are not seen."""
    return scores.masked_fill(~seen, -math.inf)


def masked_scores(scores: Tensor, mask: RowMask) -> Tensor:
    """The scores as the mask changes them, with -inf at the hidden keys."""
    return hide(mask.changed(scores), mask.seen)


def weights(masked: Tensor, mask: RowMask) -> Tensor:
    """Softmax over the keys and the head's sink, if there is one; a query that sees no key gives each of them 0."""
    empty = (masked == -math.inf).all(dim=-1, keepdim=True)
    return softmax_with_sinks(masked, mask.sinks).masked_fill(empty, 0.0)


def context(weights: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """(B, H, R, S), (B, H, S, V) -> (B, H, R, V)."""
    return product(weights, value)


def output(context: Tensor, weights: Weights) -> Tensor:
    """Heads side by side, then the output projection where there is one: (B, H, R, V) -> (B, R, D), or (B, R, H*V)."""
    merged = context.transpose(1, 2).flatten(2)
    if weights.out is None:
        return merged
    projected = product(merged, weights.out.T)
    return projected if weights.out_bias is None else projected + weights.out_bias


DEFAULTS: Changes = {
    "projection": project,
    "heads": heads,
    "scores": scores,
    "masked scores": masked_scores,
    "weights": weights,
    "context": context,
    "output": output,
}


RESULTS = {"query": "projection", "key": "heads", "value": "heads"} | {
    name: name for name in ("scores", "masked scores", "weights", "context")
}
"""The step that makes each result of `attend`, in order."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, changes: Changes | None = None
) -> dict[str, Tensor]:
    """Each step's result by its name, from `scores` to `context`; `key` and `value` are as `heads` makes them.

    Query (B, H, R, K), key (B, G, S, K), value (B, G, S, V).
    """
    return _completed({"query": query}, (key, value), mask, changes or {})


def _completed(
    made: dict[str, Tensor], key_value: tuple[Tensor, Tensor], mask: RowMask, changes: Changes
) -> dict[str, Tensor]:
    """The results that are made already, and those of every step after them."""
    step = {**DEFAULTS, **changes}
    if "value" not in made:
        made["key"], made["value"] = step["heads"](made["query"], *key_value, mask)
    if "scores" not in made:
        made["scores"] = step["scores"](made["query"], made["key"], mask)
    if "masked scores" not in made:
        made["masked scores"] = step["masked scores"](made["scores"], mask)
    if "weights" not in made:
        made["weights"] = step["weights"](made["masked scores"], mask)
    if "context" not in made:
        made["context"] = step["context"](made["weights"], made["value"], mask)
    return made


def attend_tokens(
    x: Tensor, context: Tensor, module_weights: Weights, mask: RowMask, changes: Changes | None = None
) -> dict[str, Tensor]:
    """Every step's result by its name. x (B, R, D), context (B, S, D); `output` is (B, R, D)."""
    step = {**DEFAULTS, **(changes or {})}
    query, key, value = step["projection"](x, context, module_weights)
    made = attend(query, key, value, mask, changes)
    return made | {"output": step["output"](made["context"], module_weights)}


class Textbook:
    """The steps of the textbook form at some query rows, computed once, from which mistakes go on where they differ."""

    def __init__(self, workload: Workload, inputs: Inputs, rows: Tensor) -> None:
        """Compute every step on inputs of any dtype."""
        self.is_module = workload.scope == "module"
        self.inputs, self.mask = inputs, row_mask(workload, rows, inputs=inputs.tensors)
        if self.is_module:
            x = inputs.tensors["x"]
            self.tokens = (x[:, rows], inputs.tensors.get("context", x))
            self.projected = project(*self.tokens, inputs.weights)
        else:
            self.projected = (inputs.tensors["query"][:, :, rows], inputs.tensors["key"], inputs.tensors["value"])
        query, key, value = self.projected
        self.right = attend(query, key, value, self.mask)

    def output(self, changes: Changes) -> Tensor:
        """The output where some steps are changed: (B, H, R, V), or (B, R, D) in scope `module`."""
        if "projection" in changes:
            query, key, value = changes["projection"](*self.tokens, self.inputs.weights)
            made = attend(query, key, value, self.mask, changes)["context"]
        else:
            before = itertools.takewhile(lambda name: RESULTS[name] not in changes, self.right)
            kept = {name: self.right[name] for name in before}
            made = _completed(kept, self.projected[1:], self.mask, changes)["context"]
        if not self.is_module:
            return made
        result: Tensor = changes.get("output", output)(made, self.inputs.weights)
        return result


def has_several(*axes: str, least: int = 2) -> Condition:
    """Whether each of these axes is 2 at least, or `least`, so that there is something to mix up."""
    return lambda workload: all(getattr(workload, axis) >= least for axis in axes)


def is_square(workload: Workload) -> bool:
    """Whether there are as many queries as keys."""
    return workload.seq_len == workload.kv_len


@dataclass(frozen=True, kw_only=True, eq=False)
class Mistake:
    """A known way to get attention wrong: the textbook form with one step replaced, or several.

    `words` complete the sentence "It looks as if ...". Where there is a free choice, such as the tile that is lost,
    `choices` maps what is possible at a workload from its name to a value: `words` has a place for the name, {choice},
    and the replacement takes the value as `choice`.
    """

    name: str
    step: str  # the first that differs
    words: str
    changes: Changes = field(repr=False)  # replacements of that step, and of later ones
    fits: Sequence[Condition] = field(default=(), repr=False)  # it can be made where all of them hold
    choices: Callable[[Workload], Mapping[str, Any]] | None = field(default=None, repr=False)
    needs_all_rows: bool = False  # a query's answer depends on the other queries
    is_random: bool = False  # two calls differ: recognised by its weights, not by its output
    is_rounding: bool = False  # recognised by where its errors are large, not by their exact values
    is_fitted: bool = False  # `choice` is a number that the diagnosis fits: 1.0 changes nothing
    is_gradient: bool = False  # the output is right
    is_memory: bool = False  # shows in how tensors lie in memory, or in what earlier calls left there

    def planted(self, workload: Workload) -> Iterator["Mistake"]:
        """The mistake at a workload: one for each choice, none where it does not fit.

        Mistakes of the projections can be made in scope `module` only; those of memory in scope `attention`, where no
        projection makes new tensors.
        """
        is_module = workload.scope == "module"
        if (self.step in {"projection", "output"} and not is_module) or (self.is_memory and is_module):
            return
        if (self.is_gradient and workload.direction == "inference") or not all(fits(workload) for fits in self.fits):
            return
        if self.choices is None:
            yield self
            return
        for name, choice in self.choices(workload).items():
            yield self.with_choice(name, choice)

    def with_choice(self, name: str, choice: Any) -> "Mistake":  # noqa: ANN401 - of any type
        """The mistake with its free choice made, and named."""
        changes: Changes = {**self.changes, self.step: partial(self.changes[self.step], choice=choice)}
        return replace(self, words=self.words.format(choice=name), changes=changes)

    def answer(self, workload: Workload, rows: Tensor) -> Callable[[Inputs], Tensor]:
        """A function of inputs that returns the wrong output at those query rows (B, H, R, V) or (B, R, D)."""
        chosen = torch.arange(workload.seq_len) if self.needs_all_rows else rows

        def ask(inputs: Inputs) -> Tensor:
            tensors, mask = inputs.tensors, row_mask(workload, chosen, inputs=inputs.tensors)
            if workload.scope == "attention":
                query = tensors["query"][:, :, chosen]
                made = attend(query, tensors["key"], tensors["value"], mask, self.changes)["context"]
            else:
                x, context = tensors["x"], tensors.get("context", tensors["x"])
                made = attend_tokens(x[:, chosen], context, inputs.weights, mask, self.changes)["output"]
            return made.index_select(made.dim() - 2, rows) if self.needs_all_rows else made

        return ask


def mistake(
    step: str,
    *fits: Condition,
    also: Changes | None = None,
    **details: Any,  # noqa: ANN401
) -> Callable[[Callable[..., Any]], Mistake]:
    """Make a Mistake of the decorated function, which replaces `step`, for workloads at which all of `fits` hold.

    `also` holds replacements of later steps, `details` other fields of Mistake. Its name is the function's, its words
    are the docstring with a small first letter and without the full stop.
    """

    def decorate(function: Callable[..., Any]) -> Mistake:
        assert function.__doc__
        words = " ".join(function.__doc__.split()).removesuffix(".")
        words = words[0].lower() + words[1:]
        changes = {step: function, **(also or {})}
        return Mistake(name=function.__name__, step=step, words=words, changes=changes, fits=fits, **details)

    return decorate
