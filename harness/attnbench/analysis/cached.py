"""What is made of a run, made once: reports, pictures and page ask for the same of the same results."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from attnbench.analysis.results import Results

T = TypeVar("T")


def once(make: Callable[[Results], T]) -> Callable[[Results], T]:
    """Keeps what was made last, for as long as the same results are asked about; nobody may change it."""
    last: list[tuple[Results, T]] = []

    @wraps(make)
    def remembered(results: Results) -> T:
        if not last or last[0][0] is not results:
            last[:] = [(results, make(results))]
        return last[0][1]

    return remembered
