"""Whether a file of Python is all that it needs, so that two states of it can live in one process without meeting."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

OURS = "harness"
"""Always this harness, whatever the side holds."""
SHARED = ("torch.library", "cpp_extension", "importlib", "__import__")
"""Who uses these registers something for the whole process, or imports what cannot be foreseen."""


def is_alone(path: Path, roots: Sequence[Path]) -> bool:
    """Whether the file imports nothing of what lies beside it, below `roots` or their src, and registers nothing.

    Raises:
        ValueError: it is not Python that can be read.
    """
    text = path.read_text(encoding="utf-8")
    if any(word in text for word in SHARED):
        return False
    folders = [path.parent, *roots, *(root / "src" for root in roots)]
    names = set(_imported(ast.parse(text, filename=str(path))))
    return not any(_holds(folder, name) for folder in folders for name in names if name != OURS)


def _imported(tree: ast.Module) -> Iterator[str]:
    """The first part of every name that is imported, anywhere in the file; "" for a relative import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "" if node.level else (node.module or "").split(".")[0]


def _holds(folder: Path, name: str) -> bool:
    return not name or (folder / f"{name}.py").exists() or (folder / name).is_dir()
