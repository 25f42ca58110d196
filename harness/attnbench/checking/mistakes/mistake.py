"""A known mistake, and the decorator that makes one of a function."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.case import Inputs
from attnbench.checking.oracle import row_mask
from attnbench.checking.steps import Changes
from attnbench.workloads.workload import Workload

Condition = Callable[[Workload], bool]


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
