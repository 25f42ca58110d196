"""Print docstrings drawn at random, to judge their English: `python -m tools.docstrings SEED [NUMBER]`."""

import ast
import random
import sys
from collections.abc import Iterator

from tools.ratchet import ROOT, python_files

FOLDERS = ("harness", "implementations", "studies", "tools")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def every() -> Iterator[tuple[str, str]]:
    """Yield ("file: name", docstring) for each module, class and function in FOLDERS that has a docstring."""
    for path in (path for folder in FOLDERS for path in python_files(ROOT / folder)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}", text


if __name__ == "__main__":
    seed, number = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100  # noqa: PLR2004 - the name is first
    for count, (place, text) in enumerate(random.Random(seed).sample(list(every()), number), start=1):
        print(f"{count}. {place}\n{text}\n")  # noqa: T201 - this is its output
