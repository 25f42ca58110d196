"""attnbench: which attention implementation is right, which is fast, which fits in memory.

From Python, `check`, `run` and `fastest` do what the commands of these names do, and `compare` times implementations
against a baseline. `load` reads one stored run; `table` and `samples` read any number of runs as data frames.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnbench.api import check, compare, fastest, load, run, samples, table

__all__ = ["check", "compare", "fastest", "load", "run", "samples", "table"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the type depends on the name
    """Import public names at first use (PEP 562), so that importing attnbench is quick and needs no pandas."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("attnbench.api"), name)
