"""Whether a file of Python is all that it needs, so that two states of it can live in one process without meeting.

And where what it needs may lie, for the process of its own that its side gets where it is not.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

OURS = "attnbench"
"""Always this harness, whatever the side holds."""
SHARED = ("torch.library", "cpp_extension", "importlib", "__import__")
"""Who uses these registers something for the whole process, or imports what cannot be foreseen."""
TAKEN = sys.stdlib_module_names | {"torch"}
"""Never a side's own, whatever lies in its folders."""
NEEDED = frozenset({
    "filelock", "fsspec", "jinja2", "msgspec", "networkx", "numpy", "psutil", "sympy", "triton", "typing_extensions",
})  # fmt: skip
"""What torch and a worker import: a package of such a name is a side's own, a single file lies there by chance."""
SUFFIXES = {".py", ".pyc", ".so"}


def is_alone(path: Path, roots: Sequence[Path]) -> bool:
    """Whether the file imports nothing that may be of a side with one of `roots`, and registers nothing.

    Raises:
        ValueError: it is not Python that can be read.
    """
    text = path.read_text(encoding="utf-8")
    if any(word in text for word in SHARED):
        return False
    folders = [path.parent, *(place for root in roots for place in places(path, root))]
    names = set(_imported(ast.parse(text, filename=str(path)))) - TAKEN - {OURS}
    return not any(_holds(folder, name) for folder in folders for name in names)


def places(path: Path, root: Path) -> list[Path]:
    """Where packages of a file's side may lie: each folder from its root down to the file's own, and the src in each.

    The outermost comes first. A package lies above the files that import it: so none of what lies beside such a file, a
    `bench/foo.py` for example, takes the place of the package `foo`. And all files of a side share a process: what is
    nearest to one of them lies beside another by chance.
    """
    top, own = root.resolve(), path.parent.resolve()
    inside = [folder for folder in (own, *own.parents) if folder.is_relative_to(top)] or [top]
    return list(dict.fromkeys(place for folder in reversed(inside) for place in (folder, folder / "src")))


def hides(entry: Path) -> bool:
    """Whether an entry of a folder would be found in place of Python's own modules, torch or what torch needs."""
    name = entry.name.partition(".")[0]
    if entry.is_dir():
        return name in TAKEN and (entry / "__init__.py").exists()
    return entry.suffix in SUFFIXES and name in TAKEN | NEEDED


def _imported(tree: ast.Module) -> Iterator[str]:
    """The first part of every name that is imported, anywhere in the file; "" for a relative import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "" if node.level else (node.module or "").split(".")[0]


def _holds(folder: Path, name: str) -> bool:
    is_file = name not in NEEDED and (folder / f"{name}.py").exists()
    return not name or is_file or (folder / name).is_dir()
