"""A known mistake, and the decorator that makes one of a function."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.case import Inputs
from attnbench.checking.oracle import RowMask, row_mask
from attnbench.checking.steps import Changes
from attnbench.contract import BoundMask, CanonicalAttention, Implementation, Weights
from attnbench.workloads.workload import Workload

BLOCK_SCORES = 2**24
"""A mistake as an implementation holds about this many scores at a time, where it can compute queries in blocks."""
Condition = Callable[[Workload], bool]


def has_several(*axes: str) -> Condition:
    """Whether each of these axes is above 1, so that there is something to mix up."""
    return lambda workload: all(getattr(workload, axis) > 1 for axis in axes)


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
    is_rounding: bool = False  # recognised by the size of its error, not by the error itself
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
            changes: Changes = {**self.changes, self.step: partial(self.changes[self.step], choice=choice)}
            yield replace(self, words=self.words.format(choice=name), changes=changes)

    def answer(self, workload: Workload, rows: Tensor) -> Callable[[Inputs], Tensor]:
        """A function of inputs that returns the wrong output at those query rows (B, H, R, V) or (B, R, D)."""
        chosen = torch.arange(workload.seq_len) if self.needs_all_rows else rows
        mask = row_mask(workload, chosen)

        def ask(inputs: Inputs) -> Tensor:
            tensors = inputs.tensors
            if workload.scope == "attention":
                query = tensors["query"][:, :, chosen]
                made = steps.attend(query, tensors["key"], tensors["value"], mask, self.changes)["context"]
            else:
                x, context = tensors["x"], tensors.get("context", tensors["x"])
                made = steps.attend_tokens(x[:, chosen], context, inputs.weights, mask, self.changes)["output"]
            return made.index_select(made.dim() - 2, rows) if self.needs_all_rows else made

        return ask

    def implementation(self) -> Implementation:
        """The textbook form with the mistake, as an implementation that the check can be tried on."""
        changes, needs_all_rows = self.changes, self.needs_all_rows

        class Mistaken(CanonicalAttention):
            def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
                num_scores = query.shape[0] * query.shape[1] * key.shape[2]
                block = query.shape[2] if needs_all_rows else max(1, BLOCK_SCORES // num_scores)
                parts = []
                for rows in torch.arange(query.shape[2], device=query.device).split(block):
                    is_whole = len(rows) == query.shape[2]
                    block_query = query if is_whole else query[:, :, rows]
                    parts.append(steps.attend(block_query, key, value, at_rows(mask, rows), changes)["context"])
                return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

            def forward(self, x: Tensor, context: Tensor | None = None, *, mask: BoundMask) -> Tensor:
                named = {name.replace(".", "_"): parameter for name, parameter in self.named_parameters()}
                weights = Weights(**{name.removesuffix("_weight"): parameter for name, parameter in named.items()})
                rows = at_rows(mask, torch.arange(x.shape[1], device=x.device))
                return steps.attend_tokens(x, x if context is None else context, weights, rows, changes)["output"]

        return Implementation(build=Mistaken, source=f"attnbench.checking.mistakes: {self.name}")


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


def at_rows(mask: BoundMask, rows: Tensor) -> RowMask:
    """The mask of a call at some of its query rows."""
    return RowMask(rule=mask.rule, sizes=mask.sizes, num_heads=mask.num_heads, rows=rows, device=rows.device)
