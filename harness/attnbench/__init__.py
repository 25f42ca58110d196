"""attnbench finds out which attention implementations are right, which are fast, and which fit in memory.

`check`, `run` and `fastest` do the same as the commands with these names. `compare` times implementations against a
baseline. `load` reads one stored run. `table` and `samples` read any number of stored runs into data frames.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnbench.api import check, compare, fastest, load, run, samples, table

__all__ = ["check", "compare", "fastest", "load", "run", "samples", "table"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the type depends on the name
    """Import a public name at its first use (PEP 562), so that importing attnbench is quick and needs no pandas."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("attnbench.api"), name)
