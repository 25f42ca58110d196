"""Signatures of other packages' functions at given versions, from tests/data/signatures, and stand-ins with them.

A file in that folder has, for each function, its version, its name, the address of its source, and its parameters in
Python's syntax without annotations. The facts come from that source; defaults are literals.
"""

import inspect
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data" / "signatures"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One function at one version."""

    package: str  # the file's stem
    version: str
    name: str  # qualified by its module
    source: str
    parameters: str

    @property
    def signature(self) -> inspect.Signature:
        """Return the parameters with their kinds and defaults."""
        known: dict[str, Any] = {"__builtins__": {}}  # defaults are literals
        exec(f"def function({self.parameters}): pass", known)  # noqa: S102 - facts of this project
        return inspect.signature(known["function"])

    def stand_in(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Build a function with exactly these parameters, which calls `compute` with all of them by name."""
        signature = self.signature

        def function(*args: object, **kwargs: object) -> object:
            bound = signature.bind(*args, **kwargs)  # TypeError for an unknown parameter
            bound.apply_defaults()
            return compute(**bound.arguments)

        wraps(compute)(function)
        vars(function)["__signature__"] = signature
        return function


@cache
def snapshots() -> tuple[Snapshot, ...]:
    """Load all snapshots, by package, in the order of the files."""
    return tuple(
        Snapshot(package=path.stem, **entry)
        for path in sorted(FOLDER.glob("*.toml"))
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["function"]
    )


def versions(name: str) -> dict[str, Snapshot]:
    """Return the snapshots of a function, by version."""
    found = {each.version: each for each in snapshots() if each.name == name}
    assert found, name
    return found
