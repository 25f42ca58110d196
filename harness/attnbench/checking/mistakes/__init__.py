"""The catalogue of known mistakes: what the diagnosis names, the tests plant and the detection table counts.

A mistake is the textbook form with one of its steps replaced (checking/steps.py). To add one, write the replacement,
decorated with `@mistake`, into the module of the step: the function's name and docstring are the mistake's.
"""

from collections.abc import Iterator
from types import ModuleType

from attnbench.checking.mistakes import features, ranks, scores, weights
from attnbench.checking.steps import DEFAULTS, Mistake
from attnbench.workloads.workload import Workload

__all__ = ["Mistake", "catalogue"]

MODULES = {"scores": scores, "weights": weights, "features": features, "ranks": ranks}


def of_modules(*modules: ModuleType) -> tuple[Mistake, ...]:
    """The mistakes of some modules, in the order of the steps."""
    every = [value for module in modules for value in vars(module).values() if isinstance(value, Mistake)]
    return tuple(sorted(every, key=lambda mistake: [*DEFAULTS].index(mistake.step)))


ALL = of_modules(*MODULES.values())
"""Every mistake, in the order of the steps."""


def catalogue(workload: Workload) -> Iterator[Mistake]:
    """Every mistake that can be made at this workload; one with a free choice, such as a tile, once for each choice."""
    for mistake in ALL:
        yield from mistake.planted(workload)
