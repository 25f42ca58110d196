"""What a mistake is."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from attnbench.checking.steps import STEPS, Changes
from attnbench.workloads.workload import Workload

NEVER: Changes = {}


def always(workload: Workload) -> bool:
    """A mistake that can be made anywhere."""
    return True


def once(workload: Workload) -> Iterable[Any]:
    """A mistake without a free choice."""
    return (None,)


@dataclass(frozen=True, kw_only=True, eq=False)
class Mistake:
    """A known way to get attention wrong, told as a difference from the textbook form.

    `words` complete the sentence "It looks as if ...". Where there is a free choice, such as the tile that is lost,
    `choices` lists what is possible at a workload, `words` has a place for {choice}, and `changes` is a function of it.
    """

    name: str
    words: str
    changes: Changes | Callable[[Any], Changes] = field(repr=False)
    fits: Callable[[Workload], bool] = field(default=always, repr=False)
    choices: Callable[[Workload], Iterable[Any]] = field(default=once, repr=False)
    needs_all_rows: bool = False  # a query's answer depends on the other queries
    is_random: bool = False  # two calls differ: told by its weights, not by its output
    is_rounding: bool = False  # told by the size of its error, not by the error itself
    is_gradient: bool = False  # the output is right
    is_memory: bool = False  # told by where tensors lie and what stays from earlier calls

    def forms(self, workload: Workload) -> Iterator[tuple[str, Changes]]:
        """The words and the changed steps, for each choice."""
        for choice in self.choices(workload):
            changes = self.changes(choice) if callable(self.changes) else self.changes
            yield self.words.format(choice=choice), changes

    def step(self, changes: Changes) -> str:
        """The first step that differs."""
        return next(step for step in STEPS if step in changes)
