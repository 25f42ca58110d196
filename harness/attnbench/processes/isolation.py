"""Whether two states of a file can share a process; and where each side's process looks for modules if they cannot."""

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

from attnbench.plugins import split
from attnbench.processes.worker_client import ROOT
from attnbench.storage.events import Side

SIDES_FOLDER = "sides"
"""Below a run's folder, as long as the run is in progress: what was checked out, and links to what workers import."""
PACKAGE = "attnbench"
"""Always this harness, whatever the side holds."""
SHARED = ("torch.library", "cpp_extension", "importlib", "__import__")
"""Whoever uses these registers something for the whole process, or imports what cannot be predicted."""
RESERVED = sys.stdlib_module_names | {"torch"}
"""Never a side's own, whatever lies in its folders."""
REQUIRED = frozenset({
    "filelock", "fsspec", "jinja2", "msgspec", "networkx", "numpy", "psutil", "sympy", "triton", "typing_extensions",
})  # fmt: skip
"""What torch and a worker import: a package of such a name is a side's own, a single file lies there by chance."""
SUFFIXES = {".py", ".pyc", ".so"}


def is_self_contained(path: Path, roots: Sequence[Path]) -> bool:
    """Whether the file imports nothing that may belong to a side with one of `roots`, and registers nothing.

    Then two states of it can live in one process without meeting.

    Raises:
        ValueError: it is not Python that can be read.
    """
    text = path.read_text(encoding="utf-8")
    if any(word in text for word in SHARED):
        return False
    folders = [path.parent, *(place for root in roots for place in _places(path, root))]
    names: set[str] = set()  # the first part of each that is imported, anywhere in the file
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                return False
            names.add((node.module or "").split(".")[0])
    names -= RESERVED | {PACKAGE}
    held = [folder / f"{name}.py" for folder in folders for name in names - REQUIRED]
    return not any(file.exists() for file in held) and not any((f / name).is_dir() for f in folders for name in names)


def side_folders(side: Side, links: Path) -> list[Path]:
    """Where a process looks for its side's own packages, before those that are installed.

    A folder that is a package is left out: what lies in it is imported by the package's name. In place of a folder that
    holds what would hide Python's own modules or torch, there is one below `links` with links to the rest.
    """
    files = [file for spec in side.implementations.values() if (file := split(spec)[0]) is not None]
    if not side.root or not files:
        return []
    top = Path(side.root).resolve()
    places = dict.fromkeys(place for file in files for place in _places(file, top))
    kept = [
        place
        for place in sorted(places, key=lambda place: len(place.parts))
        if place.is_dir() and (place in {top, top / "src"} or not (place / "__init__.py").exists())
    ]
    for number, place in enumerate(kept):
        entries = sorted(place.iterdir())
        if any(map(_hides, entries)):
            kept[number] = links / str(number)
            kept[number].mkdir(parents=True, exist_ok=True)
            for entry in entries:
                link = kept[number] / entry.name
                if not _hides(entry) and not link.is_symlink():
                    link.symlink_to(entry)
            kept[number] = kept[number].resolve()
    return kept


def harness_folder(folder: Path) -> Path:
    """Link this harness, and nothing else, into `folder`: where it is installed there are other packages, too."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / PACKAGE
    if not link.is_symlink():
        link.symlink_to(ROOT / PACKAGE, target_is_directory=True)
    return folder.resolve()


def _places(path: Path, root: Path) -> list[Path]:
    """Where packages of a file's side may lie: each folder from its root down to the file's own, and the src in each.

    The outermost comes first. A package lies above the files that import it: so none of what lies beside such a file, a
    `bench/foo.py` for example, takes the place of the package `foo`. And all files of a side share a process: what is
    nearest to one of them is near another by chance.
    """
    top, own = root.resolve(), path.parent.resolve()
    inside = [folder for folder in (own, *own.parents) if folder.is_relative_to(top)] or [top]
    return list(dict.fromkeys(place for folder in reversed(inside) for place in (folder, folder / "src")))


def _hides(entry: Path) -> bool:
    """Whether an entry of a folder would be imported in place of Python's own modules, torch or what torch imports."""
    name = entry.name.partition(".")[0]
    if entry.is_dir():
        return name in RESERVED and (entry / "__init__.py").exists()
    return entry.suffix in SUFFIXES and name in RESERVED | REQUIRED
