"""The catalogue of known mistakes: the diagnosis names them, the tests plant them, the detection table counts them.

A mistake is the textbook form with some steps replaced (checking/steps.py). A generator yields every mistake of one
kind that is possible at a workload. To add one without variants, add a line to a table of `forms.py`.
"""

from collections.abc import Iterator

from attnbench.checking.mistakes import forms
from attnbench.checking.mistakes.wrong_masks import wrong_masks
from attnbench.checking.steps import Mistake
from attnbench.workloads.workload import Workload

__all__ = ["Mistake", "catalogue"]


def catalogue(workload: Workload) -> Iterator[Mistake]:
    """Every mistake that is possible at this workload."""
    for generator in (wrong_masks, *forms.KINDS):
        yield from generator(workload)
