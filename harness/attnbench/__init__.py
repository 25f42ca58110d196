"""attnbench: which attention implementation is right, which is fast, which fits in memory.

From Python, stored runs are loaded as tables (`load`, `samples`); measuring is done by the command `attnbench`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnbench.analysis.table import load, samples

__all__ = ["load", "samples"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - what it is follows from the name
    """Import what is public at first use (PEP 562): importing attnbench takes no time, and needs no pandas."""
    if name in __all__:
        from attnbench.analysis import table

        return getattr(table, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
