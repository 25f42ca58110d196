"""attnbench: which attention implementation is right, which is fast, which fits in memory.

From Python, `check`, `compare`, `run` and `fastest` do what the commands of these names do, `load` reads a stored run,
and `table` and `samples` read many as tables. `attention` computes attention as a policy chooses, and
`register_attention` makes it an attention of the package transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnbench.api import check, compare, fastest, load, run, samples, table
    from attnbench.contract.dispatch import attention, register_attention

__all__ = ["attention", "check", "compare", "fastest", "load", "register_attention", "run", "samples", "table"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - its type depends on the name
    """Import public names at first use (PEP 562): importing attnbench takes no time, and needs no pandas."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    needs_no_more = {"attention", "register_attention"}
    module = importlib.import_module("attnbench.contract.dispatch" if name in needs_no_more else "attnbench.api")
    globals()[name] = found = getattr(module, name)  # looked up once: calls of `attention` are short
    return found
