"""The five tutorials that this project grew from: each of their tables, computed with the project's building blocks.

`python -m examples.tutorials` prints the tables. docs/tutorials.md explains them, and tests/tutorials compares them
with the numbers that the tutorials print.
"""

from collections.abc import Callable

from torch import Tensor

from examples.tutorials import tutorial_000, tutorial_001, tutorial_002, tutorial_003, tutorial_004

__all__ = ["TUTORIALS"]

TUTORIALS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "000": tutorial_000.tables,
    "001": tutorial_001.tables,
    "002": tutorial_002.tables,
    "003": tutorial_003.tables,
    "004": tutorial_004.tables,
}
"""For each tutorial, the function that returns its tables by name."""
