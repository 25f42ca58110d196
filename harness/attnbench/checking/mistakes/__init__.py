"""The catalogue of known mistakes: the diagnosis names them, the tests plant them, the detection table counts them.

A mistake is the textbook form with some steps replaced (checking/steps.py). A generator yields every mistake of one
kind that is possible at a workload. To add a mistake, `yield wrong(name, words, step=replacement)` in its generator.
"""

from collections.abc import Callable, Iterator

from attnbench.checking.mistakes.forms import wrong_forms
from attnbench.checking.mistakes.gradients import wrong_gradients
from attnbench.checking.mistakes.wrong_masks import wrong_masks
from attnbench.checking.steps import Mistake
from attnbench.workloads.workload import Workload

__all__ = ["GENERATORS", "Mistake", "catalogue"]

GENERATORS: dict[str, Callable[[Workload], Iterator[Mistake]]] = {
    "masks": wrong_masks,
    "forms": wrong_forms,
    "gradients": wrong_gradients,
}


def catalogue(workload: Workload, only: str = "") -> Iterator[Mistake]:
    """Every mistake that is possible at this workload, or those of one generator."""
    for name, generator in GENERATORS.items():
        if only in {"", name}:
            yield from generator(workload)
