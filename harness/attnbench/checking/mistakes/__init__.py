"""The catalogue of known mistakes, as data: what the diagnosis names, the tests plant and the detection table counts.

A mistake is the textbook form with some of its steps changed (checking/steps.py). To add one, add a value to
MISTAKES in the module of the first step that it changes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from attnbench.checking.mistakes import (
    changed_scores,
    context,
    gradients,
    heads,
    masked_scores,
    memory,
    output,
    projection,
    scores,
    tiles,
    weights,
)
from attnbench.checking.mistakes.kind import Mistake
from attnbench.checking.steps import Changes
from attnbench.workloads.workload import Workload

__all__ = ["Mistake", "Planted", "catalogue", "names"]

MODULES = (projection, heads, scores, changed_scores, masked_scores, tiles, weights, context, output, gradients, memory)
ALL: tuple[Mistake, ...] = tuple(mistake for module in MODULES for mistake in module.MISTAKES)


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A mistake as it stands at one workload."""

    mistake: Mistake
    words: str
    changes: Changes = field(repr=False)

    @property
    def name(self) -> str:
        """The mistake's name."""
        return self.mistake.name


def names() -> list[str]:
    """The name of every mistake, in the order of the steps."""
    return [mistake.name for mistake in ALL]


def catalogue(workload: Workload) -> Iterator[Planted]:
    """Every mistake that can be made at this workload; one with a free choice, such as a tile, once for each choice."""
    for mistake in ALL:
        if mistake.fits(workload):
            for words, changes in mistake.forms(workload):
                yield Planted(mistake=mistake, words=words, changes=changes)
