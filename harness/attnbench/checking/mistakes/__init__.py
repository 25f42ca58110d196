"""The catalogue of known mistakes: the diagnosis names them, the tests plant them, the detection table counts them.

A mistake is the textbook form with some steps replaced (checking/steps.py). A generator yields every mistake of one
kind that is possible at a workload. To add a mistake, `yield wrong(name, words, step=replacement)` in its generator.
"""

from collections.abc import Callable, Iterator

from attnbench.checking.mistakes.gradients import wrong_gradients
from attnbench.checking.mistakes.numerics import wrong_numerics
from attnbench.checking.mistakes.parts import wrong_parts
from attnbench.checking.mistakes.permutations import permutations
from attnbench.checking.mistakes.ranks import wrong_ranks
from attnbench.checking.mistakes.singles import singles
from attnbench.checking.mistakes.wrong_masks import wrong_masks
from attnbench.checking.steps import Mistake
from attnbench.workloads.workload import Workload

__all__ = ["GENERATORS", "Mistake", "catalogue"]

GENERATORS: dict[str, Callable[[Workload], Iterator[Mistake]]] = {
    "masks": wrong_masks,
    "permutations": permutations,
    "parts": wrong_parts,
    "numerics": wrong_numerics,
    "gradients": wrong_gradients,
    "singles": singles,
    "ranks": wrong_ranks,
}


def catalogue(workload: Workload, only: str = "") -> Iterator[Mistake]:
    """Every mistake that is possible at this workload, or those of one generator."""
    for name, generator in GENERATORS.items():
        if only in {"", name}:
            yield from (
                each for each in generator(workload) if not each.is_gradient or workload.direction != "inference"
            )
